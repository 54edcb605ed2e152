"""Record what is done to a store, and replay any first part of it: what a crash at that point would leave."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from tests.kit.wrapping import WrappedStore, WrappedWriter
from tidegate.storage import MemoryStore, ObjectWriter, Store


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of a store.

    Attributes:
        kind: What was done.
        key: To which object.
        writer: Number of the writer, for create, append, seal and abort.
        offset: Where in the object the bytes of an append go.
        content: The bytes of an append or of compare_and_put.
        expected: What compare_and_put expected.
        replace: Whether the writer may replace an object.
    """

    kind: Literal["create", "append", "seal", "abort", "compare_and_put", "delete"]
    key: str
    writer: int = -1
    offset: int = 0
    content: bytes = b""
    expected: bytes | None = None
    replace: bool = False


class RecordingStore(WrappedStore):
    """Keeps every change in order. Appends are recorded when they are queued, everything else when it has succeeded.

    Attributes:
        operations: The changes so far, oldest first.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []
        self._lock = threading.RLock()
        self._writers = itertools.count()

    def record(self, operation: Operation) -> None:
        with self._lock:
            self.operations.append(operation)

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        inner = super().create(key, size_hint_bytes=size_hint_bytes, replace=replace)
        number = next(self._writers)
        self.record(Operation("create", key, number, replace=replace))
        return _RecordingWriter(self, inner, key, number)

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        super().compare_and_put(key, data, expected=expected)
        self.record(Operation("compare_and_put", key, content=bytes(data), expected=expected))

    def delete(self, key: str) -> None:
        super().delete(key)
        self.record(Operation("delete", key))

    def replay(self, num_operations: int, into: Store | None = None) -> Store:
        """Do the first operations again, on another store.

        Args:
            num_operations: How many.
            into: An empty store, such as a LocalStore in a new folder; None for a new MemoryStore.

        Returns:
            That store. Objects that were not sealed by then appear in it as leftovers only.
        """
        store = MemoryStore("replay") if into is None else into
        writers: dict[int, ObjectWriter] = {}
        for operation in self.operations[:num_operations]:
            match operation.kind:
                case "create":
                    writers[operation.writer] = store.create(operation.key, replace=operation.replace)
                case "append":
                    writers[operation.writer].append(memoryview(operation.content)).result()
                case "seal":
                    writers[operation.writer].seal()
                case "abort":
                    writers[operation.writer].abort()
                case "compare_and_put":
                    store.compare_and_put(operation.key, operation.content, expected=operation.expected)
                case "delete":
                    store.delete(operation.key)
        return store


class _RecordingWriter(WrappedWriter):
    def __init__(self, store: RecordingStore, inner: ObjectWriter, key: str, number: int) -> None:
        super().__init__(inner, key)
        self._store = store
        self._number = number
        self._num_bytes = 0
        self._is_over = False
        self._lock = threading.RLock()

    def append(self, data: memoryview) -> Future[None]:
        with self._lock:
            content = bytes(data)
            future = super().append(data)
            self._store.record(Operation("append", self.key, self._number, self._num_bytes, content))
            self._num_bytes += len(content)
            return future

    def seal(self) -> None:
        super().seal()
        self._is_over = True
        self._store.record(Operation("seal", self.key, self._number))

    def abort(self) -> None:
        super().abort()
        if not self._is_over:
            self._is_over = True
            self._store.record(Operation("abort", self.key, self._number))
