"""The objects that a load reads, kept open until it ends where the store can do that."""

from __future__ import annotations

import threading
from typing import Protocol

from tidegate.storage.base import DeviceReader, DeviceReadingStore, ObjectReader, OpeningStore

from .errors import InternalError


class FrameSource(Protocol):
    """Where frames are read from: a store, or what stands before one."""

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` with an object's bytes from `offset` on; see `Store.read_into`."""
        ...


class OpenObjects:
    """Reads pieces of a store's objects, each looked up once. Safe for threads.

    To look up a file takes a dozen system calls, and after each of them a thread waits for the GIL: beside seven other
    reading threads that took longer than to read 8 MiB.

    Args:
        store: Where they are.
    """

    def __init__(self, store: FrameSource) -> None:
        self._store = store
        self._opening = store if isinstance(store, OpeningStore) else None
        self._readers: dict[str, ObjectReader] = {}
        self._lock = threading.Lock()

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on; as `Store.read_into`. Blocks."""
        if self._opening is None:
            self._store.read_into(key, offset, out)
            return
        self._reader(self._opening, key).read_into(offset, out)

    def reads_into_devices(self, num_bytes: int) -> bool:
        """Whether so many bytes are best read by `device_reader`. May block for a second."""
        return isinstance(self._store, DeviceReadingStore) and self._store.reads_into_devices(num_bytes)

    def device_reader(self, key: str) -> DeviceReader:
        """Open an object, or find it open, to read it into CUDA devices; only where `reads_into_devices`. Blocks."""
        reader = None if self._opening is None else self._reader(self._opening, key)
        if not isinstance(reader, DeviceReader):
            raise InternalError(f"{key} cannot be read into CUDA devices")
        return reader

    def close(self) -> None:
        """Let go of all of them; nothing may be reading."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _reader(self, store: OpeningStore, key: str) -> ObjectReader:
        reader = self._readers.get(key)
        if reader is not None:
            return reader
        with self._lock:
            if key not in self._readers:
                self._readers[key] = store.open_reader(key)
            return self._readers[key]
