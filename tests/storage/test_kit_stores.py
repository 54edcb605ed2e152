"""The stores with faults do what they say, once they are armed."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from tests.kit.store_checks import TIMEOUT_S, leftovers, listing
from tests.kit.stores import (
    FailOnceStore,
    FlipStore,
    FullStore,
    GateStore,
    RecordingStore,
    SlowStore,
    TruncateStore,
    content,
    put,
)
from tidegate.storage import (
    LocalStore,
    MemoryStore,
    ObjectExistsError,
    StorageError,
    StoreFullError,
    StoreIOError,
    StoreTimeoutError,
)


def test_flip_changes_one_bit_of_one_object() -> None:
    store = FlipStore(MemoryStore())
    put(store, "a", bytes(100))
    put(store, "b", bytes(100))
    store.flip("a", 50 * 8 + 3)
    assert content(store, "a") == bytes(50) + b"\x08" + bytes(49)
    assert store.read_all("a", limit_bytes=100) == bytes(50) + b"\x08" + bytes(49)
    assert content(store, "b") == bytes(100)
    out = bytearray(10)
    for start, wanted in ((40, bytes(10)), (41, bytes(9) + b"\x08"), (50, b"\x08" + bytes(9)), (51, bytes(10))):
        store.read_into("a", start, memoryview(out))
        assert out == wanted


def test_truncate_shortens_an_object() -> None:
    store = TruncateStore(MemoryStore())
    put(store, "a", b"0123456789")
    store.truncate("a", 4)
    assert store.stat("a").num_bytes == 4
    assert listing(store) == {"a": 4}
    assert content(store, "a") == b"0123"
    assert store.read_all("a", limit_bytes=10) == b"0123"
    with pytest.raises(StoreIOError):
        store.read_into("a", 3, memoryview(bytearray(2)))


@pytest.mark.parametrize("after", [False, True])
def test_fail_once_fails_the_nth_call(after: bool) -> None:
    store = FailOnceStore(MemoryStore())
    error = StoreTimeoutError("no answer", retryable=True)
    store.fail("compare_and_put", 2, error, after=after)
    store.compare_and_put("a", b"1", expected=None)
    with pytest.raises(StoreTimeoutError) as caught:
        store.compare_and_put("b", b"2", expected=None)
    assert caught.value is error
    assert listing(store) == ({"a": 1, "b": 1} if after else {"a": 1})
    store.compare_and_put("c", b"3", expected=None)
    assert store.num_calls["compare_and_put"] == 3


@pytest.mark.parametrize("after", [False, True])
def test_fail_once_fails_an_append_for_good(after: bool) -> None:
    store = FailOnceStore(MemoryStore())
    store.fail("append", 2, OSError(errno.EIO, "odd"), after=after)
    writer = store.create("a")
    writer.append(memoryview(b"1")).result()
    for _ in range(2):
        with pytest.raises(OSError, match="odd"):
            writer.append(memoryview(b"2")).result()
    with pytest.raises(OSError, match="odd"):
        writer.seal()
    writer.abort()
    assert list(store.list()) == []
    put(store, "a", b"1", b"2")
    assert content(store, "a") == b"12"


def test_gate_lets_through_what_is_permitted() -> None:
    store = GateStore(MemoryStore())
    writer = store.create("a")
    assert writer.append(memoryview(b"0")).done()
    store.shut()
    futures = [writer.append(memoryview(b"%d" % i)) for i in range(1, 5)]
    store.await_waiting(4)
    assert [future.done() for future in futures] == [False] * 4
    store.permit(2)
    assert [future.done() for future in futures] == [True, True, False, False]
    sealing = threading.Thread(target=writer.seal)
    sealing.start()
    store.open()
    sealing.join(TIMEOUT_S)
    assert content(store, "a") == b"01234"


def test_gate_lets_an_aborted_writer_go() -> None:
    store = GateStore(MemoryStore())
    store.shut()
    writer, other = store.create("a"), store.create("b")
    future, waiting = writer.append(memoryview(b"0")), other.append(memoryview(b"1"))
    writer.abort()
    assert isinstance(future.exception(TIMEOUT_S), StorageError)
    assert not waiting.done()
    store.permit()
    other.seal()
    assert content(store, "b") == b"1"


def test_slow_takes_its_time() -> None:
    pauses: list[float] = []
    store = SlowStore(MemoryStore(), 100.0, sleep=pauses.append)
    put(store, "a", bytes(50), bytes(200))
    assert pauses == [0.5, 2.0]
    assert content(store, "a") == bytes(250)
    store.close()


def test_slow_lets_an_aborted_writer_go() -> None:
    store = SlowStore(MemoryStore(), 0.001)
    writer = store.create("a")
    future = writer.append(memoryview(bytes(1000)))
    writer.abort()
    assert isinstance(future.exception(TIMEOUT_S), StorageError)
    assert list(store.list()) == []
    store.close()


def test_A06_full_stores_what_fits_and_no_more() -> None:
    store = FullStore(MemoryStore(), 100)
    put(store, "old", bytes(30))
    writer = store.create("a")
    writer.append(memoryview(bytes(40))).result()
    error = writer.append(memoryview(bytes(40))).exception()
    assert isinstance(error, StoreFullError)
    assert (error.errno, error.key) == (errno.ENOSPC, "a")
    assert store.used_bytes == 100
    (partial,) = leftovers(store)
    assert store.stat(partial).num_bytes == 70
    with pytest.raises(StoreFullError):
        writer.seal()
    with pytest.raises(StoreFullError):
        store.compare_and_put("b", b"x", expected=None)
    writer.abort()
    assert store.used_bytes == 30
    put(store, "a", bytes(70))
    store.delete("old")
    assert store.used_bytes == 70
    store.compare_and_put("b", bytes(30), expected=None)
    store.capacity_bytes = 200
    store.compare_and_put("b", bytes(60), expected=bytes(30))
    put(store, "a", bytes(10), replace=True)
    with pytest.raises(ObjectExistsError):
        store.compare_and_put("b", bytes(1), expected=None)
    assert store.used_bytes == sum(listing(store).values()) == 70


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_recording_replays_every_prefix(tmp_path: Path, kind: str) -> None:
    store = RecordingStore(MemoryStore())
    put(store, "s/a", b"12", b"345")
    store.compare_and_put("s/COMMIT", b"one", expected=None)
    with pytest.raises(ObjectExistsError):
        store.compare_and_put("s/COMMIT", b"no", expected=None)
    failing = store.create("s/a")
    with pytest.raises(ObjectExistsError):
        failing.seal()
    failing.abort()
    store.compare_and_put("s/COMMIT", b"two", expected=b"one")
    put(store, "s/a", b"new", replace=True)
    store.delete("s/COMMIT")
    assert [operation.kind for operation in store.operations] == [
        *("create", "append", "append", "seal", "compare_and_put", "create", "abort", "compare_and_put"),
        *("create", "append", "seal", "delete"),
    ]
    assert [operation.offset for operation in store.operations if operation.kind == "append"] == [0, 2, 0]
    a, commit = {"s/a": 5}, {"s/COMMIT": 3}
    wanted = [{}, {}, {}, {}, a, a | commit, a | commit, a | commit, a | commit, a | commit, a | commit]
    wanted += [{"s/a": 3} | commit, {"s/a": 3}]
    for num_operations, expected in enumerate(wanted):
        into = None if kind == "memory" else LocalStore(tmp_path / str(num_operations), sync=False)
        replayed = store.replay(num_operations, into)
        assert listing(replayed) == expected
        assert len(leftovers(replayed)) == (num_operations in (1, 2, 3, 6, 9, 10))
        replayed.close()
    assert content(store.replay(7), "s/COMMIT") == b"one"
    assert content(store.replay(8), "s/COMMIT") == b"two"
    assert content(store.replay(10), "s/a") == b"12345"
    assert content(store.replay(11), "s/a") == b"new"
