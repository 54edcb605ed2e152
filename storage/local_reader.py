"""One file of a local store, kept open for reading."""

from __future__ import annotations

import os
import threading

from .base import DeviceBytes
from .device_input import DeviceInput, PendingRead
from .errors import StoreIOError
from .oserrors import mapped_errors


class LocalReader:
    """Reads a file by one system call a piece, or by KvikIO into CUDA devices. Safe for threads, until it is closed.

    Args:
        fd: The file, open for reading. It is the reader's from now on.
        path: Where it is, for messages.
        key: Key of the object.
    """

    def __init__(self, fd: int, path: str, key: str) -> None:
        self._fd = fd
        self._path = path
        self._key = key
        self._num_bytes = os.fstat(fd).st_size  # once: an object does not change, and each system call drops the GIL
        self._device_input: DeviceInput | None = None
        self._lock = threading.Lock()

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on; see `Store.read_into`."""
        with mapped_errors("read", self._path, self._key):
            if 0 <= offset <= self._num_bytes - out.nbytes and read_some(self._fd, offset, out) == out.nbytes:
                return
            num_bytes = os.fstat(self._fd).st_size
        raise self._too_short(offset, out.nbytes, num_bytes)

    def start_read(self, offset: int, out: DeviceBytes) -> LocalDeviceRead:
        """Have KvikIO fill `out`; see `DeviceReader.start_read`.

        Raises:
            StoreIOError: The file is shorter, or cannot be opened again.
            StorageError: KvikIO cannot be used.
        """
        if not 0 <= offset <= self._num_bytes - out.num_bytes:
            raise self._too_short(offset, out.num_bytes, self._num_bytes)
        with mapped_errors("read", self._path, self._key):
            pending = self._opened_for_device().start_read(offset, out)
        return LocalDeviceRead(pending, self._path, self._key)

    def close(self) -> None:
        """Close the file. May be called again."""
        with self._lock:
            opened, self._device_input = self._device_input, None
        if opened is not None:
            opened.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _opened_for_device(self) -> DeviceInput:
        with self._lock:
            if self._device_input is None:
                # By way of our own descriptor, not by name: so it is this very file, whatever its folders have become.
                self._device_input = DeviceInput(f"/proc/self/fd/{self._fd}")
            return self._device_input

    def _too_short(self, offset: int, num_bytes: int, found_bytes: int) -> StoreIOError:
        return StoreIOError(
            f"cannot read bytes {offset} to {offset + num_bytes} of {self._path}: it has {found_bytes}; "
            "it was cut short, or is not what was written",
            key=self._key,
        )


class LocalDeviceRead:
    """A read of a file into the memory of a CUDA device; see `DeviceRead`.

    Args:
        pending: What KvikIO is doing.
        path: The file, for messages.
        key: Key of the object.
    """

    def __init__(self, pending: PendingRead, path: str, key: str) -> None:
        self._pending = pending
        self._path = path
        self._key = key

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._pending.is_done()

    def wait(self) -> None:
        """Wait until all of it is there; see `DeviceRead.wait`."""
        with mapped_errors("read", self._path, self._key):
            self._pending.wait()


def read_some(fd: int, offset: int, out: memoryview) -> int:
    """Fill as much of `out` as the file has from `offset` on; return how much that is. Blocks."""
    done = 0
    while done < out.nbytes:
        count = os.preadv(fd, [out[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
