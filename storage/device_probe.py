"""Which way do bytes of a CUDA device reach a folder faster: by KvikIO, or by our own threads through host memory?"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from .aligned import aligned_buffer
from .base import ALIGNMENT_BYTES, DeviceBytes
from .device_file import load_kvikio, one_line
from .errors import StorageError
from .output_file import IOMode, OutputFile
from .workers import WorkerPool

_PIECE_BYTES = 8 << 20
_SHORTEST_BYTES = 4 * _PIECE_BYTES
_LONGEST_BYTES = 32 * _PIECE_BYTES
_WRITE_S = 0.12  # how long one write may take: six of them, and what it takes to get ready, make about a second
_CLEARLY = 1.05  # a lead below the noise is none: then our own threads write, which need no library


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """How bytes of CUDA devices are written.

    Attributes:
        is_kvikio: By KvikIO, from device memory. Otherwise somebody else brings them to host memory first.
        note: What was chosen and why, in a sentence.
    """

    is_kvikio: bool
    note: str


def choose(
    io: IOMode,
    device: int,
    *,
    pool: WorkerPool,
    room_bytes: int | None,
    temporary_file: Callable[[], contextlib.AbstractContextManager[OutputFile]],
) -> DeviceChoice:
    """Choose by `io`; for "auto" by a measurement, which blocks for about a second.

    Args:
        io: As the store was opened.
        device: Index of the CUDA device.
        pool: The store's threads.
        room_bytes: What may be written there; None if nobody knows.
        temporary_file: Makes a file of the store, and removes it at the end.

    Raises:
        StorageError: `io` is "gds", and KvikIO cannot be used.
    """
    if io == "gds":
        return DeviceChoice(
            True, f'CUDA tensors are written from device memory by {load_kvikio().mode}, as io="gds" says'
        )
    if io != "auto":
        return DeviceChoice(False, f'CUDA tensors are written through host memory, as io="{io}" says')
    own = "CUDA tensors are written by our own threads through host memory"
    try:
        mode = load_kvikio().mode
    except StorageError as exc:
        return DeviceChoice(False, f"{own}: KvikIO cannot be used ({one_line(exc.__cause__)})")
    if room_bytes is not None and room_bytes < 4 * _SHORTEST_BYTES:
        return DeviceChoice(False, f"{own}: there is too little room to measure whether {mode} is faster")
    try:
        with temporary_file() as file, _buffers(device, pool.num_threads) as buffers:
            rates = _measure(file, pool, buffers, device, room_bytes)
    except (ImportError, OSError, RuntimeError, MemoryError, StorageError) as exc:
        return DeviceChoice(False, f"{own}: it could not be measured whether {mode} is faster ({one_line(exc)})")
    figures = (
        f"our own threads write at {rates.own_bytes_per_s / 1e9:.2f} GB/s through host memory, "
        f"{mode} at {rates.kvikio_bytes_per_s / 1e9:.2f} GB/s from device memory"
    )
    is_kvikio = rates.kvikio_bytes_per_s > _CLEARLY * rates.own_bytes_per_s
    return DeviceChoice(
        is_kvikio, f"CUDA tensors are written {'from device' if is_kvikio else 'through host'} memory: {figures}"
    )


@dataclass(frozen=True, slots=True)
class _Rates:
    own_bytes_per_s: float
    kvikio_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Buffers:
    """A piece in device memory, and page-locked host memory for some pieces.

    Attributes:
        runtime: CuPy's CUDA runtime.
        stream: A stream of the device.
        source: Address of the piece in device memory.
        host: The host memory.
        host_address: Where it begins.
    """

    runtime: ModuleType
    stream: int
    source: int
    host: memoryview
    host_address: int

    @property
    def num_slots(self) -> int:
        return len(self.host) // _PIECE_BYTES

    def to_host(self, slot: int) -> memoryview:
        """Copy the piece to a slot of the host memory, and wait for it."""
        start = slot * _PIECE_BYTES
        kind = self.runtime.memcpyDeviceToHost
        self.runtime.memcpyAsync(self.host_address + start, self.source, _PIECE_BYTES, kind, self.stream)
        self.runtime.streamSynchronize(self.stream)
        return self.host[start : start + _PIECE_BYTES]


@contextlib.contextmanager
def _buffers(device: int, num_slots: int) -> Iterator[_Buffers]:
    cupy = importlib.import_module("cupy")
    runtime: ModuleType = cupy.cuda.runtime
    with cupy.cuda.Device(device), contextlib.ExitStack() as stack:
        memory = runtime.malloc(_PIECE_BYTES + ALIGNMENT_BYTES)
        stack.callback(runtime.free, memory)
        source = -(-memory // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        stack.callback(runtime.streamDestroy, stream)
        host = aligned_buffer(num_slots * _PIECE_BYTES)
        host[:_PIECE_BYTES] = os.urandom(_PIECE_BYTES)  # some disks are quicker with zeros
        host_address = int(np.frombuffer(host, np.uint8).ctypes.data)
        runtime.hostRegister(host_address, len(host), 0)
        stack.callback(runtime.hostUnregister, host_address)
        runtime.memcpyAsync(source, host_address, _PIECE_BYTES, runtime.memcpyHostToDevice, stream)
        runtime.streamSynchronize(stream)
        yield _Buffers(runtime, stream, source, host, host_address)


def _measure(file: OutputFile, pool: WorkerPool, buffers: _Buffers, device: int, room_bytes: int | None) -> _Rates:
    def own(slot: int, offset: int) -> Future[None]:
        return pool.submit(file.write_at, offset, buffers.to_host(slot))

    def kvikio(slot: int, offset: int) -> Future[None]:
        return pool.submit(file.write_device_at, offset, DeviceBytes(buffers.source, _PIECE_BYTES, device))

    file.reserve(_SHORTEST_BYTES)
    rough = _rate(file, buffers.num_slots, _SHORTEST_BYTES, own)
    wished = min(int(rough * _WRITE_S), _LONGEST_BYTES, _LONGEST_BYTES if room_bytes is None else room_bytes // 4)
    num_bytes = max(wished // _PIECE_BYTES * _PIECE_BYTES, _SHORTEST_BYTES)
    file.reserve(num_bytes)
    rates = [[_rate(file, buffers.num_slots, num_bytes, way) for way in (own, kvikio)] for _ in range(3)]
    return _Rates(*(max(found) for found in zip(*rates[1:], strict=True)))  # the first round warms up


def _rate(file: OutputFile, num_slots: int, num_bytes: int, start: Callable[[int, int], Future[None]]) -> float:
    """Write so many bytes, with as many pieces under way as there are slots; durable bytes a second."""
    futures: dict[int, Future[None]] = {}
    began_s = time.perf_counter()
    try:
        for i in range(num_bytes // _PIECE_BYTES):
            slot = i % num_slots
            if slot in futures:
                futures.pop(slot).result()
            futures[slot] = start(slot, i * _PIECE_BYTES)
        for future in futures.values():
            future.result()
    finally:
        wait(futures.values())  # also after a failure: the buffers are freed next
    file.sync()
    return num_bytes / (time.perf_counter() - began_s)
