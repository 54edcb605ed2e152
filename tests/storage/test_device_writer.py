"""Objects written from device memory, with a fake KvikIO whose device is the host: all that is ours, without a GPU."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.store_contract import StoreContract
from tests.kit.fake_kvikio import FakeKvikio, device_bytes, fake_cupy, fake_kvikio
from tests.kit.mounts import mounted
from tests.kit.store_checks import TIMEOUT_S, leftovers, listing
from tests.kit.wrapping import content
from tidegate.storage import (
    DeviceStore,
    DeviceWriter,
    LocalStore,
    ObjectWriter,
    StorageError,
    StoreFullError,
    StoreIOError,
    device_file,
    device_probe,
    open_store,
    output_file,
)


@pytest.fixture
def store(kvikio: FakeKvikio, tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "root", io="gds")
    yield store
    kvikio.gate.set()
    store.close()


class TestLocalStoreGds(StoreContract):
    @pytest.fixture
    def store(self, store: LocalStore) -> LocalStore:
        return store


def device_writer(store: LocalStore, key: str = "s/a") -> DeviceWriter:
    writer: ObjectWriter = store.create(key)
    assert isinstance(writer, DeviceWriter)
    return writer


def test_appends_of_both_kinds_follow_each_other(store: LocalStore, kvikio: FakeKvikio) -> None:
    pieces = [os.urandom(4096 * (1 + i % 5)) for i in range(40)]
    writer = device_writer(store)
    for i, piece in enumerate(pieces):
        if i % 3:
            writer.append_device(device_bytes(piece))
        else:
            writer.append(memoryview(piece))
    writer.append_device(device_bytes(b"")).result(0)
    writer.append(memoryview(b"the end"))
    writer.seal()
    assert content(store, "s/a") == b"".join(pieces) + b"the end"
    assert leftovers(store) == []
    assert kvikio.events.count("open") == kvikio.events.count("close") == 1
    assert sum(event.startswith("write") for event in kvikio.events) == 26


def test_small_objects_do_without_kvikio(store: LocalStore, kvikio: FakeKvikio) -> None:
    store.compare_and_put("a", b"x", expected=None)
    store.compare_and_put("a", b"y", expected=b"x")
    assert kvikio.events == []


def test_device_bytes_come_in_whole_pages(store: LocalStore, kvikio: FakeKvikio) -> None:
    writer = device_writer(store)
    with pytest.raises(ValueError, match="multiples of 4096, not 100"):
        writer.append_device(device_bytes(bytes(100)))
    writer.append(memoryview(bytes(100))).result(TIMEOUT_S)
    with pytest.raises(StorageError, match=r"at 100 of .*append zero bytes"):
        writer.append_device(device_bytes(bytes(4096))).result(TIMEOUT_S)
    with pytest.raises(StorageError, match="at 100 of"):
        writer.seal()
    writer.abort()
    assert kvikio.events == []
    assert list(store.list()) == []


def test_the_file_is_closed_by_kvikio_before_it_is_synced(
    store: LocalStore, kvikio: FakeKvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        kvikio.events.append("sync")
        real(fd)

    writer = device_writer(store, "a")
    writer.append_device(device_bytes(bytes(8192))).result(TIMEOUT_S)
    monkeypatch.setattr(os, "fsync", fsync)
    writer.seal()
    assert kvikio.events[:4] == ["open", "write 0", "close", "sync"]


def test_abort_waits_for_what_is_under_way_and_skips_the_rest(store: LocalStore, kvikio: FakeKvikio) -> None:
    kvikio.gate.clear()
    writer = device_writer(store)
    futures = [writer.append_device(device_bytes(bytes(4096))) for _ in range(30)]
    assert kvikio.begun.wait(TIMEOUT_S)
    aborting = threading.Thread(target=writer.abort)
    aborting.start()
    assert not futures[0].done()
    assert "close" not in kvikio.events
    kvikio.gate.set()
    aborting.join(TIMEOUT_S)
    assert not aborting.is_alive()
    assert all(future.done() for future in futures)
    assert isinstance(futures[-1].exception(), StorageError)
    assert kvikio.events[-1] == "close"
    assert list(store.list()) == []


def test_errors_come_as_text(store: LocalStore, kvikio: FakeKvikio) -> None:
    for failure, kind, number in (
        ("KvikIO failure at: x.cpp:1: POSIX error on pwrite: No space left on device", StoreFullError, errno.ENOSPC),
        ("Linux system call error at: x.cpp:1: Disk quota exceeded", StoreFullError, errno.EDQUOT),
        ("POSIX error on pwrite: Input/output error", StoreIOError, errno.EIO),
        ("CUDA error at: x.hpp:5: CUDA_ERROR_ILLEGAL_ADDRESS", StoreIOError, None),
        ("libcuda.so.1: cannot open shared object file: No such file or directory", StoreIOError, None),
    ):
        kvikio.failure = failure
        writer = device_writer(store)
        error = writer.append_device(device_bytes(bytes(4096))).exception(TIMEOUT_S)
        assert isinstance(error, kind)
        assert (error.errno, error.key) == (number, "s/a")
        assert "s/a" in str(error)
        assert number is not None or failure in str(error)
        assert writer.append(memoryview(b"x")).exception(TIMEOUT_S) is error
        with pytest.raises(kind):
            writer.seal()
        writer.abort()
    assert list(store.list()) == []


def test_a_write_that_falls_short_fails(store: LocalStore, kvikio: FakeKvikio) -> None:
    kvikio.short_bytes = 1
    writer = device_writer(store)
    with pytest.raises(StoreIOError, match="4095 of 4096"):
        writer.append_device(device_bytes(bytes(4096))).result(TIMEOUT_S)
    writer.abort()


@pytest.mark.parametrize("can_reserve", [True, False], ids=["reserved", "not-reserved"])
def test_A06_a_full_disk(
    kvikio: FakeKvikio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_reserve: bool
) -> None:
    if not can_reserve:
        monkeypatch.setattr(output_file, "_allocate", lambda fd, offset, num_bytes: errno.EOPNOTSUPP)
    with mounted(tmp_path / "disk", "tmpfs", "size=1m") as folder:
        store = LocalStore(folder / "root", io="gds")
        writer = device_writer(store)
        futures = [writer.append_device(device_bytes(bytes(256 << 10))) for _ in range(6)]
        errors = [error for future in futures if (error := future.exception(TIMEOUT_S)) is not None]
        assert errors
        for error in errors:
            assert isinstance(error, StoreFullError | StoreIOError)  # where room ends, a write may fall short
        writer.abort()
        assert list(store.list()) == []
        store.close()


def test_a_closed_store_takes_nothing(store: LocalStore, kvikio: FakeKvikio) -> None:
    writer = device_writer(store)
    store.close()
    with pytest.raises(StorageError, match="was closed"):
        writer.append_device(device_bytes(bytes(4096))).result(TIMEOUT_S)
    writer.abort()


def test_kvikio_is_set_up_once_and_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_kvikio(monkeypatch) as fake:
        assert "no driver" in device_file.load_kvikio().mode
        assert fake.settings == {"num_threads": 8, "compat_mode": "ON"}
        assert os.environ["CUFILE_LOGFILE_PATH"] == os.devnull
        fake.settings["num_threads"] = 1
        device_file.load_kvikio()
        assert fake.settings["num_threads"] == 1
    with fake_kvikio(monkeypatch) as fake:
        monkeypatch.setenv("KVIKIO_NTHREADS", "1")
        monkeypatch.setenv("KVIKIO_COMPAT_MODE", "AUTO")
        monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "mine")
        device_file.load_kvikio()
        assert fake.settings == {"num_threads": 1, "compat_mode": "AUTO"}
        assert "CUFILE_LOGFILE_PATH" not in os.environ
    with fake_kvikio(monkeypatch, has_driver=True) as fake:
        fake.settings["num_threads"] = 3
        assert device_file.load_kvikio().mode == "KvikIO with GPUDirect Storage"
        assert fake.settings == {"num_threads": 3, "compat_mode": "AUTO"}
    with fake_kvikio(monkeypatch, has_driver=True) as fake:
        fake.settings["compat_mode"] = "ON"
        assert "compatibility mode" in device_file.load_kvikio().mode


@pytest.mark.parametrize("faster", ["kvikio", "own"])
def test_auto_measures_both_ways_once_and_takes_the_faster(
    kvikio: FakeKvikio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    runtime = fake_cupy(monkeypatch)
    rates = {"kvikio": 3.21e9, "own": 2.57e9} if faster == "kvikio" else {"kvikio": 2.6e9, "own": 2.57e9}
    measured: list[str] = []
    real = device_probe._rate

    def rate(file: object, num_slots: int, num_bytes: int, start: object) -> float:
        num_events = len(kvikio.events)
        real(file, num_slots, num_bytes, start)  # type: ignore[arg-type]
        way = "kvikio" if len(kvikio.events) > num_events else "own"
        measured.append(way)
        return rates[way]

    monkeypatch.setattr(device_probe, "_rate", rate)
    monkeypatch.setattr(device_probe, "_LONGEST_BYTES", device_probe._SHORTEST_BYTES)
    store = LocalStore(tmp_path / "root")
    assert isinstance(store, DeviceStore)
    assert not isinstance(store.create("before"), DeviceWriter)
    note = store.prepare_for_device(0)
    assert measured == ["own"] + ["own", "kvikio"] * 3
    assert f"{rates['own'] / 1e9:.2f} GB/s" in note
    assert f"{rates['kvikio'] / 1e9:.2f} GB/s" in note
    assert ("written from device memory" in note) == (faster == "kvikio")
    assert store.prepare_for_device(1) == note
    assert len(measured) == 7
    writer = store.create("after")
    assert isinstance(writer, DeviceWriter) == (faster == "kvikio")
    writer.append(memoryview(b"x"))
    writer.seal()
    assert [re.sub("[0-9a-f]{16}", "#", key) for key in leftovers(store)] == [".before.#.partial"]
    assert listing(store) == {"after": 1}
    assert runtime.held == {}
    store.close()


def test_what_keeps_auto_from_measuring_is_told(
    kvikio: FakeKvikio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = fake_cupy(monkeypatch)
    kvikio.failure = "CUDA error: no such device"
    failing = LocalStore(tmp_path / "a")
    assert "no such device" in failing.prepare_for_device(0)
    assert leftovers(failing) == []
    assert runtime.held == {}
    monkeypatch.setitem(sys.modules, "cupy", None)
    without_cupy = LocalStore(tmp_path / "b")
    assert "could not be measured" in without_cupy.prepare_for_device(0)
    with mounted(tmp_path / "small", "tmpfs", "size=8m") as folder:
        full = LocalStore(folder)
        assert "too little room" in full.prepare_for_device(0)
        full.close()
    for store in (failing, without_cupy):
        assert "by our own threads through host memory" in store.prepare_for_device(0)
        assert not isinstance(store.create("a"), DeviceWriter)
        store.close()


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_these_never_write_from_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, io: str) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    store = LocalStore(tmp_path / "root", io=io)  # type: ignore[arg-type]
    assert f'io="{io}"' in store.prepare_for_device(0)
    assert not (tmp_path / "root").exists()
    store.close()


def test_without_kvikio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    monkeypatch.setattr(device_file, "_loaded", None)
    with pytest.raises(StorageError, match=r"KvikIO cannot be used.*tidegate\[cu13\] or tidegate\[cu12\]"):
        open_store(tmp_path / "root", io="gds")
    store = open_store(tmp_path / "root")
    assert isinstance(store, LocalStore)
    assert "KvikIO cannot be used (import of kvikio halted" in store.prepare_for_device(0)
    assert not isinstance(store.create("a"), DeviceWriter)
    store.close()
