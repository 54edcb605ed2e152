"""One file of a local store, kept open for reading."""

from __future__ import annotations

import os

from .errors import StoreIOError
from .oserrors import mapped_errors


class LocalReader:
    """Reads a file by one system call a piece. Safe for threads, until it is closed.

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

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on; see `Store.read_into`."""
        with mapped_errors("read", self._path, self._key):
            if 0 <= offset <= self._num_bytes - out.nbytes and read_some(self._fd, offset, out) == out.nbytes:
                return
            num_bytes = os.fstat(self._fd).st_size
        raise StoreIOError(
            f"cannot read bytes {offset} to {offset + out.nbytes} of {self._path}: it has {num_bytes}; "
            "it was cut short, or is not what was written",
            key=self._key,
        )

    def close(self) -> None:
        """Close the file. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def read_some(fd: int, offset: int, out: memoryview) -> int:
    """Fill as much of `out` as the file has from `offset` on; return how much that is. Blocks."""
    done = 0
    while done < out.nbytes:
        count = os.preadv(fd, [out[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
