"""Stores that hold appends back, or have room for so many bytes only."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from tests.kit.wrapping import WrappedStore, WrappedWriter, failed, forward
from tidegate.storage import ObjectNotFoundError, ObjectWriter, StorageError, Store, StoreFullError
from tidegate.storage.workers import WorkerPool

_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Waiting:
    writer: _GateWriter
    data: memoryview
    future: Future[None]


class GateStore(WrappedStore):
    """Lets appends through one by one, as permitted. The gate is open until `shut` is called.

    It starts no thread: an append that waits is passed on by the thread that calls `permit` or `open`.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._is_open = True
        self._num_permits = 0
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()

    def shut(self) -> None:
        """From now on, appends wait."""
        with self._changed:
            self._is_open = False

    def open(self) -> None:
        """Let everything through from now on."""
        with self._changed:
            self._is_open = True
            self._pass_on()

    def permit(self, num_appends: int = 1) -> None:
        """Let so many appends through, now or when they come."""
        with self._changed:
            self._num_permits += num_appends
            self._pass_on()

    def await_waiting(self, num_appends: int) -> None:
        """Block until at least so many appends wait at the gate."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) >= num_appends, _TIMEOUT_S):
                raise TimeoutError(f"{len(self._waiting)} appends wait at the gate, not {num_appends}")

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        return _GateWriter(self, super().create(key, size_hint_bytes=size_hint_bytes, replace=replace), key)

    def close(self) -> None:
        self.open()
        super().close()

    def enter(self, writer: _GateWriter, data: memoryview) -> Future[None]:
        with self._changed:
            if self._is_open and not self._waiting:
                return writer.inner.append(data)
            future: Future[None] = Future()
            self._waiting.append(_Waiting(writer, data, future))
            self._pass_on()
            self._changed.notify_all()
            return future

    def leave(self, writer: _GateWriter) -> None:
        with self._changed:
            leaving = [entry for entry in self._waiting if entry.writer is writer]
            self._waiting = deque(entry for entry in self._waiting if entry.writer is not writer)
        for entry in leaving:
            entry.future.set_exception(StorageError(f"{writer.key} was aborted", key=writer.key))

    def _pass_on(self) -> None:
        while self._waiting and (self._is_open or self._num_permits):
            self._num_permits -= not self._is_open
            entry = self._waiting.popleft()
            forward(entry.writer.inner.append(entry.data), entry.future)


class _GateWriter(WrappedWriter):
    def __init__(self, store: GateStore, inner: ObjectWriter, key: str) -> None:
        super().__init__(inner, key)
        self._store = store
        self._futures: list[Future[None]] = []

    def append(self, data: memoryview) -> Future[None]:
        self._futures.append(self._store.enter(self, data))
        return self._futures[-1]

    def seal(self) -> None:
        wait(self._futures)
        super().seal()

    def abort(self) -> None:
        self._store.leave(self)
        super().abort()


class SlowStore(WrappedStore):
    """Takes bytes at a set rate, one append after the other.

    Args:
        inner: The store.
        bytes_per_s: The rate; None for no limit.
        sleep: Stands for the time that an append takes, in seconds. By default it really takes that long; a test of
            other things than time passes something that does not.
    """

    def __init__(
        self, inner: Store, bytes_per_s: float | None = None, sleep: Callable[[float], object] | None = None
    ) -> None:
        super().__init__(inner)
        self.bytes_per_s = bytes_per_s
        self.sleep = sleep
        self.pool = WorkerPool(1, "slow-store")

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        return _SlowWriter(self, super().create(key, size_hint_bytes=size_hint_bytes, replace=replace), key)

    def close(self) -> None:
        self.pool.close()
        super().close()


class _SlowWriter(WrappedWriter):
    def __init__(self, store: SlowStore, inner: ObjectWriter, key: str) -> None:
        super().__init__(inner, key)
        self._store = store
        self._futures: list[Future[None]] = []
        self._is_aborted = threading.Event()

    def append(self, data: memoryview) -> Future[None]:
        if self._store.bytes_per_s is None and all(future.done() for future in self._futures):
            return self.inner.append(data)
        self._futures.append(self._store.pool.submit(self._append, data))
        return self._futures[-1]

    def seal(self) -> None:
        wait(self._futures)
        super().seal()

    def abort(self) -> None:
        self._is_aborted.set()
        wait(self._futures)
        super().abort()

    def _append(self, data: memoryview) -> None:
        if self._store.bytes_per_s is not None:
            (self._store.sleep or self._is_aborted.wait)(data.nbytes / self._store.bytes_per_s)
        if self._is_aborted.is_set():
            raise StorageError(f"{self.key} was aborted", key=self.key)
        self.inner.append(data).result()


class FullStore(WrappedStore):
    """Has room for so many bytes; an append that does not fit is stored in part and fails with ENOSPC.

    Attributes:
        capacity_bytes: May be changed at any time; None for no limit.
        used_bytes: What the objects and the unfinished writes have taken.
    """

    def __init__(self, inner: Store, capacity_bytes: int | None = None) -> None:
        super().__init__(inner)
        self.capacity_bytes = capacity_bytes
        self.used_bytes = sum(stat.num_bytes for stat in inner.list())
        self._lock = threading.RLock()

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        return _FullWriter(self, super().create(key, size_hint_bytes=size_hint_bytes, replace=replace), key)

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        with self._lock:
            if self.take(len(data)) < len(data):
                raise self.full(key, len(data))
            try:
                super().compare_and_put(key, data, expected=expected)
            except BaseException:
                self.used_bytes -= len(data)
                raise
            self.used_bytes -= len(expected or b"")

    def delete(self, key: str) -> None:
        with self._lock:
            num_bytes = self.size(key)
            super().delete(key)
            self.used_bytes -= num_bytes

    def size(self, key: str) -> int:
        """Length of an object; 0 if it is not there."""
        try:
            return self.inner.stat(key).num_bytes
        except ObjectNotFoundError:
            return 0

    def take(self, num_bytes: int) -> int:
        """Take room for as many of these bytes as fit; all or a part."""
        with self._lock:
            free = num_bytes if self.capacity_bytes is None else max(0, self.capacity_bytes - self.used_bytes)
            fitting = min(num_bytes, free)
            self.used_bytes += fitting
            return fitting

    def full(self, key: str, num_bytes: int) -> StoreFullError:
        """The error of a write that did not fit."""
        return StoreFullError(
            f"cannot write {self.url}/{key}: No space left on device [ENOSPC]; {num_bytes} more bytes are needed",
            key=key,
            errno=errno.ENOSPC,
        )


class _FullWriter(WrappedWriter):
    def __init__(self, store: FullStore, inner: ObjectWriter, key: str) -> None:
        super().__init__(inner, key)
        self._store = store
        self._num_bytes = 0
        self._failed: Future[None] | None = None
        self._is_sealed = False
        self._lock = threading.Lock()

    def append(self, data: memoryview) -> Future[None]:
        if self._failed is not None:
            return self._failed
        with self._lock:
            fitting = self._store.take(data.nbytes)
            self._num_bytes += fitting
        future = self.inner.append(data[:fitting])
        if fitting == data.nbytes:
            return future
        wait([future])
        self._failed = failed(self._store.full(self.key, data.nbytes))
        return self._failed

    def seal(self) -> None:
        if self._failed is not None:
            self._failed.result()
        num_replaced = self._store.size(self.key)
        super().seal()
        self._is_sealed = True
        self._store.used_bytes -= num_replaced

    def abort(self) -> None:
        super().abort()
        if not self._is_sealed:
            self._store.used_bytes -= self._num_bytes
            self._num_bytes = 0
