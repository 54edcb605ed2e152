"""The ways to write a file of so many bytes and make it durable, that writer.py compares. Each returns its seconds."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tidegate.storage.aligned import aligned_buffer
from tidegate.storage.base import ALIGNMENT_BYTES, DeviceBytes, DeviceWriter
from tidegate.storage.device_file import load_kvikio
from tidegate.storage.errors import StorageError
from tidegate.storage.local import LocalStore
from tidegate.storage.output_file import IOMode

MIB = 1 << 20
APPEND_BYTES = 64 * MIB
_IN_FLIGHT_BYTES = 4 * APPEND_BYTES

Way = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Source:
    """What is written, over and over.

    Attributes:
        host: Host memory on whole pages, page-locked where there is a GPU; as much as may be in flight.
        tensor: The same memory.
        device: A tensor in device memory that begins on a whole page, as long as `host`; None without a GPU.
    """

    host: memoryview
    tensor: torch.Tensor
    device: torch.Tensor | None

    def device_bytes(self, start: int, num_bytes: int) -> DeviceBytes:
        """Return a part of the device memory."""
        if self.device is None:
            raise ValueError("there is no device memory to write from")
        return DeviceBytes(self.device.data_ptr() + start, num_bytes, self.device.get_device(), self.device)


def make_source(num_bytes: int) -> Source:
    """Fill host memory, and where there is a GPU its memory, with random bytes."""
    num_bytes = min(num_bytes, _IN_FLIGHT_BYTES)
    if not torch.cuda.is_available():
        view = aligned_buffer(num_bytes)
        return Source(view, torch.frombuffer(view, dtype=torch.uint8).random_(), None)
    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).random_()
    memory = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device="cuda")
    device = memory[-memory.data_ptr() % ALIGNMENT_BYTES :][:num_bytes]
    device.copy_(tensor)
    torch.cuda.synchronize()
    return Source(memoryview(tensor.numpy()), tensor, device)  # type: ignore[arg-type]


def plain_loop(folder: Path, source: Source, num_bytes: int, num_threads: int, piece_bytes: int) -> float:
    """Threads that take one piece after the other and write it past the page cache: the least there can be."""
    path = folder / "plain"
    start_s = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        offsets = iter(range(0, num_bytes, piece_bytes))
        lock = threading.Lock()

        def write() -> None:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                at = offset % len(source.host)
                os.pwrite(fd, source.host[at : at + piece_bytes], offset)

        threads = [threading.Thread(target=write) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.fsync(fd)
        return time.perf_counter() - start_s
    finally:
        os.close(fd)
        path.unlink()


def _local_store(store: LocalStore, append: Callable[[Any, int], Future[None]], num_bytes: int, size: int) -> float:
    """Append in order, with as much in flight as the source is long, and seal."""
    start_s = time.perf_counter()
    writer = store.create("ours", size_hint_bytes=num_bytes)
    in_flight: deque[Future[None]] = deque()
    for offset in range(0, num_bytes, size):
        if len(in_flight) * size >= _IN_FLIGHT_BYTES:
            in_flight.popleft().result()
        in_flight.append(append(writer, offset))
    writer.seal()
    took_s = time.perf_counter() - start_s
    store.delete("ours")
    return took_s


def from_host(store: LocalStore, source: Source, num_bytes: int, size: int) -> float:
    """LocalStore, from host memory."""

    def append(writer: Any, offset: int) -> Future[None]:
        at = offset % len(source.host)
        future: Future[None] = writer.append(source.host[at : at + size])
        return future

    return _local_store(store, append, num_bytes, size)


def through_host(store: LocalStore, source: Source, num_bytes: int, size: int) -> float:
    """LocalStore, from device memory by way of page-locked host memory."""
    if source.device is None:
        raise ValueError("there is no device memory to write from")
    device = source.device

    def append(writer: Any, offset: int) -> Future[None]:
        at = offset % len(source.host)
        source.tensor[at : at + size].copy_(device[at : at + size])
        future: Future[None] = writer.append(source.host[at : at + size])
        return future

    return _local_store(store, append, num_bytes, size)


def from_device(store: LocalStore, source: Source, num_bytes: int, size: int) -> float:
    """LocalStore, from device memory by KvikIO."""

    def append(writer: Any, offset: int) -> Future[None]:
        if not isinstance(writer, DeviceWriter):
            raise TypeError("this store writes from host memory only")
        return writer.append_device(source.device_bytes(offset % len(source.host), size))

    return _local_store(store, append, num_bytes, size)


def kvikio_alone(folder: Path, buffer: object, length: int, num_bytes: int, task_bytes: int) -> float:
    """KvikIO as it is: one call for each stretch of the file that is as long as the buffer."""
    kvikio = load_kvikio().module
    path = folder / "kvikio"
    start_s = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        with kvikio.CuFile(str(path), "r+") as file:
            futures = [file.pwrite(buffer, length, offset, task_bytes) for offset in range(0, num_bytes, length)]
            for future in futures:
                future.get()
        os.fsync(fd)
        return time.perf_counter() - start_s
    finally:
        os.close(fd)
        path.unlink()


@contextmanager
def all_ways(folder: Path, source: Source, num_bytes: int, plain_pieces: dict[int, int]) -> Iterator[dict[str, Way]]:
    """Make the ways that work here, by name.

    Args:
        folder: Where they write.
        source: What they write.
        num_bytes: How much; a multiple of the source's length.
        plain_pieces: For each number of threads of the plain loop, the length of its pieces.
    """
    size = min(APPEND_BYTES, len(source.host))
    ways: dict[str, Way] = {
        f"plain loop, {num} threads, {piece // MIB or 1} MiB": partial(
            plain_loop, folder, source, num_bytes, num, piece
        )
        for num, piece in plain_pieces.items()
    }
    stores: dict[IOMode, LocalStore] = {"direct": LocalStore(folder / "direct", io="direct")}
    own = stores["direct"]
    ways["LocalStore, 16 MiB appends"] = partial(from_host, own, source, num_bytes, min(16 * MIB, size))
    ways["LocalStore, 64 MiB appends"] = partial(from_host, own, source, num_bytes, size)
    try:
        if source.device is not None:
            ways["LocalStore, device through host"] = partial(through_host, own, source, num_bytes, size)
            stores["gds"] = LocalStore(folder / "gds", io="gds")
            ways["LocalStore, device by KvikIO"] = partial(from_device, stores["gds"], source, num_bytes, size)
            length = len(source.host)
            for task_bytes in (4 * MIB, 16 * MIB):
                name = f"{task_bytes // MIB} MiB tasks"
                ways[f"KvikIO, host, {name}"] = partial(
                    kvikio_alone, folder, source.host, length, num_bytes, task_bytes
                )
                ways[f"KvikIO, device, {name}"] = partial(
                    kvikio_alone, folder, source.device, length, num_bytes, task_bytes
                )
    except StorageError as exc:  # without KvikIO
        print(exc, flush=True)
    try:
        yield ways
    finally:
        for store in stores.values():
            store.close()
