"""A store around a store, that passes everything on. The stores with faults change single methods of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

from tidegate.storage import ObjectStat, ObjectWriter, Store


class WrappedWriter:
    """Passes everything on to `inner`."""

    def __init__(self, inner: ObjectWriter, key: str) -> None:
        self.inner = inner
        self.key = key

    def append(self, data: memoryview) -> Future[None]:
        return self.inner.append(data)

    def seal(self) -> None:
        self.inner.seal()

    def abort(self) -> None:
        self.inner.abort()


class WrappedStore:
    """Passes everything on to `inner`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        return self.inner.create(key, size_hint_bytes=size_hint_bytes, replace=replace)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self.inner.read_into(key, offset, out)

    def read_all(self, key: str, *, limit_bytes: int) -> bytes:
        return self.inner.read_all(key, limit_bytes=limit_bytes)

    def stat(self, key: str) -> ObjectStat:
        return self.inner.stat(key)

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        self.inner.compare_and_put(key, data, expected=expected)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def close(self) -> None:
        self.inner.close()


def failed(error: BaseException) -> Future[None]:
    """A future that is done and holds this error."""
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def forward(source: Future[None], target: Future[None]) -> None:
    """Make `target` end as `source` does."""

    def copy(source: Future[None]) -> None:
        error = source.exception()
        if error is None:
            target.set_result(None)
        else:
            target.set_exception(error)

    source.add_done_callback(copy)


def content(store: Store, key: str) -> bytes:
    """Read a whole object."""
    out = bytearray(store.stat(key).num_bytes)
    store.read_into(key, 0, memoryview(out))
    return bytes(out)


def put(store: Store, key: str, *pieces: bytes, replace: bool = False) -> None:
    """Write a whole object, one append a piece."""
    writer = store.create(key, replace=replace)
    for piece in pieces:
        writer.append(memoryview(piece))
    writer.seal()
