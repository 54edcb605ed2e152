"""A store that takes bytes at a set rate and drops them: storage of any speed, for benchmarks."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from .base import DeviceBytes
from .errors import ObjectNotFoundError, StorageError
from .memory import MemoryStore, MemoryWriter
from .object_table import ObjectTable
from .pacer import Pacer


class SinkStore(MemoryStore):
    """A store that keeps lengths only. Safe for threads; gone with the process.

    What is written through `create` is taken at the rate that is set, by one writer after the other, and dropped: it is
    listed, has a length and can be deleted, and to read it is a StoreIOError. What `compare_and_put` puts is kept, so a
    checkpoint commits, is found and is retired as in any store. It cannot be loaded.

    Args:
        bytes_per_s: The rate of all writers together; None or infinity for no limit.
        from_device: Whether its writers also take bytes from the memory of a CUDA device (`DeviceWriter`).
        name: For messages.
        clock: Seconds that the rate and the ages in a listing go by.
        sleep: Blocks for so many seconds by that clock.

    Attributes:
        taken_bytes: How many were taken so far.
        busy_s: For how long the sink had something to take: their time at the set rate.

    Raises:
        ValueError: The rate is not positive.
    """

    _SCHEME = "sink"
    _WHY_LOST = "a sink keeps no bytes; it is for benchmarks"

    def __init__(
        self,
        *,
        bytes_per_s: float | None = None,
        from_device: bool = False,
        name: str = "sink",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(name, clock=clock)
        self._bytes_per_s = math.inf if bytes_per_s is None else bytes_per_s
        is_limited = self._bytes_per_s != math.inf
        self._pacer = Pacer(self._bytes_per_s, clock=clock, sleep=sleep) if is_limited else None
        self._writer_class = SinkDeviceWriter if from_device else SinkWriter
        self._is_closed = False
        self.taken_bytes = 0
        self.busy_s = 0.0

    def prepare_for_device(self, device: int) -> str:
        """Tell whether bytes of a CUDA device are taken; see `DeviceStore.prepare_for_device`."""
        if self._writer_class is SinkDeviceWriter:
            return f"{self.url} takes bytes from device memory, as it was told to"
        return f"{self.url} takes bytes from host memory only, as it was told to"

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> SinkWriter:
        """Start a new object; see `Store.create`."""
        return self._writer_class(self, self._table, self._pacer, key, replace)

    def close(self) -> None:
        """Take what is queued and end the thread that keeps time. May be called again. Blocks."""
        self._is_closed = True
        if self._pacer is not None:
            self._pacer.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageError(f"{self.url} was closed; open a new one")

    def _count(self, num_bytes: int) -> None:
        with self._table.lock:
            self.taken_bytes += num_bytes
            self.busy_s += num_bytes / self._bytes_per_s


class SinkWriter(MemoryWriter):
    """One object being taken. Made by `SinkStore.create`; see `ObjectWriter`."""

    def __init__(self, store: SinkStore, table: ObjectTable, pacer: Pacer | None, key: str, replace: bool) -> None:
        super().__init__(table, key, None, replace)
        self._store = store
        self._pacer = pacer
        self._queued: set[Future[None]] = set()  # not yet taken
        self._futures: list[Future[None]] = []  # those, and some that are done
        self._lock = threading.Lock()

    def append(self, data: memoryview) -> Future[None]:
        """Take bytes; see `ObjectWriter.append`. The future is done when the set rate has let them through."""
        return self._take(data.nbytes)

    def seal(self) -> None:
        """Make the object visible when all its bytes are taken; see `ObjectWriter.seal`. Blocks."""
        with self._lock:
            self._check_open()
            self._is_over = True
            futures = list(self._futures)
        wait(futures)
        self._publish()

    def abort(self) -> None:
        """Forget the object; see `ObjectWriter.abort`. What is queued fails at once, but its time stays taken."""
        with self._lock:
            self._is_over = True
            if self._is_sealed:
                return
            if self._error is None:
                self._error = StorageError(f"{self._key} was aborted; create a new writer", key=self._key)
            queued = list(self._queued)
            self._queued.clear()
        for future in queued:
            future.set_exception(self._error)
        self._table.delete(self._partial_key)

    def _take(self, num_bytes: int) -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._check_open()
            self._store._check_open()
            self._futures = [other for other in self._futures if not other.done()]
            self._futures.append(future)
            self._queued.add(future)
        if self._pacer is None or num_bytes == 0:
            self._land(future, num_bytes)
            return future
        try:
            self._pacer.add(num_bytes, lambda: self._land(future, num_bytes))
        except RuntimeError as exc:
            self._error = StorageError(f"cannot write {self._key}: its store was closed, or opened before a fork")
            self._error.__cause__ = exc
            self._queued.discard(future)
            future.set_exception(self._error)
        return future

    def _land(self, future: Future[None], num_bytes: int) -> None:
        with self._lock:
            if future not in self._queued:  # aborted
                return
            self._queued.discard(future)
        self._store._count(num_bytes)
        with contextlib.suppress(ObjectNotFoundError):  # aborted since
            self._table.grow(self._partial_key, num_bytes)
        future.set_result(None)


class SinkDeviceWriter(SinkWriter):
    """One object being taken, also from the memory of a CUDA device; see `DeviceWriter`."""

    def append_device(self, data: DeviceBytes) -> Future[None]:
        """Take bytes of a device; see `DeviceWriter.append_device`. They are not looked at."""
        return self._take(data.num_bytes)
