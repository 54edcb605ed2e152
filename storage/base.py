"""The store contract: named objects at rest, written once, read by ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

ALIGNMENT_BYTES = 4096
"""Offsets, lengths and addresses that are multiples of this can be written past the page cache."""


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """One object in a listing: its key, its length, and how old it is by the store's clock."""

    key: str
    num_bytes: int
    age_s: float


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBytes:
    """Bytes in the memory of a CUDA device, for stores that write from there or read into it.

    Attributes:
        address: Where they begin; to be written, a multiple of ALIGNMENT_BYTES.
        num_bytes: How many; to be written, a multiple of ALIGNMENT_BYTES.
        device: Index of the CUDA device.
        owner: Kept alive with this: what owns the memory.
    """

    address: int
    num_bytes: int
    device: int
    owner: object = None


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


@runtime_checkable
class DeviceWriter(ObjectWriter, Protocol):
    """An object that also takes bytes from the memory of a CUDA device."""

    def append_device(self, data: DeviceBytes) -> Future[None]:
        """Queue bytes of a device at the end of the object, in order with those of `append`.

        Args:
            data: Already written when this is called: no stream is waited for. They must stay unchanged until the
                returned future is done.

        Returns:
            As for `append`.
        """
        ...


class ObjectReader(Protocol):
    """One object that is kept open: the object that it was when it was opened. Safe for threads."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` with the object's bytes from `offset` on; as `Store.read_into`. Blocks."""
        ...

    def close(self) -> None:
        """Let go of it; nothing may be reading. May be called again."""
        ...


class DeviceRead(Protocol):
    """A read into the memory of a CUDA device that is under way. Whoever began it must wait for it."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Wait until all of it is there. Blocks, without the GIL. Call it once.

        Raises:
            StorageError: It failed; what was to be filled is undefined.
        """
        ...


@runtime_checkable
class DeviceReader(ObjectReader, Protocol):
    """An object that also reads right into the memory of a CUDA device."""

    def start_read(self, offset: int, out: DeviceBytes) -> DeviceRead:
        """Have `out` filled with the object's bytes from `offset` on. Does not block.

        Args:
            offset: Where they begin. It is fastest where this, and the address of `out`, are multiples of
                ALIGNMENT_BYTES.
            out: Where they go. No stream is waited for: nothing that is queued may still use that memory. It must stay
                until the read has been waited for.

        Raises:
            StorageError: It could not be begun.
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


@runtime_checkable
class OpeningStore(Store, Protocol):
    """A store that can keep an object open, so that whoever reads it piece by piece looks it up only once."""

    def open_reader(self, key: str) -> ObjectReader:
        """Open an object for reading. Blocks.

        Raises:
            ObjectNotFoundError: There is no such object.
        """
        ...


@runtime_checkable
class DeviceReadingStore(OpeningStore, Protocol):
    """A store whose `open_reader` returns DeviceReaders."""

    def reads_into_devices(self, num_bytes: int) -> bool:
        """Whether so many bytes come faster to CUDA devices by the readers' `start_read`. May block for a second."""
        ...


@runtime_checkable
class FolderStore(Store, Protocol):
    """A store that can tell its folders without looking at what is in them."""

    def folders(self) -> Iterator[str]:
        """Yield the first parts of keys of several parts, each once, in no set order. Blocks.

        One may be told that is empty by now, or that no key can have.
        """
        ...


@runtime_checkable
class DeviceStore(Store, Protocol):
    """A store that may write from the memory of a CUDA device: its `create` may return a DeviceWriter."""

    def prepare_for_device(self, device: int) -> str:
        """Find out, once, how bytes of a CUDA device are written fastest here. May block for a second.

        Args:
            device: Index of the CUDA device.

        Returns:
            What was chosen and why, in a sentence for the report.
        """
        ...


@runtime_checkable
class PreparedStore(Store, Protocol):
    """A store that finds out what its server can do before the first write."""

    def prepare(self) -> Sequence[str]:
        """Find that out, once. May block.

        Returns:
            What has to be told, in sentences for the report; each is returned once.
        """
        ...
