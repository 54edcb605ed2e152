"""Objects in this process's memory: the store for tests, and the reference for what the others must do."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from .base import ObjectStat
from .errors import ObjectExistsError, ObjectNotFoundError, StorageError, StoreIOError
from .keys import check_key, check_new_key, check_prefix, partial_name


class _Entry:
    __slots__ = ("changed_at_s", "content")

    def __init__(self, content: bytearray, changed_at_s: float) -> None:
        self.content = content
        self.changed_at_s = changed_at_s


class MemoryStore:
    """A store in a dict. Safe for threads; gone with the process.

    Args:
        name: For messages; `open_store("memory://name")` finds it by this.
        clock: Seconds that the ages in a listing are counted by.
    """

    def __init__(self, name: str = "unnamed", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        """`memory://name`."""
        return f"memory://{self._name}"

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> MemoryWriter:
        """Start a new object; see `Store.create`."""
        check_new_key(key)
        folder, slash, name = key.rpartition("/")
        partial_key = folder + slash + partial_name(name, secrets.token_hex(8))
        with self._lock:
            self._entries[partial_key] = _Entry(bytearray(), self._clock())
        return MemoryWriter(self, key, partial_key, replace)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on; see `Store.read_into`."""
        with self._lock:
            content = self._entry(key).content
            if offset < 0 or offset + out.nbytes > len(content):
                raise StoreIOError(
                    f"cannot read bytes {offset} to {offset + out.nbytes} of {self.url}/{key}: it has {len(content)}",
                    key=key,
                )
            with memoryview(content)[offset : offset + out.nbytes] as source:
                out[:] = source

    def read_all(self, key: str, *, limit_bytes: int) -> bytes:
        """Return a whole small object; see `Store.read_all`."""
        with self._lock:
            content = self._entry(key).content
            if len(content) > limit_bytes:
                raise StoreIOError(f"{self.url}/{key} has more than the {limit_bytes} bytes that it may have", key=key)
            return bytes(content)

    def stat(self, key: str) -> ObjectStat:
        """Tell an object's length and age; see `Store.stat`."""
        with self._lock:
            entry = self._entry(key)
            return ObjectStat(key, len(entry.content), max(0.0, self._clock() - entry.changed_at_s))

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        """Put a small object if the present one is `expected`; see `Store.compare_and_put`."""
        check_new_key(key)
        with self._lock:
            entry = self._entries.get(key)
            if (None if entry is None else bytes(entry.content)) != expected:
                state = "absent" if entry is None else "there already"
                raise ObjectExistsError(f"{self.url}/{key} is {state}, so it is not what was expected", key=key)
            self._entries[key] = _Entry(bytearray(data), self._clock())

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """Yield the objects under a prefix; see `Store.list`."""
        check_prefix(prefix)
        with self._lock:
            stats = [self.stat(key) for key in self._entries if key.startswith(prefix)]
        yield from stats

    def delete(self, key: str) -> None:
        """Remove an object; see `Store.delete`."""
        check_key(key)
        with self._lock:
            self._entries.pop(key, None)

    def close(self) -> None:
        """Do nothing: objects stay."""

    def _entry(self, key: str) -> _Entry:
        check_key(key)
        try:
            return self._entries[key]
        except KeyError:
            raise ObjectNotFoundError(f"{self.url} has no object {key!r}; check root and key", key=key) from None

    def _append(self, partial_key: str, data: memoryview) -> None:
        with self._lock:
            entry = self._entry(partial_key)
            entry.content += data
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


class MemoryWriter:
    """One object being written to a MemoryStore. Made by `MemoryStore.create`; see `ObjectWriter`."""

    def __init__(self, store: MemoryStore, key: str, partial_key: str, replace: bool) -> None:
        self._store = store
        self._key = key
        self._partial_key = partial_key
        self._replace = replace
        self._is_over = False
        self._is_sealed = False
        self._error: StorageError | None = None

    def append(self, data: memoryview) -> Future[None]:
        """Copy bytes to the end of the object; see `ObjectWriter.append`."""
        self._check_open()
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        try:
            if self._error is not None:
                raise self._error
            self._store._append(self._partial_key, data)
        except StorageError as exc:
            self._error = exc
            future.set_exception(exc)
        else:
            future.set_result(None)
        return future

    def seal(self) -> None:
        """Make the object visible; see `ObjectWriter.seal`."""
        self._check_open()
        self._is_over = True
        if self._error is None:
            try:
                self._store._publish(self._partial_key, self._key, self._replace)
            except StorageError as exc:
                self._error = exc
        if self._error is not None:
            raise self._error
        self._is_sealed = True

    def abort(self) -> None:
        """Drop the object; see `ObjectWriter.abort`."""
        self._is_over = True
        if not self._is_sealed:
            self._store.delete(self._partial_key)

    def _check_open(self) -> None:
        if self._is_over:
            raise self._error or StorageError(
                f"{self._key} was sealed or aborted already; create a new writer", key=self._key
            )
