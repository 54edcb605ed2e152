"""What goes wrong between us and a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import REPOSITORY
from tests.kit.s3_rig import PART_BYTES, Rig
from tests.kit.seaweed import ADMIN, Identity, Seaweed
from tests.kit.states import filled, random_state
from tests.kit.store_checks import leftovers
from tests.kit.wrapping import content, put
from tidegate.storage import (
    ObjectExistsError,
    S3Options,
    S3Store,
    StorageError,
    StoreFullError,
    StoreIOError,
    StorePermissionError,
    StoreTimeoutError,
)
from tidegate.storage.s3_writer import abort_unfinished


@pytest.fixture
def rig(aws_environment: Seaweed, run_prefix: str) -> Iterator[Rig]:
    rig = Rig(aws_environment, run_prefix)
    yield rig
    rig.close()


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (500, "InternalError"), (400, "RequestTimeout"), (400, "BadDigest"), (403, "ExpiredToken")],
)
@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_passing_failures_are_passed_over(rig: Rig, operation: str, status: int, code: str) -> None:
    rig.faults.answer(operation, status, code)
    put(rig.store, "a", bytes(PART_BYTES), b"b" * PART_BYTES)
    assert content(rig.store, "a") == bytes(PART_BYTES) + b"b" * PART_BYTES
    assert rig.uploads() == []


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
@pytest.mark.parametrize("replace", [False, True])
def test_lost_replies_are_noticed(rig: Rig, operation: str, replace: bool) -> None:
    rig.faults.lose_reply(operation)
    put(rig.store, "a", bytes(PART_BYTES), b"b", replace=replace)
    assert content(rig.store, "a") == bytes(PART_BYTES) + b"b"
    assert rig.uploads() == [] or (replace and operation == "CreateMultipartUpload")


@pytest.mark.parametrize("replace", [False, True])
def test_a_lost_reply_of_a_single_put_is_noticed(rig: Rig, replace: bool) -> None:
    rig.faults.lose_reply("PutObject")
    put(rig.store, "a", b"x", replace=replace)
    assert content(rig.store, "a") == b"x"


def test_a_lost_reply_of_a_commit_is_noticed(rig: Rig) -> None:
    rig.faults.lose_reply("PutObject")
    rig.store.compare_and_put("COMMIT", b"mine", expected=None)
    rig.faults.lose_reply("PutObject")
    rig.store.compare_and_put("COMMIT", b"mine again", expected=b"mine")
    assert content(rig.store, "COMMIT") == b"mine again"


def test_another_commit_is_not_taken_for_ours(rig: Rig) -> None:
    rig.store.compare_and_put("COMMIT", b"theirs", expected=None)
    rig.faults.answer("PutObject", 500, "InternalError")
    with pytest.raises(ObjectExistsError):
        rig.store.compare_and_put("COMMIT", b"mine", expected=None)
    assert content(rig.store, "COMMIT") == b"theirs"


def test_a_completion_that_fails_with_status_200_is_tried_again(rig: Rig) -> None:
    rig.faults.answer("CompleteMultipartUpload", 200, "InternalError", nth=1)
    rig.faults.answer("CompleteMultipartUpload", 200, "SlowDown", nth=2)
    put(rig.store, "a", bytes(PART_BYTES))
    assert rig.faults.num_calls["CompleteMultipartUpload"] == 3
    assert content(rig.store, "a") == bytes(PART_BYTES)


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (500, "InternalError", StoreIOError),
        (403, "AccessDenied", StorePermissionError),
        (403, "ExpiredToken", StorePermissionError),
        (507, "InsufficientStorage", StoreFullError),
        (400, "EntityTooLarge", StoreFullError),
    ],
)
def test_no_upload_is_left_after_a_failure(rig: Rig, operation: str, status: int, code: str, kind: type) -> None:
    rig.faults.answer(operation, status, code, nth=None)
    writer = rig.store.create("a")
    futures = [writer.append(memoryview(bytes(PART_BYTES))) for _ in range(6)]
    with pytest.raises(kind, match=code) as caught:
        writer.seal()
    assert isinstance(caught.value, StorageError)
    writer.abort()
    assert all(future.done() for future in futures)
    assert rig.uploads() == []
    rig.faults.clear()
    assert list(rig.store.list()) == []


def test_no_upload_is_left_after_a_failed_save(rig: Rig) -> None:
    with tidegate.CheckpointEngine(rig.store, codec="raw", chunk_bytes=6 << 20) as engine:
        engine.save_async(filled(1), step=1).result()
        rig.faults.answer("UploadPart", 500, "InternalError", nth=None)
        engine.save_async(random_state(40 << 20), step=2)
        with pytest.raises(tidegate.SaveError, match="InternalError"):
            engine.wait()
        assert rig.uploads() == []
        assert engine.steps() == [1]
        assert_same_bits(engine.load(), filled(1))
        rig.faults.clear()
        engine.save_async(filled(2), step=2).result()


def test_bytes_that_change_on_their_way_are_refused(rig: Rig) -> None:
    """The server checks the checksum that was computed before; the part is sent again."""

    def corrupt(request: Any) -> None:
        changed = bytearray(request.body.read(-1))
        changed[7] ^= 1
        request.body = bytes(changed)
        request.headers["X-Amz-Content-SHA256"] = "UNSIGNED-PAYLOAD"

    rig.faults.change("UploadPart", corrupt)
    put(rig.store, "a", bytes(PART_BYTES))
    assert rig.faults.num_calls["UploadPart"] == 2
    assert content(rig.store, "a") == bytes(PART_BYTES)


def test_clock_skew_is_named(rig: Rig) -> None:
    rig.faults.answer("PutObject", 403, "RequestTimeTooSkewed", nth=None, date="Mon, 01 Jan 2001 00:00:00 GMT")
    with pytest.raises(StorePermissionError, match=r"this machine's clock is \d+ s ahead of the server's: set it"):
        put(rig.store, "a", b"x")
    assert rig.faults.num_calls["PutObject"] == 4  # three of them were the probe's


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        (Identity("", ADMIN.access_key, "wrong", ()), "SignatureDoesNotMatch"),
        (Identity("", "nobody", "wrong", ()), "does not know these keys"),
    ],
)
def test_wrong_keys_are_named(
    aws_environment: Seaweed, run_prefix: str, monkeypatch: pytest.MonkeyPatch, identity: Identity, says: str
) -> None:
    for name, value in aws_environment.environment(identity).items():
        monkeypatch.setenv(name, value)
    store = S3Store(aws_environment.bucket, run_prefix)
    with pytest.raises(StorePermissionError, match=says):
        store.compare_and_put("COMMIT", b"x", expected=None)
    store.close()


def test_missing_credentials_and_profiles_are_named(
    aws_environment: Seaweed, run_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for options, says in ((S3Options(), "give credentials"), (S3Options(profile="none"), "check profile")):
        store = S3Store(aws_environment.bucket, run_prefix, options=options)
        with pytest.raises(StorePermissionError, match=says):
            store.stat("a")
        store.close()


def test_a_missing_bucket_is_named(aws_environment: Seaweed) -> None:
    store = S3Store("no-such-bucket", "x")
    with pytest.raises(StoreIOError, match="there is no such bucket"):
        list(store.list())
    store.close()


def test_nobody_there_is_told_soon(aws_environment: Seaweed) -> None:
    store = S3Store("bucket", options=S3Options(endpoint_url="http://127.0.0.1:9", deadline_s=1.0))
    with pytest.raises(StoreIOError, match="check endpoint_url") as caught:
        store.stat("a")
    assert caught.value.retryable
    store.close()


ACTION_OF = {
    **dict.fromkeys(("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"), "s3:PutObject"),
    **dict.fromkeys(("GetObject", "HeadObject"), "s3:GetObject"),
    "DeleteObject": "s3:DeleteObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListObjectsV2": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListParts": "s3:ListMultipartUploadParts",
}


def test_the_policy_in_the_readme_is_what_is_used(rig: Rig) -> None:
    """Saves, retention, loads, a failed save and a look at leftovers make no other calls, and all of these."""
    with tidegate.CheckpointEngine(rig.store, codec="raw", chunk_bytes=6 << 20, keep_last=1) as engine:
        for step in (1, 2):
            engine.save_async(random_state(20 << 20), step=step).result()
        engine.load()
    writer = rig.store.create("a")
    writer.append(memoryview(bytes(PART_BYTES))).result(60)
    (leftover,) = leftovers(rig.store)
    writer.abort()
    rig.store.delete(leftover)
    text = (REPOSITORY / "README.md").read_text()
    policy = json.loads(text.partition("```json\n")[2].partition("```")[0])
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert {ACTION_OF[operation] for operation in rig.faults.num_calls} == allowed


def test_parts_travel_side_by_side(rig: Rig) -> None:
    writer = rig.store.create("a")
    for _ in range(12):
        writer.append(memoryview(bytes(PART_BYTES)))
    writer.seal()
    assert rig.faults.num_at_once["UploadPart"] == 4
    assert rig.store.stat("a").num_bytes == 12 * PART_BYTES


def test_a_frozen_server_ends_a_write_in_time(rig: Rig, aws_environment: Seaweed) -> None:
    writer = rig.store.create("a")
    writer.append(memoryview(bytes(PART_BYTES))).result(60)
    with aws_environment.frozen():
        start_s = time.monotonic()
        futures = [writer.append(memoryview(bytes(PART_BYTES))) for _ in range(4)]
        with pytest.raises(StoreTimeoutError):
            writer.seal()
        writer.abort()
        assert all(future.done() for future in futures)
        assert time.monotonic() - start_s < 30
    rig.store.prepare()  # as before every save: what could not be aborted is so once the server is back
    assert rig.uploads() == []


@pytest.mark.parametrize("occasion", ["prepare", "close", "exit"])
def test_what_cannot_be_aborted_is_so_later(aws_environment: Seaweed, run_prefix: str, occasion: str) -> None:
    rig = Rig(aws_environment, run_prefix, deadline_s=0.5)
    rig.faults.answer("AbortMultipartUpload", 503, "SlowDown", nth=None)
    writer = rig.store.create("a")
    writer.append(memoryview(bytes(PART_BYTES))).result(60)
    writer.abort()
    assert len(rig.uploads()) == 1
    rig.store.prepare()
    assert len(rig.uploads()) == 1
    rig.faults.clear()
    if occasion == "prepare":
        rig.store.prepare()
    elif occasion == "close":
        rig.store.close()
    else:
        abort_unfinished()
    assert rig.uploads() == []
    num_calls = rig.faults.num_calls["AbortMultipartUpload"]
    rig.store.prepare()
    assert rig.faults.num_calls["AbortMultipartUpload"] == num_calls, "once"
    rig.close()


def test_a_frozen_server_ends_every_other_call_in_time(aws_environment: Seaweed, run_prefix: str) -> None:
    rig = Rig(aws_environment, run_prefix, timeout_s=0.5, deadline_s=1.0)
    put(rig.store, "a", b"x")
    calls = [
        lambda: rig.store.stat("a"),
        lambda: rig.store.read_into("a", 0, memoryview(bytearray(1))),
        lambda: rig.store.compare_and_put("b", b"x", expected=None),
        lambda: list(rig.store.list()),
    ]
    with aws_environment.frozen():
        for call in calls:
            with pytest.raises(StoreTimeoutError):
                call()
    rig.close()


def test_a_server_that_comes_back_is_used_again(rig: Rig, aws_environment: Seaweed) -> None:
    writer = rig.store.create("a")
    writer.append(memoryview(bytes(PART_BYTES))).result(60)
    with aws_environment.frozen():
        future = writer.append(memoryview(bytes(PART_BYTES)))
        with pytest.raises(TimeoutError):
            future.result(2.5)
    writer.seal()
    assert rig.store.stat("a").num_bytes == 2 * PART_BYTES
