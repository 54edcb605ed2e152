"""A store that takes bytes at a set rate and drops them: storage of any speed, for benchmarks."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass

from .base import DeviceBytes, ObjectStat
from .errors import ObjectExistsError, ObjectNotFoundError, StorageError, StoreIOError
from .keys import check_key, check_new_key, check_prefix, partial_name
from .pacer import Pacer


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    changed_at_s: float
    content: bytes | None = None  # None: it was dropped


class SinkStore:
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

    def __init__(
        self,
        *,
        bytes_per_s: float | None = None,
        from_device: bool = False,
        name: str = "sink",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = math.inf if bytes_per_s is None else bytes_per_s
        is_limited = self._bytes_per_s != math.inf
        self._pacer = Pacer(self._bytes_per_s, clock=clock, sleep=sleep) if is_limited else None
        self._writer_class = SinkDeviceWriter if from_device else SinkWriter
        self._name = name
        self._clock = clock
        self._is_closed = False
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.RLock()
        self.taken_bytes = 0
        self.busy_s = 0.0

    @property
    def url(self) -> str:
        """`sink://name`."""
        return f"sink://{self._name}"

    def prepare_for_device(self, device: int) -> str:
        """Tell whether bytes of a CUDA device are taken; see `DeviceStore.prepare_for_device`."""
        if self._writer_class is SinkDeviceWriter:
            return f"{self.url} takes bytes from device memory, as it was told to"
        return f"{self.url} takes bytes from host memory only, as it was told to"

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> SinkWriter:
        """Start a new object; see `Store.create`."""
        check_new_key(key)
        folder, slash, name = key.rpartition("/")
        partial_key = folder + slash + partial_name(name, secrets.token_hex(8))
        with self._lock:
            self._entries[partial_key] = _Entry(0, self._clock())
        return self._writer_class(self, self._pacer, key, partial_key, replace)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` from an object that `compare_and_put` has put; see `Store.read_into`."""
        content = self._content(key)
        if offset < 0 or offset + out.nbytes > len(content):
            raise StoreIOError(
                f"cannot read bytes {offset} to {offset + out.nbytes} of {self.url}/{key}: it has {len(content)}",
                key=key,
            )
        out[:] = content[offset : offset + out.nbytes]

    def read_all(self, key: str, *, limit_bytes: int) -> bytes:
        """Return what `compare_and_put` has put; see `Store.read_all`."""
        content = self._content(key)
        if len(content) > limit_bytes:
            raise StoreIOError(f"{self.url}/{key} has more than the {limit_bytes} bytes that it may have", key=key)
        return content

    def stat(self, key: str) -> ObjectStat:
        """Tell an object's length and age; see `Store.stat`."""
        with self._lock:
            entry = self._entry(key)
            return ObjectStat(key, entry.num_bytes, max(0.0, self._clock() - entry.changed_at_s))

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        """Put and keep a small object, at once, if the present one is `expected`; see `Store.compare_and_put`."""
        check_new_key(key)
        with self._lock:
            entry = self._entries.get(key)
            if (entry is None) != (expected is None) or (entry is not None and entry.content != expected):
                state = "absent" if entry is None else "there already"
                raise ObjectExistsError(f"{self.url}/{key} is {state}, so it is not what was expected", key=key)
            self._entries[key] = _Entry(len(data), self._clock(), bytes(data))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """Yield the objects under a prefix; see `Store.list`."""
        check_prefix(prefix)
        with self._lock:
            stats = [self.stat(key) for key in self._entries if key.startswith(prefix)]
        yield from stats

    def delete(self, key: str) -> None:
        """Forget an object; see `Store.delete`."""
        check_key(key)
        with self._lock:
            self._entries.pop(key, None)

    def close(self) -> None:
        """Take what is queued and end the thread that keeps time. May be called again. Blocks."""
        self._is_closed = True
        if self._pacer is not None:
            self._pacer.close()

    def _entry(self, key: str) -> _Entry:
        check_key(key)
        try:
            return self._entries[key]
        except KeyError:
            raise ObjectNotFoundError(f"{self.url} has no object {key!r}; check the key", key=key) from None

    def _content(self, key: str) -> bytes:
        with self._lock:
            content = self._entry(key).content
        if content is None:
            raise StoreIOError(f"cannot read {self.url}/{key}: a sink keeps no bytes; it is for benchmarks", key=key)
        return content

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageError(f"{self.url} was closed; open a new one")

    def _grow(self, partial_key: str, num_bytes: int) -> None:
        with self._lock:
            self.taken_bytes += num_bytes
            self.busy_s += num_bytes / self._bytes_per_s
            entry = self._entries.get(partial_key)
            if entry is not None:
                entry.num_bytes += num_bytes
                entry.changed_at_s = self._clock()

    def _publish(self, partial_key: str, key: str, replace: bool) -> None:
        with self._lock:
            entry = self._entry(partial_key)
            if not replace and key in self._entries:
                raise ObjectExistsError(
                    f"{self.url}/{key} is there already; it is never overwritten unless asked", key=key
                )
            del self._entries[partial_key]
            self._entries[key] = entry


class SinkWriter:
    """One object being taken. Made by `SinkStore.create`; see `ObjectWriter`."""

    def __init__(self, store: SinkStore, pacer: Pacer | None, key: str, partial_key: str, replace: bool) -> None:
        self._store = store
        self._pacer = pacer
        self._key = key
        self._partial_key = partial_key
        self._replace = replace
        self._is_over = False
        self._is_sealed = False
        self._error: StorageError | None = None
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
        if self._error is None:
            try:
                self._store._publish(self._partial_key, self._key, self._replace)
            except StorageError as exc:
                self._error = exc
        if self._error is not None:
            raise self._error
        self._is_sealed = True

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
        self._store.delete(self._partial_key)

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
        self._store._grow(self._partial_key, num_bytes)
        future.set_result(None)

    def _check_open(self) -> None:
        if self._is_over:
            raise self._error or StorageError(f"{self._key} was sealed already", key=self._key)


class SinkDeviceWriter(SinkWriter):
    """One object being taken, also from the memory of a CUDA device; see `DeviceWriter`."""

    def append_device(self, data: DeviceBytes) -> Future[None]:
        """Take bytes of a device; see `DeviceWriter.append_device`. They are not looked at."""
        return self._take(data.num_bytes)
