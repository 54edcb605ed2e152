"""Servers that are busy, fail, or are not AWS (A20). Killed and frozen ones: tests/cases/test_s3_kills.py."""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from typing import Any

import pytest

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.s3_campaign import uploads_at
from tests.kit.scripted_s3 import Reply, Request, ScriptedS3, refusal
from tests.kit.seaweed import Seaweed
from tests.kit.states import random_state
from tests.kit.wrapping import put
from tidegate.storage import S3Options, S3Store, StoreIOError
from tidegate.storage.s3_body import Body
from tidegate.storage.s3_calls import Calls
from tidegate.storage.s3_client import make_client
from tidegate.storage.s3_errors import s3_error

SLOW_S = 1.0
PART_BYTES = 5 << 20
ENGINE: dict[str, Any] = {"codec": "raw", "chunk_bytes": 6 << 20}


def opened(front: ScriptedS3, prefix: str, **fields: Any) -> S3Store:
    options = S3Options(endpoint_url=front.endpoint_url, part_bytes=PART_BYTES, concurrency=4, **fields)
    return S3Store("bucket", prefix, options=options)


class BadDays:
    """Answers 503 to everything for a while, then 503, 500 and resets to some of the calls."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.kinds: set[str] = set()
        self._numbers = random.Random(20)
        self._end_s = time.monotonic() + SLOW_S

    def __call__(self, request: Request) -> Reply | None:
        if time.monotonic() < self._end_s:
            self.times[request.method, request.path].append(time.monotonic())
            return self._told("slow", refusal(503, "SlowDown"))
        share = self._numbers.random()
        if request.operation == "UploadPart" and share < 0.3:
            return self._told("slow part", refusal(503, "SlowDown"))
        if 0.3 <= share < 0.4:
            return self._told("reset", Reply(resets=True))
        if share > 0.9:
            return self._told("failed", refusal(500, "InternalError"))
        return None

    def _told(self, kind: str, reply: Reply) -> Reply:
        self.kinds.add(kind)
        return reply


def test_A20_a_server_that_is_busy_and_fails_is_outlasted(aws_environment: Seaweed, run_prefix: str) -> None:
    state = random_state(32 << 20)
    script = BadDays()
    with ScriptedS3(script, aws_environment.endpoint_url) as front:
        store = opened(front, run_prefix)
        with tidegate.CheckpointEngine(store, **ENGINE) as engine:
            engine.save_async(state, step=1).result(120)
            assert_same_bits(engine.load(), state)
        store.close()
    assert script.kinds == {"slow", "slow part", "reset", "failed"}
    assert all(len(times) <= 6 for times in script.times.values()), "it backs off"
    assert uploads_at(aws_environment, run_prefix) == []


class _Clock:
    """Time that passes only in pauses; also the event that a call waits for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def wait(self, timeout: float) -> None:
        self.pauses_s.append(timeout)
        self.now_s += timeout

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize("busy_s", [20.0, 1000.0])
def test_A20_pauses_grow_and_differ(busy_s: float) -> None:
    """20 s of SlowDown are outlasted; endless ones end by the deadline."""
    from botocore.exceptions import ClientError

    clock, numbers = _Clock(), random.Random(3)
    calls = Calls(S3Options(), "bucket", "run", client=object(), clock=clock, jitter=numbers.random)  # type: ignore[arg-type]

    def call(attempt: object) -> float:
        if clock.now_s < busy_s:
            raise ClientError({"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "PutObject")
        return clock.now_s

    if busy_s < 30:
        assert calls.run(call, action="put", key="a", stop=clock) >= busy_s  # type: ignore[arg-type]
    else:
        with pytest.raises(StoreIOError, match=r"cannot put s3://bucket/run/a: .*SlowDown.*after \d+ attempts"):
            calls.run(call, action="put", key="a", stop=clock)  # type: ignore[arg-type]
        assert clock.now_s <= 30.0
    shares = [pause_s / min(8.0, 0.2 * 2.0**i) for i, pause_s in enumerate(clock.pauses_s)]
    assert all(0.5 <= share <= 1.0 for share in shares)
    assert len(set(shares)) > 3, "clients that were refused together come back one by one"


def test_A20_a_failure_tells_code_operation_key_and_request(aws_environment: Seaweed, run_prefix: str) -> None:
    def script(request: Request) -> Reply | None:
        if request.operation != "UploadPart":
            return None
        return refusal(400, "InvalidPart", **{"x-amz-request-id": "REQUEST7"})

    with ScriptedS3(script, aws_environment.endpoint_url) as front:
        store = opened(front, run_prefix)
        engine = tidegate.CheckpointEngine(store, **ENGINE)
        with pytest.raises(tidegate.SaveError) as caught:
            engine.save_async(random_state(20 << 20), step=3).result(60)
        message = str(caught.value)
        for part in ("InvalidPart", "HTTP 400", "REQUEST7", "write part", f"s3://bucket/{run_prefix}/step-0000000003/"):
            assert part in message
        with pytest.raises(tidegate.SaveError):
            engine.close()
        store.close()
    assert uploads_at(aws_environment, run_prefix) == []


@pytest.mark.parametrize("transport", ["auto", "urllib3"])
@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (500, "InternalError", "InternalError, HTTP 500"),
        (502, "BadGateway", "HTTP 50"),
        (503, "SlowDown", "SlowDown, HTTP 503"),
        (429, "TooManyRequests", "TooManyRequests, HTTP 429"),
        (400, "RequestTimeout", "RequestTimeout, HTTP 400"),
        (403, "RequestTimeTooSkewed", "RequestTimeTooSkewed, HTTP 403.*clock"),
        (400, "ExpiredToken", "ExpiredToken, HTTP 400"),
        (507, "InsufficientStorage", "HTTP 50"),
    ],
)
def test_A20_a_refused_part_is_told_as_the_server_said(
    aws_environment: Seaweed, run_prefix: str, transport: str, status: int, code: str, told: str
) -> None:
    from botocore.exceptions import ClientError

    def script(request: Request) -> Reply | None:
        return refusal(status, code) if request.operation == "UploadPart" else None

    with ScriptedS3(script, aws_environment.endpoint_url) as front:
        client: Any = make_client(S3Options(endpoint_url=front.endpoint_url, transport=transport))  # type: ignore[arg-type]
        at = {"Bucket": "bucket", "Key": f"{run_prefix}/a"}
        upload = {**at, "UploadId": client.create_multipart_upload(**at)["UploadId"]}
        with memoryview(bytes(PART_BYTES)) as view, pytest.raises(ClientError) as caught:
            client.upload_part(**upload, PartNumber=1, ContentLength=PART_BYTES, Body=Body([view]))
        client.abort_multipart_upload(**upload)
        client.close()
    message = str(s3_error(caught.value, action="write", url="s3://bucket/a", key="a"))
    assert re.search(told, message)


def refuses_what_aws_has_added(request: Request) -> Reply | None:
    """As servers do that are older than these headers."""
    if "aws-chunked" in request.headers.get("content-encoding", "") or "x-amz-trailer" in request.headers:
        return refusal(411, "MissingContentLength")
    if any(name.startswith(("x-amz-checksum", "x-amz-sdk-checksum")) for name in request.headers):
        return refusal(400, "InvalidArgument")
    return None


@pytest.mark.parametrize("by", ["option", "environment"])
def test_A20_a_server_without_checksums_works_by_a_setting(
    aws_environment: Seaweed, run_prefix: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    state = random_state(20 << 20)
    fields: dict[str, Any] = {"checksum": "none"} if by == "option" else {}
    if by == "environment":
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    with ScriptedS3(refuses_what_aws_has_added, aws_environment.endpoint_url) as front:
        store = opened(front, run_prefix, **fields)
        with tidegate.CheckpointEngine(store, **ENGINE) as engine:
            engine.save_async(state, step=1).result(60)
            assert_same_bits(engine.load(), state)
        store.close()


def test_A20_a_server_without_checksums_is_told_apart(aws_environment: Seaweed, run_prefix: str) -> None:
    """By default there are checksums, which it refuses; but never a body in chunks."""
    with ScriptedS3(refuses_what_aws_has_added, aws_environment.endpoint_url) as front:
        store = opened(front, run_prefix)
        for piece in (b"x", bytes(PART_BYTES)):
            with pytest.raises(StoreIOError, match=r"InvalidArgument, HTTP 400.*checksum=none"):
                put(store, "a", piece)
        store.close()
        assert not any("aws-chunked" in request.headers.get("content-encoding", "") for request in front.requests)


def test_A20_a_request_without_an_id_is_told_without_one() -> None:
    from botocore.exceptions import ClientError

    error = ClientError({"Error": {"Code": "InvalidPart"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "UploadPart")
    assert "[InvalidPart, HTTP 400];" in str(s3_error(error, action="write", url="s3://b/a", key="a"))
