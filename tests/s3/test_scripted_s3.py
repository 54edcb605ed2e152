"""What a real server cannot be made to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.kit.scripted_s3 import Reply, Request, ScriptedS3
from tidegate.storage import ObjectExistsError, S3Options, S3Store, StoreIOError, StoreTimeoutError
from tidegate.storage.s3_reader import RANGE_BYTES

TEXT = bytes(range(250)) * 4


@pytest.fixture
def opened(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., S3Store]]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    pytest.importorskip("boto3", reason="needs boto3: pip install 'tidegate[dev]'")
    stores: list[S3Store] = []

    def open_one(server: ScriptedS3, deadline_s: float = 30.0) -> S3Store:
        options = S3Options(endpoint_url=server.endpoint_url, timeout_s=0.5, deadline_s=deadline_s)
        stores.append(S3Store("bucket", options=options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def ranged(request: Request, text: bytes, **fields: object) -> Reply:
    """The answer that a GET should have, with a Range or without."""
    if "range" not in request.headers:
        return Reply(200, text, **fields)  # type: ignore[arg-type]
    first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
    body = text[first : last + 1]
    headers = {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(text)}"}
    return Reply(206, body, {**headers, **fields.pop("headers", {})}, **fields)  # type: ignore[arg-type, dict-item]


@pytest.mark.parametrize("stalls", [False, True])
def test_a_body_that_ends_early_is_read_on(opened: Callable[..., S3Store], stalls: bool) -> None:
    def script(request: Request) -> Reply:
        cut_bytes = 100 if request.number < 2 else None
        return ranged(request, TEXT, cut_bytes=cut_bytes, stalls=stalls and not request.number)

    with ScriptedS3(script) as server:
        out = bytearray(900)
        opened(server).read_into("a", 50, memoryview(out))
        assert bytes(out) == TEXT[50:950]
        assert len(server.requests) == 3


@pytest.mark.parametrize("stalls", [False, True])
def test_a_body_that_never_ends_is_an_error(opened: Callable[..., S3Store], stalls: bool) -> None:
    """Of a timeout also where it is cut off: on a machine that is busy the deadline may pass in mid-read."""
    with ScriptedS3(lambda request: ranged(request, TEXT, cut_bytes=0, stalls=stalls)) as server:
        store = opened(server, deadline_s=1.0)
        kinds = StoreTimeoutError if stalls else (StoreIOError, StoreTimeoutError)
        with pytest.raises(kinds):
            store.read_into("a", 0, memoryview(bytearray(900)))
        with pytest.raises(kinds):
            store.read_all("a", limit_bytes=1000)


def test_a_body_that_trickles_ends_by_the_deadline(opened: Callable[..., S3Store]) -> None:
    """Though no pause in it is as long as the timeout."""
    with ScriptedS3(lambda request: ranged(request, TEXT, trickles=True)) as server:
        store = opened(server, deadline_s=1.0)
        for read in (
            lambda: store.read_into("a", 0, memoryview(bytearray(900))),
            lambda: store.read_all("a", limit_bytes=1000),
        ):
            start_s = time.monotonic()
            with pytest.raises(StoreTimeoutError):
                read()
            assert time.monotonic() - start_s < 8


def test_no_answer_at_all_is_an_error(opened: Callable[..., S3Store]) -> None:
    with ScriptedS3(lambda request: Reply(stalls=True)) as server:
        store = opened(server, deadline_s=1.0)
        with pytest.raises(StoreTimeoutError, match="does not answer"):
            store.stat("a")
        writer = store.create("a", replace=True)
        writer.append(memoryview(b"x"))
        with pytest.raises(StoreTimeoutError):
            writer.seal()
        writer.abort()


def test_an_object_that_changes_between_reads_is_an_error(opened: Callable[..., S3Store]) -> None:
    """Even at a server that does not look at If-Match."""
    etags = iter(['"1"', '"1"', '"2"', '"2"'])
    with ScriptedS3(lambda request: ranged(request, TEXT, headers={"ETag": next(etags)})) as server:
        store = opened(server)
        out = memoryview(bytearray(10))
        store.read_into("a", 0, out)
        store.read_into("a", 10, out)
        with pytest.raises(StoreIOError, match="replaced while it was being read") as caught:
            store.read_into("a", 20, out)
        assert caught.value.errno is None
        store.read_into("a", 20, out)  # it is another object now
        assert [request.headers.get("if-match") for request in server.requests] == [None, '"1"', '"1"', None]


def test_an_object_that_changes_within_a_long_read_is_an_error(opened: Callable[..., S3Store]) -> None:
    text = bytes(RANGE_BYTES + 4096)

    def script(request: Request) -> Reply:
        return ranged(request, text, headers={"ETag": f'"{request.number}"'})

    with ScriptedS3(script) as server, pytest.raises(StoreIOError, match="replaced"):
        opened(server).read_into("a", 0, memoryview(bytearray(len(text))))


def test_an_object_that_got_shorter_is_an_error(opened: Callable[..., S3Store]) -> None:
    with ScriptedS3(lambda request: ranged(request, TEXT[:100])) as server:
        with pytest.raises(StoreIOError, match="it has 100") as caught:
            opened(server).read_into("a", 50, memoryview(bytearray(100)))
        assert caught.value.errno is None
        assert len(server.requests) == 1


def test_another_range_than_asked_for_is_an_error(opened: Callable[..., S3Store]) -> None:
    reply = Reply(206, TEXT[:100], {"Content-Range": "bytes 0-99/1000"})
    with ScriptedS3(lambda request: reply) as server, pytest.raises(StoreIOError, match="the server sends 0 to 100"):
        opened(server).read_into("a", 50, memoryview(bytearray(100)))


def test_a_server_without_conditional_writes_is_found_out_once(opened: Callable[..., S3Store]) -> None:
    objects: dict[str, bytes] = {}

    def script(request: Request) -> Reply:
        name = request.path.partition("?")[0]
        if request.method == "PUT":
            objects[name] = b""
        elif request.method == "DELETE":
            objects.pop(name, None)
            return Reply(204)
        return Reply(200, headers={"Last-Modified": "Mon, 01 Jan 2001 00:00:00 GMT"}) if name in objects else Reply(404)

    with ScriptedS3(script) as server:
        store = opened(server)
        store.compare_and_put("COMMIT", b"", expected=None)
        (note,) = store.prepare()
        assert "does not honour conditional writes" in note
        assert store.prepare() == []
        with pytest.raises(ObjectExistsError):
            store.compare_and_put("COMMIT", b"", expected=None)
        writer = store.create("COMMIT")
        with pytest.raises(ObjectExistsError):
            writer.seal()
        writer.abort()
        assert list(objects) == ["/bucket/COMMIT"]
