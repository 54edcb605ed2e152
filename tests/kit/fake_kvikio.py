"""KvikIO and CuPy's CUDA runtime, with host memory for a device's, so that what surrounds them runs without a GPU.

They fail as the real ones do: a write while its file is closed, a second `get`, and errors of the system as text only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import ModuleType

import numpy as np
import pytest

from tests.kit.store_checks import TIMEOUT_S
from tidegate.storage import DeviceBytes, device_file
from tidegate.storage.aligned import aligned_buffer
from tidegate.storage.workers import WorkerPool


def device_bytes(content: bytes) -> DeviceBytes:
    """Put bytes where the fake device's memory is; their number must be a multiple of the alignment."""
    memory = aligned_buffer(len(content))
    memory[:] = content
    return DeviceBytes(_address(memory), len(content), 0, memory)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class FakeKvikio:
    """What the fake modules share.

    Attributes:
        gate: Writes and reads wait for it; open at first.
        begun: Set when one has begun.
        failure: The text that the next ones fail with; None: they do not.
        short_bytes: By how much they fall short.
        events: "open", "write OFFSET", "read OFFSET", "close", in order.
        faults: What must never happen.
        settings: `kvikio.defaults`.
        has_driver: Whether there is a driver for GPUDirect Storage.
        version: KvikIO's.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.failure: str | None = None
        self.short_bytes = 0
        self.events: list[str] = []
        self.faults: list[str] = []
        self.settings: dict[str, object] = {"num_threads": 1, "compat_mode": "AUTO"}
        self.has_driver = False
        self.version = "26.10.00"
        self.pool = WorkerPool(4, "fake-kvikio")

    def modules(self) -> dict[str, ModuleType]:
        """`kvikio` and those below it."""
        kvikio, defaults, driver = (ModuleType(f"kvikio{name}") for name in ("", ".defaults", ".cufile_driver"))
        kvikio.__version__ = self.version  # type: ignore[attr-defined]
        kvikio.CuFile = lambda path, flags: FakeCuFile(self, path, flags)  # type: ignore[attr-defined]
        kvikio.CompatMode = type("CompatMode", (), {"ON": "ON"})  # type: ignore[attr-defined]
        defaults.get = self.settings.__getitem__  # type: ignore[attr-defined]
        defaults.set = self.settings.__setitem__  # type: ignore[attr-defined]
        defaults.is_compat_mode_preferred = lambda: self.settings["compat_mode"] == "ON"  # type: ignore[attr-defined]
        driver.get = {"is_gds_available": self.has_driver}.__getitem__  # type: ignore[attr-defined]
        return {"kvikio": kvikio, "kvikio.defaults": defaults, "kvikio.cufile_driver": driver}


class FakeCuFile:
    """`kvikio.CuFile`."""

    def __init__(self, kvikio: FakeKvikio, path: str, flags: str) -> None:
        modes = {"r": os.O_RDONLY, "r+": os.O_RDWR}
        self.kvikio = kvikio
        self.num_under_way = 0
        try:
            self.fd = os.open(path, modes[flags] | os.O_CLOEXEC)
        except OSError as exc:
            raise RuntimeError(f"KvikIO failure at: file_utils.cpp:90: Unable to open file: {exc.strerror}") from None
        kvikio.events.append("open")

    def pwrite(self, buf: object, size: int, file_offset: int) -> FakeIOFuture:
        shown = buf.__cuda_array_interface__  # type: ignore[attr-defined]
        assert (shown["typestr"], shown["shape"], shown["version"]) == ("|u1", (size,), 3)
        self.num_under_way += 1
        return FakeIOFuture(self.kvikio.pool.submit(self._write, shown["data"][0], size, file_offset))

    def pread(self, buf: object, size: int, file_offset: int, task_size: int) -> FakeIOFuture:
        assert task_size > 0
        shown = buf.__cuda_array_interface__  # type: ignore[attr-defined]
        assert (shown["typestr"], shown["shape"], shown["version"]) == ("|u1", (size,), 3)
        self.num_under_way += 1
        return FakeIOFuture(self.kvikio.pool.submit(self._read, shown["data"][0], size, file_offset))

    def _write(self, address: int, size: int, offset: int) -> int:
        with self._io("pwrite"):
            count = os.pwrite(self.fd, ctypes.string_at(address, size - self.kvikio.short_bytes), offset)
            self.kvikio.events.append(f"write {offset}")
            return count

    def _read(self, address: int, size: int, offset: int) -> int:
        with self._io("pread"):
            found = os.pread(self.fd, size - self.kvikio.short_bytes, offset)
            ctypes.memmove(address, found, len(found))
            self.kvikio.events.append(f"read {offset}")
            return len(found)

    @contextlib.contextmanager
    def _io(self, name: str) -> Iterator[None]:
        self.kvikio.begun.set()
        assert self.kvikio.gate.wait(TIMEOUT_S)
        try:
            if self.kvikio.failure is not None:
                raise RuntimeError(self.kvikio.failure)
            yield
        except OSError as exc:
            raise RuntimeError(f"KvikIO failure at: posix_io.hpp:85: POSIX error on {name}: {exc.strerror}") from None
        finally:
            self.num_under_way -= 1

    def close(self) -> None:
        if self.num_under_way:
            self.kvikio.faults.append("a file was closed under a write or a read")
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.kvikio.events.append("close")


class FakeIOFuture:
    """`kvikio.cufile.IOFuture`."""

    def __init__(self, future: Future[int]) -> None:
        self._futures = [future]

    def done(self) -> bool:
        return self._futures[0].done()

    def get(self) -> int:
        return self._futures.pop().result(TIMEOUT_S)


class FakeRuntime(ModuleType):
    """`cupy.cuda.runtime`; all memory is the host's."""

    memcpyHostToDevice = 1
    memcpyDeviceToHost = 2
    streamNonBlocking = 1

    def __init__(self) -> None:
        super().__init__("cupy.cuda.runtime")
        self.held: dict[int, object] = {}

    def malloc(self, size: int) -> int:
        memory = aligned_buffer(size)
        self.held[_address(memory)] = memory
        return _address(memory)

    def free(self, address: int) -> None:
        del self.held[address]

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        self.held[address] = "registered"

    def hostUnregister(self, address: int) -> None:
        del self.held[address]

    def streamCreateWithFlags(self, flags: int) -> int:
        self.held[1] = "stream"
        return 1

    def streamDestroy(self, stream: int) -> None:
        del self.held[stream]

    def streamSynchronize(self, stream: int) -> None:
        assert stream in self.held

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        ctypes.memmove(to, source, size)


@contextlib.contextmanager
def fake_kvikio(monkeypatch: pytest.MonkeyPatch, *, has_driver: bool = False) -> Iterator[FakeKvikio]:
    """Let the stores find the fake, not set up yet, and no settings in the environment."""
    fake = FakeKvikio()
    fake.has_driver = has_driver
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(device_file, "_loaded", None)
    for name in ("CUFILE_LOGFILE_PATH", "CUFILE_ENV_PATH_JSON", "KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("KVIKIO_COMPAT_MODE", raising=False)
    yield fake
    fake.gate.set()
    fake.pool.close()
    assert fake.faults == []


def fake_cupy(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Let the stores find a CuPy whose device is the host."""
    runtime = FakeRuntime()
    cupy = ModuleType("cupy")
    cupy.cuda = ModuleType("cupy.cuda")  # type: ignore[attr-defined]
    cupy.cuda.runtime = runtime
    cupy.cuda.Device = lambda device: contextlib.nullcontext()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return runtime
