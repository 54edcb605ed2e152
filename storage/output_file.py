"""A file that several threads write at once, past the page cache where alignment allows it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Literal

import numpy as np

from .base import ALIGNMENT_BYTES, DeviceBytes
from .device_file import DeviceFile
from .errors import StorageError, StoreIOError
from .folders import close_all
from .oserrors import FULL_ERRNOS

IOMode = Literal["auto", "direct", "buffered", "gds"]

_RESERVE_STEP_BYTES = 1 << 30
_FLAGS = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_REFUSED_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class OutputFile:
    """A new file. Closed with `close` or `finish`, or when it is dropped.

    Args:
        folder_fd: The folder.
        name: Its name there, which must be free.
        path: Its path, for messages.
        key: The object concerned, for messages.
        io: "auto" and "gds" write aligned bytes with O_DIRECT if the filesystem takes it; "direct" makes it an error if
            not; "buffered" never does.
        size_hint_bytes: About how long the file will be; room is reserved up to it.

    Raises:
        OSError: It cannot be created.
        StoreIOError: `io` is "direct" and the filesystem refuses that. No file is left.
    """

    def __init__(self, folder_fd: int, name: str, *, path: str, key: str, io: IOMode, size_hint_bytes: int) -> None:
        self._path = path
        self._key = key
        self._io = io
        self._hint_bytes = size_hint_bytes
        self._reserved_bytes = 0
        self._can_reserve = True
        self._is_direct = io != "buffered"
        self._num_writing = 0
        self._idle = threading.Condition()
        self._device_file: DeviceFile | None = None
        self._fds = [os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder_fd)]
        weakref.finalize(self, close_all, self._fds).atexit = False
        if self._is_direct:
            try:
                self._open_direct(folder_fd, name)
            except BaseException:
                self.close()
                os.unlink(name, dir_fd=folder_fd)
                raise

    def reserve(self, end_bytes: int) -> None:
        """Reserve room up to `end_bytes`, and some more, up to the hint if there is one. Blocks; one thread at a time.

        Raises:
            OSError: ENOSPC, EDQUOT or EFBIG: there is no such room. Whatever else prevents reserving is let pass.
        """
        if not self._can_reserve or end_bytes <= self._reserved_bytes:
            return
        wished = max(self._hint_bytes, 2 * self._reserved_bytes)
        goal = max(end_bytes, min(wished, self._reserved_bytes + _RESERVE_STEP_BYTES))
        number = 0
        for target in (goal, end_bytes):  # if there is no room for the wish, there may be for what is needed
            number = _allocate(self._fds[0], self._reserved_bytes, target - self._reserved_bytes)
            if number == 0:
                self._reserved_bytes = target
                return
            if number not in FULL_ERRNOS:
                self._can_reserve = False
                return
        raise OSError(number, os.strerror(number))

    def write_at(self, offset: int, view: memoryview) -> None:
        """Write all of `view` at `offset`. Blocks. Safe for threads whose ranges do not overlap.

        Raises:
            OSError: A write failed.
            StoreIOError: A write stored nothing, or `io` is "direct" and the filesystem refuses that.
            StorageError: The file is closed.
        """
        address = int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
        done = 0
        with self._writing():
            while done < view.nbytes:
                with view[done:] as rest:
                    num_bytes = self._write_some(offset + done, address + done, rest)
                if num_bytes == 0:
                    raise StoreIOError(f"cannot write {self._path}: the system stored none of the bytes", key=self._key)
                done += num_bytes

    def write_device_at(self, offset: int, data: DeviceBytes) -> None:
        """Write all of `data`, which lies on a CUDA device, at `offset`. Blocks. Safe for threads as `write_at` is.

        Raises:
            OSError: The write failed.
            StorageError: The file is closed, or KvikIO cannot be used.
        """
        with self._writing():
            self._opened_for_device().write_at(offset, data)

    def sync(self) -> None:
        """Make what is written durable. Blocks."""
        os.fsync(self._fds[0])

    def finish(self, num_bytes: int, *, sync: bool) -> None:
        """Cut the file to its true length, make it durable if `sync`, and close it. Blocks.

        Raises:
            OSError: Any of these failed, so the file must not be trusted. Do not call this again: after a failed fsync
                the kernel may have dropped what it could not write, and the next one would succeed.
        """
        self._close_device_file()
        if self._is_direct or self._reserved_bytes > num_bytes:  # else it is as long as what was written
            os.ftruncate(self._fds[0], num_bytes)
        if sync:
            os.fsync(self._fds[0])
        while self._fds:
            os.close(self._fds.pop())

    def close(self) -> None:
        """Close the file as it is, after the writes that have begun. May be called again. Blocks."""
        with self._idle:
            self._idle.wait_for(lambda: self._num_writing == 0)
            self._close_device_file()
            close_all(self._fds)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        # A descriptor must never be closed under a write: its number may be another file's by then.
        with self._idle:
            if not self._fds:
                raise StorageError(f"{self._path} was closed before all was written", key=self._key)
            self._num_writing += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_writing -= 1
                self._idle.notify_all()

    def _opened_for_device(self) -> DeviceFile:
        with self._idle:
            if self._device_file is None:
                # By way of our own descriptor, not by name: so it is this very file, whatever its folders have become.
                self._device_file = DeviceFile(f"/proc/self/fd/{self._fds[0]}")
            return self._device_file

    def _close_device_file(self) -> None:
        if self._device_file is not None:
            self._device_file.close()
            self._device_file = None

    def _open_direct(self, folder_fd: int, name: str) -> None:
        try:
            self._fds.append(os.open(name, _FLAGS | os.O_DIRECT, dir_fd=folder_fd))
        except OSError as exc:
            if exc.errno not in _REFUSED_DIRECT:
                raise
            self._refuse_direct(exc)

    def _write_some(self, offset: int, address: int, view: memoryview) -> int:
        whole = view.nbytes - view.nbytes % ALIGNMENT_BYTES
        if self._is_direct and whole and (offset | address) % ALIGNMENT_BYTES == 0:
            try:
                with view[:whole] as aligned:
                    return os.pwrite(self._fds[1], aligned, offset)
            except OSError as exc:
                if exc.errno not in _REFUSED_DIRECT:
                    raise
                self._refuse_direct(exc)
        return os.pwrite(self._fds[0], view, offset)

    def _refuse_direct(self, exc: OSError) -> None:
        if self._io == "direct":
            raise StoreIOError(
                f'cannot write {self._path} with O_DIRECT: the filesystem refuses it; open the store with io="auto"',
                key=self._key,
                errno=exc.errno,
            ) from exc
        self._is_direct = False


def _allocate(fd: int, offset: int, num_bytes: int) -> int:
    """Reserve a range and return 0 or an errno.

    This is fallocate, not posix_fallocate: where the filesystem cannot do it, the C library's posix_fallocate writes to
    every block, which is slow.
    """
    while True:
        if _fallocate(fd, 0, offset, num_bytes) == 0:
            return 0
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate.restype = ctypes.c_int
