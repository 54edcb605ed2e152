"""A file read right into the memory of a CUDA device, through KvikIO, whose threads need no GIL.

Where GPUDirect Storage works, the bytes never touch host memory. Elsewhere KvikIO reads them into page-locked buffers
of its own, from the page cache if they are there.
"""

from __future__ import annotations

import errno
from typing import Any

from .base import DeviceBytes
from .device_file import CudaArray, open_file, os_error

TASK_BYTES = 8 << 20
"""What one of its threads reads at a time: with 4 and with 16 MiB it was slower."""


class DeviceInput:
    """An open file that is read into memory of CUDA devices. Closed with `close`, or when it is dropped.

    Args:
        path: Where it can be opened.

    Raises:
        OSError: It cannot be opened.
        StorageError: KvikIO cannot be used.
    """

    def __init__(self, path: str) -> None:
        self._handle = open_file(path, "r")

    def start_read(self, offset: int, out: DeviceBytes) -> PendingRead:
        """Have KvikIO's threads fill `out` with what the file has at `offset`. Does not block.

        Raises:
            OSError: It could not be begun.
        """
        try:
            return PendingRead(self._handle.pread(CudaArray(out), out.num_bytes, offset, TASK_BYTES), out)
        except (RuntimeError, MemoryError) as exc:
            raise os_error(exc) from exc

    def close(self) -> None:
        """Close the file. No read may be under way. May be called again."""
        self._handle.close()


class PendingRead:
    """A read that KvikIO's threads do. It keeps the memory that they fill alive; drop it after `wait` only.

    Args:
        future: KvikIO's future.
        out: What is filled.
    """

    def __init__(self, future: Any, out: DeviceBytes) -> None:
        self._future = future
        self._out: DeviceBytes | None = out

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._out is None or bool(self._future.done())

    def wait(self) -> None:
        """Wait until all of it is there, without the GIL. Blocks. Call it once.

        Raises:
            OSError: The read failed, with an errno where KvikIO's text names one; what was to be filled is undefined.
        """
        out = self._out
        if out is None:
            return
        try:
            num_bytes = self._future.get()  # once: a second call is undefined
        except (RuntimeError, MemoryError) as exc:
            raise os_error(exc) from exc
        finally:
            self._out = None
        if num_bytes != out.num_bytes:
            raise OSError(errno.EIO, f"KvikIO read {num_bytes} of {out.num_bytes} bytes")
