"""Write one object to a folder: in pieces, by many threads, visible only when it is durable."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from .base import DeviceBytes
from .errors import StorageError, StoreIOError
from .folders import FolderChain
from .oserrors import mapped_errors
from .output_file import OutputFile
from .pieces import Pieces, piece_bytes
from .workers import WorkerPool

_T = TypeVar("_T", memoryview, DeviceBytes)
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class LocalWriter:
    """One object being written to a LocalStore. Made by `LocalStore.create`; see `ObjectWriter`.

    Args:
        chain: The folder; the writer closes it.
        file: The file being written; the writer closes it.
        partial_name: The file's name.
        name: The name it gets at `seal`.
        path: The path it gets at `seal`, for messages.
        key: The object's key.
        pool: Who writes.
        replace: Whether `seal` may replace a file.
        sync: Whether `seal` makes it durable.
    """

    def __init__(
        self,
        chain: FolderChain,
        file: OutputFile,
        *,
        partial_name: str,
        name: str,
        path: str,
        key: str,
        pool: WorkerPool,
        replace: bool,
        sync: bool,
    ) -> None:
        self._chain = chain
        self._file = file
        self._partial_name = partial_name
        self._name = name
        self._path = path
        self._key = key
        self._pool = pool
        self._replace = replace
        self._sync = sync
        self._num_bytes = 0
        self._error: BaseException | None = None
        self._is_open = True
        self._is_over = False
        self._has_linked = False
        self._in_flight: set[Future[None]] = set()
        self._lock = threading.Lock()  # guards the fields above
        self._end_lock = threading.Lock()  # one seal or abort at a time

    def append(self, data: memoryview) -> Future[None]:
        """Queue bytes for the store's threads; see `ObjectWriter.append`. Blocks only while room is being reserved."""
        view = data if data.format == "B" and data.ndim == 1 and data.contiguous else data.cast("B")
        self._check_open()
        size = piece_bytes(view.nbytes, self._pool.num_idle)
        pieces = Pieces(range(0, view.nbytes, size))

        def submit(start: int, offset: int) -> None:
            self._submit(pieces, start, self._write, offset, view[start : start + size])

        return self._queue(view.nbytes, pieces, submit)

    def append_here(self, data: bytes) -> None:
        """As `append`, but write in the calling thread: of a small object, which needs no more than one. Blocks."""
        self._check_open()
        pieces = Pieces(range(bool(data)))

        def write(start: int, offset: int) -> None:
            error: BaseException | None = None
            try:
                self._write(offset, memoryview(data))
            except StorageError as exc:
                error = exc
            self._end_piece(pieces, start, error)

        self._queue(len(data), pieces, write).result()

    def seal(self) -> None:
        """Make the object durable and visible; see `ObjectWriter.seal`.

        In this order: every append is done; true length; fsync of the file; its name; fsync of its folder and of those
        above it.
        """
        with self._end_lock:
            with self._lock:
                self._check_open()
                self._is_open = False
            self._await_appends()
            if self._error is not None:
                raise self._error
            try:
                with mapped_errors("finish", self._path, self._key, self._num_bytes):
                    self._file.finish(self._num_bytes, sync=self._sync)
                with mapped_errors("publish", self._path, self._key):
                    self._publish()
            except StorageError as exc:
                self._error = exc
                raise
            self._is_over = True
            self._chain.close()

    def abort(self) -> None:
        """Drop the object and the folders that were made for it; see `ObjectWriter.abort`."""
        with self._lock:
            self._is_open = False
            if self._error is None and not self._is_over:  # what is queued is skipped
                self._error = StorageError(f"{self._path} was aborted; create a new writer", key=self._key)
        with self._end_lock:
            if self._is_over:
                return
            self._await_appends()
            self._file.close()
            for name in (self._partial_name, self._name) if self._has_linked else (self._partial_name,):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._chain.fd)
            self._chain.remove_empty(self._chain.num_made)
            self._chain.close()
            self._is_over = True

    def _queue(self, num_bytes: int, pieces: Pieces, submit: Callable[[int, int], None]) -> Future[None]:
        """Take the next range of the object, and hand each piece to `submit` with its start and its offset."""
        try:
            offset = self._begin(num_bytes, pieces.future)
            if offset is not None:
                for start in pieces.starts:
                    submit(start, offset + start)
        except BaseException as exc:
            # Whatever it is (a KeyboardInterrupt, too): `abort` must not wait for pieces that nobody will write.
            error = StorageError(f"an append to {self._path} was cut short by {exc!r}; abort it", key=self._key)
            self._fail(error)
            pieces.end_all(error)
            raise
        return pieces.future

    def _begin(self, num_bytes: int, future: Future[None]) -> int | None:
        """Take the next range of the object and return its offset; None if `future` is done already."""
        with self._lock:
            self._check_open()  # again: a seal or an abort may have come between
            offset = self._num_bytes
            if self._error is None:
                try:
                    with mapped_errors("write", self._path, self._key, num_bytes):
                        self._file.reserve(offset + num_bytes)
                except StorageError as exc:
                    self._error = exc
            if self._error is not None:
                future.set_exception(self._error)
                return None
            if num_bytes == 0:
                future.set_result(None)
                return None
            self._num_bytes += num_bytes
            self._in_flight.add(future)
        future.add_done_callback(self._land)
        return offset

    def _submit(self, pieces: Pieces, start: int, write: Callable[[int, _T], None], offset: int, piece: _T) -> None:
        try:
            done = self._pool.submit(write, offset, piece)
        except RuntimeError as exc:
            if isinstance(piece, memoryview):
                piece.release()
            error = StorageError(
                f"cannot write {self._path}: its store was closed, or opened before a fork", key=self._key
            )
            error.__cause__ = exc
            self._end_piece(pieces, start, error)
        else:
            done.add_done_callback(lambda done: self._end_piece(pieces, start, done.exception()))

    def _write(self, offset: int, piece: memoryview) -> None:
        # Released here, not when a traceback lets go of it: once the future is done, the bytes are the caller's again.
        with piece:
            if self._error is not None:
                raise self._error
            with mapped_errors("write", self._path, self._key, piece.nbytes):
                self._file.write_at(offset, piece)

    def _end_piece(self, pieces: Pieces, start: int, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
        pieces.end_one(start, error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error

    def _land(self, append: Future[None]) -> None:
        with self._lock:
            self._in_flight.discard(append)

    def _await_appends(self) -> None:
        with self._lock:
            in_flight = list(self._in_flight)
        wait(in_flight)

    def _check_open(self) -> None:
        if not self._is_open:
            raise self._error or StorageError(
                f"{self._path} was sealed already; create a new writer to replace it", key=self._key
            )

    def _publish(self) -> None:
        folder = self._chain.fd
        if self._replace:
            os.replace(self._partial_name, self._name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            self._link(folder)
            self._has_linked = True
            with contextlib.suppress(OSError):  # a leftover then; the object has its name
                os.unlink(self._partial_name, dir_fd=folder)
        if self._sync:
            self._chain.sync()

    def _link(self, folder: int) -> None:
        try:
            os.link(self._partial_name, self._name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            # A file server that lost its first answer says so of our own link when it is asked again.
            if not self._is_linked(folder):
                raise
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            raise StoreIOError(
                f"cannot publish {self._path}: its filesystem has no hard links [{errno.errorcode[exc.errno]}], and an "
                "object appears by one, whole and only once; write to another filesystem",
                key=self._key,
                errno=exc.errno,
            ) from exc

    def _is_linked(self, folder: int) -> bool:
        try:
            ours = os.stat(self._partial_name, dir_fd=folder, follow_symlinks=False)
            return os.path.samestat(ours, os.stat(self._name, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            return False
