"""The store that drops what it takes: the contract without the bytes, and the rate by a clock that the test moves."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from tests.contract.store_contract import NamingContract, WritingContract
from tests.contract.swap_contract import SwappingContract
from tests.kit.store_checks import TIMEOUT_S, leftovers, listing
from tests.kit.wrapping import put
from tidegate.storage import StorageError, Store, StoreIOError
from tidegate.storage.base import DeviceBytes, DeviceStore, DeviceWriter
from tidegate.storage.pacer import Pacer
from tidegate.storage.sink import SinkStore


@dataclass
class Time:
    """A clock that goes on when somebody sleeps by it, and by `late_s` more each time."""

    now_s: float = 100.0
    late_s: float = 0.0
    woken: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.woken.set()

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert self.woken.wait(TIMEOUT_S)
        self.now_s += seconds + self.late_s


class SinkContract(WritingContract, NamingContract, SwappingContract):
    """What a sink does as any store does."""

    def check_content(self, store: Store, key: str, wanted: bytes) -> None:
        assert store.stat(key).num_bytes == len(wanted)
        with pytest.raises(StoreIOError, match="keeps no bytes") as caught:
            store.read_into(key, 0, memoryview(bytearray(1)))
        assert caught.value.key == key
        with pytest.raises(StoreIOError, match="keeps no bytes"):
            store.read_all(key, limit_bytes=1 << 20)


class TestSinkWithoutLimit(SinkContract):
    @pytest.fixture
    def store(self) -> Store:
        return SinkStore()


class TestSinkWithARate(SinkContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = SinkStore(bytes_per_s=50e9, from_device=True)
        yield store
        store.close()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def sink(time: Time) -> Iterator[SinkStore]:
    sink = SinkStore(bytes_per_s=1000, clock=time.clock, sleep=time.sleep)
    yield sink
    time.woken.set()
    sink.close()


def noted(future: Future[None], time: Time) -> list[float]:
    """Where the moment goes at which the future is done."""
    ends: list[float] = []
    future.add_done_callback(lambda _: ends.append(time.now_s))
    return ends


def test_writers_share_the_rate_and_it_is_kept(sink: SinkStore, time: Time) -> None:
    time.woken.clear()  # nothing is through before all is queued
    writers = [sink.create("a"), sink.create("b")]
    lengths = [1, 500, 7, 2000, 0, 33, 1, 4096]
    futures = [writers[i % 2].append(memoryview(bytes(n))) for i, n in enumerate(lengths)]
    ends = [noted(future, time) for future in futures]
    assert [future.done() for future in futures] == [n == 0 for n in lengths]
    time.woken.set()
    for writer in writers:
        writer.seal()
    through = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    for (end_s,), so_far, n in zip(ends, through, lengths, strict=True):
        assert end_s == pytest.approx(100 + so_far / 1000 if n else 100, abs=1e-9)
    assert listing(sink) == {"a": 1 + 7 + 0 + 1, "b": 500 + 2000 + 33 + 4096}
    assert sink.taken_bytes == sum(lengths)
    assert sink.busy_s == pytest.approx(sum(lengths) / 1000)


def test_waking_up_late_is_not_added_up(sink: SinkStore, time: Time) -> None:
    time.late_s = 0.05
    time.woken.clear()
    writer = sink.create("a")
    ends = [noted(writer.append(memoryview(bytes(100))), time) for _ in range(200)]
    time.woken.set()
    writer.seal()
    for i, (end_s,) in enumerate(ends):
        assert 0 <= end_s - (100 + 0.1 * (i + 1)) < 0.05 + 1e-9


def test_an_idle_sink_saves_nothing_up(sink: SinkStore, time: Time) -> None:
    writer = sink.create("a")
    writer.append(memoryview(bytes(1000))).result(TIMEOUT_S)
    assert time.now_s == pytest.approx(101)
    time.now_s = 200.0
    writer.append(memoryview(bytes(500))).result(TIMEOUT_S)
    assert time.now_s == pytest.approx(200.5)
    writer.seal()
    assert sink.busy_s == pytest.approx(1.5)


def test_no_limit_is_no_time(time: Time) -> None:
    for rate in (None, math.inf):
        sink = SinkStore(bytes_per_s=rate, clock=time.clock, sleep=time.sleep)
        writer = sink.create("a")
        assert writer.append(memoryview(bytes(1 << 20))).done()
        writer.seal()
        assert (sink.taken_bytes, sink.busy_s, time.now_s) == (1 << 20, 0.0, 100.0)
        sink.close()


@pytest.mark.parametrize("rate", [0, -1, -math.inf, math.nan])
def test_a_rate_is_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        SinkStore(bytes_per_s=rate)


def test_sealing_waits_for_all_appends(sink: SinkStore, time: Time) -> None:
    time.woken.clear()
    writer = sink.create("a")
    futures = [writer.append(memoryview(bytes(100))) for _ in range(3)]
    sealing = threading.Thread(target=writer.seal)
    sealing.start()
    assert listing(sink) == {}
    assert not any(future.done() for future in futures)
    time.woken.set()
    sealing.join(TIMEOUT_S)
    assert not sealing.is_alive()
    assert listing(sink) == {"a": 300}


def test_aborting_does_not_wait_for_the_rate(sink: SinkStore, time: Time) -> None:
    time.woken.clear()
    writer, other = sink.create("a"), sink.create("b")
    futures = [writer.append(memoryview(bytes(100))) for _ in range(3)]
    kept = other.append(memoryview(bytes(100)))
    writer.abort()
    for future in futures:
        with pytest.raises(StorageError, match="aborted"):
            future.result(0)
    time.woken.set()
    kept.result(TIMEOUT_S)
    other.seal()
    assert listing(sink) == {"b": 100}
    assert leftovers(sink) == []
    assert sink.taken_bytes == 100


def test_closing_takes_what_is_queued(time: Time) -> None:
    sink = SinkStore(bytes_per_s=1000, clock=time.clock, sleep=time.sleep)
    writer = sink.create("a")
    time.woken.clear()
    futures = [writer.append(memoryview(bytes(100))) for _ in range(3)]
    time.woken.set()
    sink.close()
    sink.close()
    assert all(future.done() and future.exception() is None for future in futures)
    with pytest.raises(StorageError, match="was closed"):
        writer.append(memoryview(b"x"))


def test_a_pacer_that_is_dropped_ends_its_thread() -> None:
    pacer = Pacer(1e9)
    thread = pacer._thread
    done = threading.Event()
    pacer.add(1000, done.set)
    del pacer
    gc.collect()
    assert done.wait(TIMEOUT_S)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("from_device", [False, True])
def test_device_memory_is_taken_where_asked_for(from_device: bool, time: Time) -> None:
    sink = SinkStore(bytes_per_s=1000, from_device=from_device, name="x", clock=time.clock, sleep=time.sleep)
    assert isinstance(sink, DeviceStore)
    assert ("from device memory" in sink.prepare_for_device(0)) == from_device
    writer = sink.create("a")
    assert isinstance(writer, DeviceWriter) == from_device
    if isinstance(writer, DeviceWriter):
        writer.append_device(DeviceBytes(4096, 8192, 0)).result(TIMEOUT_S)
        writer.append(memoryview(bytes(100)))
        writer.seal()
        assert listing(sink) == {"a": 8292}
        assert time.now_s == pytest.approx(100 + 8.292)
    sink.close()


def test_small_objects_are_kept_and_read() -> None:
    sink = SinkStore(name="x")
    sink.compare_and_put("a", b"0123456789", expected=None)
    put(sink, "b", b"dropped")
    out = bytearray(4)
    sink.read_into("a", 3, memoryview(out))
    assert bytes(out) == b"3456"
    with pytest.raises(StoreIOError, match="it has 10"):
        sink.read_into("a", 8, memoryview(out))
    with pytest.raises(StoreIOError, match="may have"):
        sink.read_all("a", limit_bytes=9)
    with pytest.raises(StorageError, match="not what was expected"):
        sink.compare_and_put("b", b"x", expected=b"dropped")
    assert sink.url == "sink://x"
