"""Stores with faults, around any store. While no fault is armed they change nothing and pass the store contract."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace as with_fields
from typing import TypeVar

from tests.kit.limits import FullStore, GateStore, SlowStore
from tests.kit.recording import Operation, RecordingStore
from tests.kit.wrapping import WrappedStore, WrappedWriter, content, failed, put
from tidegate.storage import ObjectStat, ObjectWriter, Store, StoreIOError

__all__ = [
    "FailOnceStore",
    "FlipStore",
    "FullStore",
    "GateStore",
    "Operation",
    "RecordingStore",
    "SlowStore",
    "TruncateStore",
    "WrappedStore",
    "content",
    "put",
]

_T = TypeVar("_T")


class FlipStore(WrappedStore):
    """Flips single bits of what is read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._bits: dict[str, int] = {}

    def flip(self, key: str, bit: int) -> None:
        """From now on, flip this bit of the object: bit 0 is the lowest of its first byte."""
        self._bits[key] = bit

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self.inner.read_into(key, offset, out)
        at, bit = divmod(self._bits.get(key, -1), 8)
        if offset <= at < offset + out.nbytes:
            out[at - offset] ^= 1 << bit

    def read_all(self, key: str, *, limit_bytes: int) -> bytes:
        out = bytearray(self.inner.read_all(key, limit_bytes=limit_bytes))
        at, bit = divmod(self._bits.get(key, -1), 8)
        if 0 <= at < len(out):
            out[at] ^= 1 << bit
        return bytes(out)


class TruncateStore(WrappedStore):
    """Shows objects as if they ended early."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lengths: dict[str, int] = {}

    def truncate(self, key: str, num_bytes: int) -> None:
        """From now on, the object ends after `num_bytes`."""
        self._lengths[key] = num_bytes

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        if key in self._lengths and offset + out.nbytes > self._lengths[key]:
            raise StoreIOError(f"{key} is cut short", key=key)
        self.inner.read_into(key, offset, out)

    def read_all(self, key: str, *, limit_bytes: int) -> bytes:
        return self.inner.read_all(key, limit_bytes=limit_bytes)[: self._lengths.get(key)]

    def stat(self, key: str) -> ObjectStat:
        return self._cut(self.inner.stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return map(self._cut, self.inner.list(prefix))

    def _cut(self, stat: ObjectStat) -> ObjectStat:
        return with_fields(stat, num_bytes=min(stat.num_bytes, self._lengths.get(stat.key, stat.num_bytes)))


class FailOnceStore(WrappedStore):
    """Fails single calls: create, append, seal, read_into, read_all, stat, compare_and_put, list, delete.

    A failed append also fails its writer's later calls, as the contract says.

    Attributes:
        num_calls: How often each operation was called.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.num_calls: Counter[str] = Counter()
        self._armed: dict[tuple[str, int], tuple[Exception, bool]] = {}
        self._lock = threading.Lock()

    def fail(self, operation: str, nth: int, error: Exception, *, after: bool = False) -> None:
        """Make the `nth` call from now on (1 is the next) raise `error`; `after` it took effect, like a lost answer."""
        self._armed[operation, self.num_calls[operation] + nth] = (error, after)

    def take(self, operation: str) -> tuple[Exception | None, bool]:
        """Count a call; the error that it must fail with, and whether that comes after it took effect."""
        with self._lock:
            self.num_calls[operation] += 1
            return self._armed.pop((operation, self.num_calls[operation]), (None, False))

    def call(self, operation: str, run: Callable[[], _T]) -> _T:
        error, after = self.take(operation)
        if error is not None and not after:
            raise error
        result = run()
        if error is not None:
            raise error
        return result

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        inner = self.call("create", lambda: self.inner.create(key, size_hint_bytes=size_hint_bytes, replace=replace))
        return _FailOnceWriter(self, inner, key)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self.call("read_into", lambda: self.inner.read_into(key, offset, out))

    def read_all(self, key: str, *, limit_bytes: int) -> bytes:
        return self.call("read_all", lambda: self.inner.read_all(key, limit_bytes=limit_bytes))

    def stat(self, key: str) -> ObjectStat:
        return self.call("stat", lambda: self.inner.stat(key))

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        self.call("compare_and_put", lambda: self.inner.compare_and_put(key, data, expected=expected))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return self.call("list", lambda: self.inner.list(prefix))

    def delete(self, key: str) -> None:
        self.call("delete", lambda: self.inner.delete(key))


class _FailOnceWriter(WrappedWriter):
    def __init__(self, store: FailOnceStore, inner: ObjectWriter, key: str) -> None:
        super().__init__(inner, key)
        self._store = store
        self._failed: Future[None] | None = None

    def append(self, data: memoryview) -> Future[None]:
        if self._failed is not None:
            return self._failed
        error, after = self._store.take("append")
        if error is None:
            return self.inner.append(data)
        if after:
            self.inner.append(data).result()
        self._failed = failed(error)
        return self._failed

    def seal(self) -> None:
        if self._failed is not None:
            self._failed.result()
        self._store.call("seal", self.inner.seal)
