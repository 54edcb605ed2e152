"""Objects in this process's memory: the store for tests, and the reference for what the others must do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from .base import ObjectStat, ObjectWriter
from .errors import StorageError, StoreIOError
from .object_table import ObjectTable


class MemoryStore:
    """A store in a dict. Safe for threads; gone with the process.

    Args:
        name: For messages; `open_store("memory://name")` finds it by this.
        clock: Seconds that the ages in a listing are counted by.
    """

    _SCHEME = "memory"
    _WHY_LOST = "its bytes were not kept"

    def __init__(self, name: str = "unnamed", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = ObjectTable(f"{self._SCHEME}://{name}", clock)

    @property
    def url(self) -> str:
        """Such as `memory://name`."""
        return self._table.url

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        """Start a new object; see `Store.create`."""
        return MemoryWriter(self._table, key, bytearray(), replace)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on; see `Store.read_into`."""
        with self._table.lock:
            content = self._content(key)
            if offset < 0 or offset + out.nbytes > len(content):
                raise StoreIOError(
                    f"cannot read bytes {offset} to {offset + out.nbytes} of {self.url}/{key}: it has {len(content)}",
                    key=key,
                )
            with memoryview(content)[offset : offset + out.nbytes] as source:
                out[:] = source

    def read_all(self, key: str, *, limit_bytes: int) -> bytes:
        """Return a whole small object; see `Store.read_all`."""
        with self._table.lock:
            content = self._content(key)
            if len(content) > limit_bytes:
                raise StoreIOError(f"{self.url}/{key} has more than the {limit_bytes} bytes that it may have", key=key)
            return bytes(content)

    def stat(self, key: str) -> ObjectStat:
        """Tell an object's length and age; see `Store.stat`."""
        return self._table.stat(key)

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        """Put a small object if the present one is `expected`; see `Store.compare_and_put`."""
        self._table.compare_and_put(key, data, expected=expected)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """Yield the objects under a prefix; see `Store.list`."""
        return self._table.list(prefix)

    def delete(self, key: str) -> None:
        """Remove an object; see `Store.delete`."""
        self._table.delete(key)

    def close(self) -> None:
        """Do nothing: objects stay."""

    def _content(self, key: str) -> bytearray:
        content = self._table.entry(key).content
        if content is None:
            raise StoreIOError(f"cannot read {self.url}/{key}: {self._WHY_LOST}", key=key)
        return content


class MemoryWriter:
    """One object being written to a MemoryStore. Made by `MemoryStore.create`; see `ObjectWriter`."""

    def __init__(self, table: ObjectTable, key: str, content: bytearray | None, replace: bool) -> None:
        self._table = table
        self._key = key
        self._partial_key = table.begin(key, content)
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
            self._table.grow(self._partial_key, data.nbytes, data)
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
        self._publish()

    def abort(self) -> None:
        """Drop the object; see `ObjectWriter.abort`."""
        self._is_over = True
        if not self._is_sealed:
            self._table.delete(self._partial_key)

    def _publish(self) -> None:
        if self._error is None:
            try:
                self._table.publish(self._partial_key, self._key, replace=self._replace)
            except StorageError as exc:
                self._error = exc
        if self._error is not None:
            raise self._error
        self._is_sealed = True

    def _check_open(self) -> None:
        if self._is_over:
            raise self._error or StorageError(
                f"{self._key} was sealed or aborted already; create a new writer", key=self._key
            )
