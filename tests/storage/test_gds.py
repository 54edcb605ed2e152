"""Objects written from the memory of a real GPU, by the real KvikIO."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.store_contract import StoreContract
from tests.kit.gds import gds_store, kvikio_mode
from tests.kit.mounts import mounted
from tests.kit.store_checks import TIMEOUT_S, leftovers, listing
from tests.kit.wrapping import content
from tidegate.storage import (
    ALIGNMENT_BYTES,
    DeviceBytes,
    DeviceWriter,
    LocalStore,
    StorageError,
    StoreFullError,
    output_file,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def mode() -> str:
    """How KvikIO writes here."""
    return kvikio_mode()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with gds_store(tmp_path) as store:
        yield store


class TestLocalStoreGds(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[LocalStore]:
        store = LocalStore(tmp_path / "root", io="gds")
        yield store
        store.close()


def on_device(content: bytes) -> DeviceBytes:
    """Put bytes into page-aligned device memory, and wait until they are there."""
    memory = torch.empty(len(content) + ALIGNMENT_BYTES, dtype=torch.uint8, device="cuda")
    start = -memory.data_ptr() % ALIGNMENT_BYTES
    if content:
        memory[start : start + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8).cuda()
    torch.cuda.synchronize()
    return DeviceBytes(memory.data_ptr() + start, len(content), torch.cuda.current_device(), memory)


def device_writer(store: LocalStore, key: str, size_hint_bytes: int = 0) -> DeviceWriter:
    writer = store.create(key, size_hint_bytes=size_hint_bytes)
    assert isinstance(writer, DeviceWriter)
    return writer


@pytest.mark.parametrize("num_bytes", [0, 4096, 12_288, 1 << 20, (1 << 20) + 4096, (64 << 20) + 4096])
@pytest.mark.parametrize("hint_bytes", [0, 80 << 20])
def test_device_bytes_come_back(store: LocalStore, num_bytes: int, hint_bytes: int) -> None:
    wanted = os.urandom(num_bytes)
    writer = device_writer(store, "s/a", hint_bytes)
    writer.append_device(on_device(wanted)).result(TIMEOUT_S)
    writer.seal()
    assert listing(store) == {"s/a": num_bytes}
    assert content(store, "s/a") == wanted


def test_appends_of_both_kinds_follow_each_other(store: LocalStore) -> None:
    pieces = [os.urandom(4096 << (i % 10)) for i in range(40)]
    writer = device_writer(store, "s/a")
    held = []
    for i, piece in enumerate(pieces):
        if i % 3:
            held.append(on_device(piece))
            writer.append_device(held[-1])
        else:
            writer.append(memoryview(piece))
    writer.append(memoryview(b"the end"))
    writer.seal()
    assert content(store, "s/a") == b"".join(pieces) + b"the end"


def test_several_objects_at_once(store: LocalStore) -> None:
    wanted = [os.urandom(8 << 20) for _ in range(4)]
    held = [on_device(piece) for piece in wanted]
    writers = [device_writer(store, f"s/{i}") for i in range(4)]
    for _ in range(3):
        for writer, piece in zip(writers, held, strict=True):
            writer.append_device(piece)
    for writer in writers:
        writer.seal()
    for i, piece in enumerate(wanted):
        assert content(store, f"s/{i}") == piece * 3


def test_the_memory_is_the_callers_again_when_the_future_is_done(store: LocalStore) -> None:
    wanted = os.urandom(32 << 20)
    piece = on_device(wanted)
    writer = device_writer(store, "a")
    writer.append_device(piece).result(TIMEOUT_S)
    assert isinstance(piece.owner, torch.Tensor)
    piece.owner.zero_()
    torch.cuda.synchronize()
    writer.seal()
    assert content(store, "a") == wanted


def test_abort_drops_what_is_under_way(store: LocalStore) -> None:
    piece = on_device(os.urandom(32 << 20))
    for _ in range(3):
        writer = device_writer(store, "s/a", 1 << 30)
        futures = [writer.append_device(piece) for _ in range(24)]
        writer.abort()
        assert all(future.done() for future in futures)
        assert list(store.list()) == []
    writer = device_writer(store, "s/a")
    writer.append_device(piece)
    writer.seal()
    assert listing(store) == {"s/a": 32 << 20}


@pytest.mark.parametrize("can_reserve", [True, False], ids=["reserved", "not-reserved"])
def test_A06_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_reserve: bool) -> None:
    if not can_reserve:  # so that it is KvikIO that finds out, and says so in its own words
        monkeypatch.setattr(output_file, "_allocate", lambda fd, offset, num_bytes: errno.EOPNOTSUPP)
    with mounted(tmp_path / "disk", "tmpfs", "size=8m") as folder:
        store = LocalStore(folder / "root", io="gds")
        piece = on_device(os.urandom(2 << 20))
        writer = device_writer(store, "s/a")
        errors = [writer.append_device(piece).exception(TIMEOUT_S) for _ in range(6)]
        assert errors[0] is None
        assert isinstance(errors[-1], StoreFullError)
        assert (errors[-1].errno, errors[-1].key) == (errno.ENOSPC, "s/a")
        with pytest.raises(StoreFullError):
            writer.seal()
        writer.abort()
        assert list(store.list()) == []
        store.close()


def test_memory_that_is_no_devices_is_an_error(store: LocalStore) -> None:
    writer = device_writer(store, "s/a")
    with pytest.raises(StorageError, match="s/a"):
        writer.append_device(DeviceBytes(4096, 1 << 20, 0)).result(TIMEOUT_S)
    writer.abort()
    assert list(store.list()) == []


def test_the_mode_is_told(store: LocalStore, mode: str) -> None:
    assert mode in store.prepare_for_device(0)


def test_auto_measures_both_ways(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    began_s = time.perf_counter()
    note = store.prepare_for_device(torch.cuda.current_device())
    first_s = time.perf_counter() - began_s
    print(f"{note} (in {first_s:.2f} s)")
    assert len(re.findall(r"\d+\.\d\d GB/s", note)) == 2
    assert store.prepare_for_device(torch.cuda.current_device()) == note
    writer = store.create("a")
    assert isinstance(writer, DeviceWriter) == ("written from device memory" in note)
    writer.append(memoryview(b"x"))
    writer.seal()
    assert leftovers(store) == []
    store.close()


CHILD = """
import os, sys, torch
from tidegate.storage import DeviceBytes, LocalStore
store = LocalStore(sys.argv[1], io="gds")
memory = torch.zeros((4 << 20) + 4096, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
writer = store.create("a")
start = memory.data_ptr() + -memory.data_ptr() % 4096
writer.append_device(DeviceBytes(start, 4 << 20, 0, memory))
writer.seal()
store.close()
print(os.listdir("."))
"""


def test_no_log_appears_in_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment = {name: value for name, value in environment.items() if not name.startswith("CUFILE")}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "root")]
    ended = subprocess.run(
        command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "root" / "a").stat().st_size == 4 << 20
