"""Requests that a server takes up after we have given them up leave no upload (A20, A22)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tidegate
from tests.kit.children import await_true
from tests.kit.s3_campaign import uploads_at
from tests.kit.s3_rig import PART_BYTES, Rig
from tests.kit.scripted_s3 import Reply, Request, ScriptedS3, refusal
from tests.kit.seaweed import Seaweed
from tests.kit.states import filled, random_state
from tidegate.cli import main
from tidegate.storage import ObjectExistsError, S3Options, S3Store, StorageError, StoreTimeoutError
from tidegate.storage.s3_debts import LATE_S
from tidegate.storage.s3_errors import Effect, effect_of, s3_error
from tidegate.storage.s3_writer import abort_unfinished

pytest.importorskip("boto3", reason="needs boto3: pip install 'tidegate[dev]'")

QUICK: dict[str, Any] = {"timeout_s": 1.0, "deadline_s": 1.5}
OPERATIONS = ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "AbortMultipartUpload"]


class Frost:
    """Freezes the server at the moment when a certain call of a rig is to be sent, so that it lies there unread."""

    def __init__(self, server: Seaweed, rig: Rig, operation: str) -> None:
        self._stack = contextlib.ExitStack()
        rig.faults.change(operation, lambda request: self._stack.enter_context(server.frozen()))

    def __enter__(self) -> Frost:
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()

    def thaw(self) -> None:
        self._stack.close()


def write_in_vain(store: S3Store, *, gives_up: bool = False) -> None:
    """Write an object of two parts to a server that freezes, and give it up."""
    writer = store.create("a")
    with contextlib.suppress(StoreTimeoutError):
        writer.append(memoryview(bytes(PART_BYTES))).result(60)
        writer.append(memoryview(b"rest"))  # goes into the server's socket as a whole
        if not gives_up:
            writer.seal()
    writer.abort()
    assert store.debts.unpaid() == ["a"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_A20_nothing_is_left_of_a_write_at_a_server_that_froze(
    aws_environment: Seaweed, run_prefix: str, operation: str
) -> None:
    """Whichever call it had not read: it takes that up as soon as it goes on, while the store is being closed."""
    rig = Rig(aws_environment, run_prefix, **QUICK)
    with Frost(aws_environment, rig, operation) as frost:
        write_in_vain(rig.store, gives_up=operation == "AbortMultipartUpload")
        frost.thaw()
        rig.store.close()
        assert rig.store.debts.unpaid() == []
        assert rig.uploads() == []
        assert list(rig.store.list()) == [], "nor the object, which a completion has made late"
    rig.close()


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_A20_a_process_that_lives_on_goes_on_saving(aws_environment: Seaweed, run_prefix: str, operation: str) -> None:
    rig = Rig(aws_environment, run_prefix, **QUICK)
    with tidegate.CheckpointEngine(rig.store, codec="raw", chunk_bytes=6 << 20) as engine:
        with Frost(aws_environment, rig, operation) as frost:
            engine.save_async(random_state(12 << 20), step=1)
            with pytest.raises(tidegate.SaveError):
                engine.wait()
            frost.thaw()
            engine.save_async(filled(2.0), step=2).result(60)
        assert engine.steps() == [2]
    rig.store.close()
    assert rig.store.debts.unpaid() == []
    assert rig.uploads() == []
    rig.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gc", "exit"])
def test_A22_what_a_frozen_server_takes_up_after_the_store_was_closed_is_found_later(
    aws_environment: Seaweed, run_prefix: str, way: str
) -> None:
    """Nobody can know of it then: closing does not wait for the server, and says so."""
    rig = Rig(aws_environment, run_prefix, **QUICK)
    with Frost(aws_environment, rig, "CreateMultipartUpload") as frost:
        write_in_vain(rig.store)
        start_s = time.monotonic()
        rig.store.close()
        assert time.monotonic() - start_s < 2 * QUICK["deadline_s"] + QUICK["timeout_s"]
        assert rig.store.debts.unpaid() == ["a"]
        frost.thaw()
    num_creates = rig.faults.num_calls["CreateMultipartUpload"]
    assert await_true(lambda: len(rig.uploads()) == num_creates)
    if way == "gc":
        assert main(["gc", f"s3://bucket/{run_prefix}", "--min-age-s", "0"]) == 0
    else:
        abort_unfinished()
        assert rig.store.debts.unpaid() == []
    assert rig.uploads() == []
    rig.close()


class LateS3(ScriptedS3):
    """Takes up creates only after it has been asked, and has answered, which uploads there are."""

    def __init__(self, upstream_url: str) -> None:
        super().__init__(self.script, upstream_url)
        self._has_listed = threading.Event()

    def script(self, request: Request) -> Reply | None:
        if request.operation == "CreateMultipartUpload":
            assert self._has_listed.wait(60)
        if request.operation == "ListMultipartUploads":
            reply = self.forward(request)
            self._has_listed.set()
            return reply
        return None


@contextlib.contextmanager
def opened(front: ScriptedS3, prefix: str, **options: Any) -> Iterator[S3Store]:
    """A store on a server that is scripted; by default it gives up soon."""
    with front:
        store = S3Store("bucket", prefix, options=S3Options(endpoint_url=front.endpoint_url, **{**QUICK, **options}))
        store.prepare()
        yield store
        store.close()


def fail_to_write(store: S3Store) -> None:
    writer = store.create("a")
    writer.append(memoryview(bytes(16 << 20)))
    with pytest.raises(StorageError):
        writer.seal()
    writer.abort()


@pytest.mark.parametrize("occasion", ["prepare", "close", "exit"])
def test_A20_uploads_that_begin_behind_our_look_are_aborted(
    aws_environment: Seaweed, run_prefix: str, occasion: str
) -> None:
    front = LateS3(aws_environment.endpoint_url)
    with opened(front, run_prefix) as store:
        fail_to_write(store)
        assert front.num_requests("ListMultipartUploads") == 1
        num_creates = front.num_requests("CreateMultipartUpload")
        assert num_creates > 0
        start_s = time.monotonic()
        if occasion == "prepare":
            assert await_true(lambda: len(uploads_at(aws_environment, run_prefix)) == num_creates)
            store.prepare()
        elif occasion == "close":
            store.close()
        else:
            abort_unfinished()
        assert time.monotonic() - start_s < LATE_S, "it ends as soon as all are found"
        assert uploads_at(aws_environment, run_prefix) == []
        assert store.debts.unpaid() == []
        assert front.num_requests("AbortMultipartUpload") == num_creates


def test_A20_a_late_upload_of_an_object_that_succeeded_is_aborted_too(
    aws_environment: Seaweed, run_prefix: str
) -> None:
    """Its first create is taken up when the second one's upload has been completed."""

    class First(LateS3):
        def script(self, request: Request) -> Reply | None:
            is_second = request.operation == "CreateMultipartUpload" and self.num_requests(request.operation) > 1
            return None if is_second else super().script(request)

    front = First(aws_environment.endpoint_url)
    with opened(front, run_prefix, deadline_s=60.0) as store:  # the second create has to get through on a busy machine
        writer = store.create("a")
        writer.append(memoryview(bytes(16 << 20)))
        writer.seal()
        num_creates = front.num_requests("CreateMultipartUpload")
        assert num_creates > 1
        assert await_true(lambda: len(uploads_at(aws_environment, run_prefix)) == num_creates - 1)
        store.close()
        assert uploads_at(aws_environment, run_prefix) == []
        assert store.stat("a").num_bytes == 16 << 20


def test_A20_an_object_that_is_completed_behind_our_look_is_removed(aws_environment: Seaweed, run_prefix: str) -> None:
    """The write had failed, so nobody counts on it."""
    has_looked = threading.Event()

    def script(request: Request) -> Reply | None:
        if request.operation == "CompleteMultipartUpload":
            has_looked.wait(60)
        if request.operation == "AbortMultipartUpload" and not has_looked.is_set():
            return Reply(204)
        if request.operation == "HeadObject" and front.num_requests("AbortMultipartUpload") > 0:
            reply = front.forward(request)
            has_looked.set()
            return reply
        return None

    front = ScriptedS3(script, aws_environment.endpoint_url)
    with opened(front, run_prefix) as store:
        fail_to_write(store)
        assert await_true(lambda: "a" in {stat.key for stat in store.list()})
        store.close()
        assert list(store.list()) == []
        assert store.debts.unpaid() == []


def test_A20_who_writes_the_object_anew_keeps_the_upload(aws_environment: Seaweed, run_prefix: str) -> None:
    """Though all that the first writer may have left has to go, even what the server takes up late."""
    may_begin = threading.Event()

    def script(request: Request) -> Reply | None:
        if request.operation == "CreateMultipartUpload" and is_first:
            may_begin.wait(60)
        return None

    is_first = True
    front = ScriptedS3(script, aws_environment.endpoint_url)
    with opened(front, run_prefix) as store:
        fail_to_write(store)
        num_creates = front.num_requests("CreateMultipartUpload")
        is_first = False
        writer = store.create("a")
        writer.append(memoryview(bytes(16 << 20))).result(60)
        store.prepare()
        may_begin.set()
        assert await_true(lambda: len(uploads_at(aws_environment, run_prefix)) == num_creates + 1)
        store.prepare()
        writer.seal()
        store.close()
        assert uploads_at(aws_environment, run_prefix) == []
        assert store.debts.unpaid() == []
        assert store.stat("a").num_bytes == 16 << 20


@pytest.mark.parametrize("is_late", [False, True])
def test_A20_an_upload_that_a_late_part_may_bring_back_is_aborted_again(
    aws_environment: Seaweed, run_prefix: str, is_late: bool
) -> None:
    """As AWS says of its own: parts that are under way may survive an abort. Where all were answered, one is enough."""

    def script(request: Request) -> Reply | None:
        if request.operation == "UploadPart":
            return Reply(stalls=True) if is_late else refusal(400, "InvalidRequest")
        if request.operation == "AbortMultipartUpload" and is_late:
            is_first = front.num_requests("AbortMultipartUpload") == 1
            return Reply(204) if is_first else None
        return None

    front = ScriptedS3(script, aws_environment.endpoint_url)
    with opened(front, run_prefix) as store:
        fail_to_write(store)
        assert bool(uploads_at(aws_environment, run_prefix)) == is_late
        store.close()
        assert uploads_at(aws_environment, run_prefix) == []
        assert store.debts.unpaid() == []
        assert (front.num_requests("AbortMultipartUpload") > 1) == is_late


@pytest.mark.parametrize("is_answered", [False, True])
def test_A20_closing_waits_for_late_requests_only_where_there_may_be_some(
    aws_environment: Seaweed, run_prefix: str, is_answered: bool
) -> None:
    """And for LATE_S then, though none ever comes."""

    def script(request: Request) -> Reply | None:
        if request.operation == "CreateMultipartUpload":
            return refusal(403, "AccessDenied") if is_answered else Reply(stalls=True)
        return None

    front = ScriptedS3(script, aws_environment.endpoint_url)
    with opened(front, run_prefix) as store:
        fail_to_write(store)
        start_s = time.monotonic()
        store.close()
        took_s = time.monotonic() - start_s
        assert store.debts.unpaid() == []
        if is_answered:
            assert took_s < 1.0
            assert front.num_requests("ListMultipartUploads") == 0
        else:
            assert LATE_S - 1.0 < took_s < LATE_S + 2 * QUICK["deadline_s"]


def test_A20_what_we_may_not_list_keeps_nobody_waiting(aws_environment: Seaweed, run_prefix: str) -> None:
    def script(request: Request) -> Reply | None:
        if request.operation == "CreateMultipartUpload":
            return Reply(stalls=True)
        return refusal(403, "AccessDenied") if request.operation == "ListMultipartUploads" else None

    with opened(ScriptedS3(script, aws_environment.endpoint_url), run_prefix) as store:
        fail_to_write(store)
        assert store.debts.unpaid() == []


def errors() -> list[tuple[Exception, Effect]]:
    from botocore import exceptions as of
    from botocore.parsers import ResponseParserError

    def answer(status: int) -> Exception:
        return of.ClientError({"Error": {"Code": "x"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")

    return [
        (answer(403), Effect.NONE),
        (answer(503), Effect.PERHAPS),
        (answer(200), Effect.PERHAPS),
        (answer(504), Effect.LATER),
        (of.EndpointConnectionError(endpoint_url="u"), Effect.NONE),
        (of.ConnectTimeoutError(endpoint_url="u"), Effect.NONE),
        (of.ReadTimeoutError(endpoint_url="u"), Effect.LATER),
        (of.ConnectionClosedError(endpoint_url="u"), Effect.LATER),
        (ResponseParserError("no XML"), Effect.PERHAPS),
        (ConnectionResetError("reset"), Effect.LATER),
        (TypeError("a mistake of ours"), Effect.PERHAPS),
    ]


@pytest.mark.parametrize(("exc", "effect"), errors(), ids=repr)
def test_an_error_tells_what_may_have_become_of_the_request(exc: Exception, effect: Effect) -> None:
    assert effect_of(exc) is effect
    ours = s3_error(exc, action="write", url="s3://bucket/a", key="a")
    ours.__cause__ = exc
    assert effect_of(ours) is effect


def test_an_error_of_ours_tells_it_too() -> None:
    assert effect_of(StoreTimeoutError("the deadline passed while bytes trickled")) is Effect.LATER
    assert effect_of(ObjectExistsError("there already")) is Effect.NONE
    assert effect_of(KeyboardInterrupt()) is Effect.LATER
