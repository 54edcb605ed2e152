"""The store contract: named objects at rest, written once, read by ranges."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

ALIGNMENT_BYTES = 4096
"""Offsets, lengths and addresses that are multiples of this can be written past the page cache."""


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """One object in a listing: its key, its length, and how old it is by the store's clock."""

    key: str
    num_bytes: int
    age_s: float


class ObjectWriter(Protocol):
    """One object being written. It is invisible under its key until `seal` returns."""

    def append(self, data: memoryview) -> Future[None]:
        """Queue bytes at the end of the object.

        Args:
            data: Contiguous bytes (format "B"). They must stay unchanged until the returned future is done.

        Returns:
            A future that is done when the store no longer needs `data`; it holds the StorageError if the write failed.
            May block while the store has all the work it can take.
        """
        ...

    def seal(self) -> None:
        """Wait for all appends, then make the object durable and visible. Blocks.

        Call it once. If it raises, the object is not there (or not known to be durable): call `abort`.

        Raises:
            StorageError: The first one of any append, or ObjectExistsError, or whatever kept it from becoming durable.
        """
        ...

    def abort(self) -> None:
        """Drop the object and everything written for it; nothing after a `seal` that returned.

        Blocks until queued appends no longer use their bytes. Never raises, and may be called again.
        """
        ...


class Store(Protocol):
    """A flat space of objects. Keys are relative, "/"-separated, without "." or ".." parts (`keys.check_key`).

    Safe for threads. Every method may raise any StorageError; a key that is not plain is always an InvalidKeyError.
    An object is written either through `create` or through `compare_and_put`, not by turns.
    """

    @property
    def url(self) -> str:
        """Where this store is, for messages and reports."""
        ...

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        """Start a new object.

        Args:
            key: Its name.
            size_hint_bytes: About how long it will be; 0 when unknown. May be used to preallocate.
            replace: Whether an object of that key may be replaced, atomically, at `seal`. Without it `seal` raises
                ObjectExistsError.
        """
        ...

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the object's bytes from `offset` on. Blocks.

        Raises:
            ObjectNotFoundError: There is no such object.
            StoreIOError: The object is shorter.
        """
        ...

    def read_all(self, key: str, *, limit_bytes: int) -> bytes:
        """Return a whole small object: never a mix of it and of one that is just replacing it. Blocks.

        Raises:
            ObjectNotFoundError: There is no such object.
            StoreIOError: The object is longer than `limit_bytes`.
        """
        ...

    def stat(self, key: str) -> ObjectStat:
        """Raise ObjectNotFoundError, or tell the object's length and age."""
        ...

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        """Put a small object atomically and durably if the present one is `expected` (None: absent). Blocks.

        Of several callers with the same `expected`, one wins.

        Raises:
            ObjectExistsError: If the present object is something else, or absent. Nothing is changed.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """Yield the objects whose keys start with `prefix` ("" or ending in "/"), in no set order.

        What unfinished writes have left is included: its last part is `.*.partial` or `.*.lock` (`keys.is_reserved`).
        Objects that come or go meanwhile may or may not be yielded.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove the object, durably; no error if it is not there. Folders that only held it go as well. Blocks."""
        ...

    def close(self) -> None:
        """Finish what is queued and let go of threads and connections. Objects stay. May be called again. Blocks."""
        ...
