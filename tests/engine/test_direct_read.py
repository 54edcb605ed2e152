"""Bytes that a store brings to their place itself, and what happens where it cannot."""

from __future__ import annotations

import os

import pytest
import torch

from tidegate.direct_read import DirectRead
from tidegate.open_objects import OpenObjects
from tidegate.storage import DeviceBytes, MemoryStore, StorageError, StoreIOError

CONTENT = os.urandom(10_000)


class Pending:
    def __init__(self, out: DeviceBytes, content: bytes, error: StorageError | None) -> None:
        self._out, self._content, self._error = out, content, error

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        assert isinstance(self._out.owner, torch.Tensor)
        self._out.owner.copy_(torch.frombuffer(bytearray(self._content), dtype=torch.uint8))


class Reader:
    """Brings bytes to host memory that stands for a device's."""

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at

    def read_into(self, offset: int, out: memoryview) -> None:
        if self._fails_at == "both":
            raise StoreIOError("the disk is gone")
        out[:] = CONTENT[offset : offset + out.nbytes]

    def start_read(self, offset: int, out: DeviceBytes) -> Pending:
        error = StoreIOError("the disk is on fire")
        if self._fails_at == "start":
            raise error
        content = CONTENT[offset : offset + out.num_bytes]
        return Pending(out, content, error if self._fails_at in ("wait", "both") else None)

    def close(self) -> None:
        pass


class ReadingStore(MemoryStore):
    def __init__(self, fails_at: str) -> None:
        super().__init__()
        self._reader = Reader(fails_at)

    def open_reader(self, key: str) -> Reader:
        return self._reader

    def reads_into_devices(self, num_bytes: int) -> bool:
        return True


def read(fails_at: str, out: torch.Tensor) -> DirectRead:
    objects = OpenObjects(ReadingStore(fails_at))
    assert objects.reads_into_devices(1)
    return DirectRead(objects, "a", 1000, out)


@pytest.mark.parametrize("fails_at", ["", "start", "wait"])
def test_bytes_arrive_and_a_failure_is_kept(fails_at: str) -> None:
    out = torch.zeros(500, dtype=torch.uint8)
    reading = read(fails_at, out)
    reading.wait()
    assert bytes(out.numpy()) == CONTENT[1000:1500]
    assert (reading.failure is None) is (fails_at == "")
    if reading.failure is not None:
        assert "on fire" in str(reading.failure)


def test_what_no_way_can_read_is_an_error() -> None:
    reading = read("both", torch.zeros(500, dtype=torch.uint8))
    with pytest.raises(StoreIOError, match="the disk is gone"):
        reading.wait()
