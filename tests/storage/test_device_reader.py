"""Objects read into device memory, with a fake KvikIO whose device is the host: all that is ours, without a GPU."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.fake_kvikio import FakeKvikio, device_bytes, fake_kvikio
from tests.kit.store_checks import TIMEOUT_S
from tidegate.storage import (
    DeviceBytes,
    DeviceReader,
    DeviceReadingStore,
    LocalStore,
    MemoryStore,
    StorageError,
    StoreIOError,
    device_file,
)
from tidegate.storage.device_file import load_kvikio

CONTENT = os.urandom(100_000)
GIB = 1 << 30


@pytest.fixture
def store(kvikio: FakeKvikio, tmp_path: Path) -> Iterator[LocalStore]:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a").write_bytes(CONTENT)
    store = LocalStore(tmp_path, io="gds")
    yield store
    store.close()


@pytest.fixture
def reader(kvikio: FakeKvikio, store: LocalStore) -> Iterator[DeviceReader]:
    reader = store.open_reader("s/a")
    assert isinstance(reader, DeviceReader)
    yield reader
    kvikio.gate.set()
    reader.close()


def room(num_bytes: int) -> DeviceBytes:
    return device_bytes(bytes(num_bytes))


def found(out: DeviceBytes) -> bytes:
    assert isinstance(out.owner, memoryview)
    return bytes(out.owner)


@pytest.mark.parametrize(
    ("offset", "num_bytes"), [(0, 4096), (64, 1), (4096, 8192), (99_999, 1), (100_000, 0), (0, 100_000)]
)
def test_bytes_come_to_the_device(reader: DeviceReader, offset: int, num_bytes: int) -> None:
    out = room(num_bytes)
    read = reader.start_read(offset, out)
    read.wait()
    assert read.is_done()
    assert found(out) == CONTENT[offset : offset + num_bytes]


def test_reads_go_on_by_themselves(kvikio: FakeKvikio, reader: DeviceReader) -> None:
    kvikio.gate.clear()
    outs = [room(1000) for _ in range(5)]
    reads = [reader.start_read(1000 * i, out) for i, out in enumerate(outs)]
    assert kvikio.begun.wait(TIMEOUT_S)
    assert not reads[0].is_done()
    kvikio.gate.set()
    for read in reversed(reads):
        read.wait()
    assert b"".join(map(found, outs)) == CONTENT[:5000]
    assert kvikio.events.count("open") == 1


@pytest.mark.parametrize(("offset", "num_bytes"), [(99_999, 2), (100_001, 0), (-1, 1), (0, 100_001)])
def test_beyond_the_end_nothing_is_read(kvikio: FakeKvikio, reader: DeviceReader, offset: int, num_bytes: int) -> None:
    with pytest.raises(StoreIOError, match=r"cannot read bytes .* of .*s/a: it has 100000; it was cut short"):
        reader.start_read(offset, room(num_bytes))
    assert kvikio.events == []


def test_a_failure_names_the_file_and_the_errno(kvikio: FakeKvikio, reader: DeviceReader) -> None:
    kvikio.failure = f"KvikIO failure at: posix_io.hpp:85: POSIX error on pread: {os.strerror(errno.EIO)}"
    with pytest.raises(StoreIOError, match=r"cannot read .*s/a.*the medium failed") as caught:
        reader.start_read(0, room(10)).wait()
    assert caught.value.errno == errno.EIO


def test_a_file_that_was_cut_while_it_is_read_is_an_error(
    kvikio: FakeKvikio, reader: DeviceReader, tmp_path: Path
) -> None:
    os.truncate(tmp_path / "s" / "a", 50)
    with pytest.raises(StoreIOError, match="KvikIO read 50 of 100 bytes"):
        reader.start_read(0, room(100)).wait()


def test_it_is_the_file_that_was_opened(reader: DeviceReader, tmp_path: Path) -> None:
    os.rename(tmp_path / "s", tmp_path / "t")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a").write_bytes(bytes(100_000))
    out = room(100)
    reader.start_read(0, out).wait()
    assert found(out) == CONTENT[:100]


def test_closing_closes_kvikios_file_too(kvikio: FakeKvikio, reader: DeviceReader) -> None:
    reader.start_read(0, room(1)).wait()
    reader.close()
    reader.close()
    assert kvikio.events == ["open", "read 0", "close"]


def test_kvikio_is_loaded_only_for_much(kvikio: FakeKvikio, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert isinstance(store, DeviceReadingStore)
    assert not store.reads_into_devices(GIB // 16)
    assert device_file._loaded is None
    assert store.reads_into_devices(GIB)
    assert device_file._loaded is not None
    store.close()


def test_the_user_chooses(kvikio: FakeKvikio, tmp_path: Path) -> None:
    load_kvikio()
    for io, is_chosen in (("direct", False), ("buffered", False), ("gds", True)):
        store = LocalStore(tmp_path, io=io)  # type: ignore[arg-type]
        assert store.reads_into_devices(0 if is_chosen else 1 << 50) is is_chosen
        store.close()


def test_without_kvikio_our_own_threads_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with fake_kvikio(monkeypatch), monkeypatch.context() as patch:
        patch.setitem(sys.modules, "kvikio", None)
        store = LocalStore(tmp_path)
        assert not store.reads_into_devices(1 << 50)
        store.close()
    assert not isinstance(MemoryStore(), DeviceReadingStore)


@pytest.mark.parametrize(("version", "is_used"), [("26.10.00", True), ("27.02.01", True), ("26.08.00", False)])
def test_an_old_kvikio_is_not_used(kvikio: FakeKvikio, tmp_path: Path, version: str, is_used: bool) -> None:
    """It would not wait for all of a read's tasks when one of them has failed."""
    sys.modules["kvikio"].__version__ = version  # type: ignore[attr-defined]
    store = LocalStore(tmp_path)
    assert store.reads_into_devices(GIB) is is_used
    store.close()
    if not is_used:
        with pytest.raises(
            StorageError, match=r"cannot be used \(version 26\.08\.00 is too old: 26\.10 or later"
        ):
            LocalStore(tmp_path, io="gds")
