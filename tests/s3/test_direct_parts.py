"""The further parts of an upload go out like the first, without botocore."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.s3_faults import Faults
from tests.kit.scripted_s3 import Reply, Request, ScriptedS3
from tests.kit.seaweed import ADMIN, Seaweed
from tests.kit.wrapping import content, put
from tidegate.storage import S3Options, S3Store
from tidegate.storage.s3_client import make_client
from tidegate.storage.s3_options import with_environment

pytest.importorskip("awscrt", reason="needs awscrt: pip install 'tidegate[dev]'")
from tidegate.storage.s3_direct import _MAX_KEPT, DirectClient, Pattern

PART_BYTES = 5 << 20
OPTIONS: dict[str, Any] = {"part_bytes": PART_BYTES, "concurrency": 1}
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=a/b/20260101/eu-west-1/s3/aws4_request, SignedHeaders=h, Signature=s",
    "X-Amz-Content-SHA256": b"UNSIGNED-PAYLOAD",
    "X-Amz-Date": "20260101T000000Z",
    "Content-Length": "5",
    "User-Agent": b"me",
    "x-amz-checksum-crc32": "AAAA",
    "x-amz-request-payer": "requester",
}


class Asked:
    """A signed request, as botocore has it."""

    def __init__(self, url: str = "http://h:1/b/k%20k?uploadId=u&partNumber=1", **changed: object) -> None:
        self.url = url
        named = {name.replace("_", "-"): value for name, value in changed.items()}
        self.headers = {name: value for name, value in {**SIGNED, **named}.items() if value is not None}
        self.body = b""


def patterns_of(client: Any) -> dict[str, Pattern]:
    assert isinstance(client, DirectClient)
    return client._patterns


def test_a_pattern_keeps_what_all_parts_have() -> None:
    pattern = Pattern.of(Asked())
    assert pattern == Pattern(
        "http://h:1/b/k%20k", (("user-agent", "me"), ("x-amz-request-payer", "requester")), "eu-west-1"
    )


@pytest.mark.parametrize(
    "asked",
    [
        Asked(X_Amz_Content_SHA256="0" * 64),
        Asked(Content_MD5="AAAA"),
        Asked(Authorization=None),
        Asked(Authorization=SIGNED["Authorization"].replace("/s3/", "/s3express/")),  # type: ignore[union-attr,arg-type]
        Asked(Authorization="AWS4-ECDSA-P256-SHA256 Credential=a/20260101/s3/aws4_request, Signature=s"),
        Asked("http://h:1/b/k?uploadId=u&partNumber=1&x-id=UploadPart"),
    ],
    ids=["hash of the part", "MD5", "unsigned", "directory bucket", "several regions", "more in the query"],
)
def test_what_is_signed_in_another_way_stays_with_botocore(asked: Asked) -> None:
    assert Pattern.of(asked) is None


@pytest.fixture
def models(aws_environment: Seaweed, run_prefix: str) -> Iterator[tuple[S3Store, Any, list[str]]]:
    """A store whose prefix has all kinds of characters, its client, and the calls that botocore made of its model."""
    options = with_environment(S3Options(**OPTIONS))
    client: Any = make_client(options)
    asked: list[str] = []
    client.meta.events.register("before-call.s3", lambda model, **_: asked.append(model.name))
    store = S3Store("bucket", f"{run_prefix}/a b+ü%20=&~(1)", options=options, client=client)
    yield store, client, asked
    store.close()
    client.close()


def test_only_the_first_part_is_made_by_botocore(models: tuple[S3Store, Any, list[str]]) -> None:
    """And the server takes the signatures of the others, whatever is in the key."""
    store, client, asked = models
    faults = Faults(client)
    expected = os.urandom(4 * PART_BYTES + 7)
    put(store, "x/y z", expected)
    assert content(store, "x/y z") == expected
    assert asked.count("UploadPart") == 1
    assert faults.num_calls["UploadPart"] >= 3
    assert faults.num_at_once["UploadPart"] == 1


def test_patterns_of_old_uploads_are_let_go(models: tuple[S3Store, Any, list[str]]) -> None:
    store, client, _ = models
    put(store, "a", bytes(PART_BYTES))
    (pattern,) = patterns_of(client).values()
    patterns_of(client).update({str(i): pattern for i in range(_MAX_KEPT)})
    put(store, "b", bytes(PART_BYTES))
    assert len(patterns_of(client)) <= _MAX_KEPT + 1
    assert content(store, "b") == bytes(PART_BYTES)


def test_an_error_under_a_status_of_200_is_one(aws_environment: Seaweed, run_prefix: str) -> None:
    """The part is sent again."""
    seen: list[Request] = []

    def script(request: Request) -> Reply | None:
        if request.operation != "UploadPart":
            return None
        seen.append(request)
        if len(seen) == 3:
            return Reply(200, b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>m</Message></Error>")
        return None

    with ScriptedS3(script, aws_environment.endpoint_url) as front:
        store = S3Store("bucket", run_prefix, options=S3Options(endpoint_url=front.endpoint_url, **OPTIONS))
        expected = os.urandom(3 * PART_BYTES)
        put(store, "a", expected)
        assert content(store, "a") == expected
        numbers = [request.query["partNumber"] for request in seen]
        assert numbers.count(numbers[2]) == 2
        store.close()


def test_session_tokens_and_options_go_with_every_part(
    aws_environment: Seaweed, run_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a token")
    etags = iter(range(100))

    def script(request: Request) -> Reply:
        if request.operation == "CreateMultipartUpload":
            text = b"<InitiateMultipartUploadResult><UploadId>u/+=u</UploadId></InitiateMultipartUploadResult>"
            return Reply(200, text)
        if request.operation == "CompleteMultipartUpload":
            return Reply(200, b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")
        return Reply(200 if request.method == "PUT" else 404, b"", {"ETag": f'"{next(etags)}"'})

    options = S3Options(requester_pays=True, checksum="crc32c", **OPTIONS)
    with ScriptedS3(script) as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.endpoint_url)
        store = S3Store("bucket", run_prefix, options=options)
        put(store, "a", bytes(3 * PART_BYTES), replace=True)
        store.close()
        parts = [request for request in front.requests if request.operation == "UploadPart"]
    assert len(parts) == 3
    for part in parts:
        assert part.query["uploadId"] == "u/+=u"
        assert part.access_key == ADMIN.access_key
        assert part.headers["x-amz-security-token"] == "a token"
        assert "x-amz-security-token" in part.headers["authorization"]
        assert part.headers["x-amz-request-payer"] == "requester"
        assert part.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert len(part.headers["x-amz-checksum-crc32c"]) == 8
        assert " tidegate" in part.headers["user-agent"]
