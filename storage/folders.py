"""Folders walked part by part, so that no symbolic link inside the root is ever followed."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Sequence
from types import TracebackType

_ROOT_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER_FLAGS = _ROOT_FLAGS | os.O_NOFOLLOW
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


def close_all(fds: list[int]) -> None:
    """Close file descriptors and empty the list. Errors are dropped: nothing that is unsynced may depend on this."""
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())


class FolderChain:
    """Open folders, from the root down to one folder. They are closed with `close`, or when the chain is dropped.

    Args:
        root: The root's absolute path. It may be a symbolic link itself.
        parts: The names from the root down.
        make: Whether missing folders are made, the root included.

    Attributes:
        num_made: How many of the lowest folders this chain has made.

    Raises:
        OSError: FileNotFoundError if one is missing, or was removed while it was being made; NotADirectoryError if a
            part is a file or a symbolic link.
    """

    def __init__(self, root: str, parts: Sequence[str], *, make: bool = False) -> None:
        self._parts = tuple(parts)
        self._fds: list[int] = []
        self.num_made = 0
        self._close = weakref.finalize(self, close_all, self._fds)
        self._close.atexit = False
        try:
            self._fds.append(_open_root(root, make))
            for part in self._parts:
                self._fds.append(self._open_below(part, make))
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The lowest folder."""
        return self._fds[-1]

    def sync(self) -> None:
        """Make the entries of these folders durable, from below up to that of the root in its parent. Blocks.

        All of them, not only those that this chain has made: another process may have made one and not synced it yet.
        """
        for fd in reversed(self._fds):
            sync_folder(fd)
        with contextlib.suppress(PermissionError):  # we may be allowed below the root only
            parent = os.open("..", _ROOT_FLAGS, dir_fd=self._fds[0])
            try:
                sync_folder(parent)
            finally:
                os.close(parent)

    def remove_empty(self, num_folders: int | None = None) -> int:
        """Remove the lowest folders while they are empty, never the root.

        Args:
            num_folders: At most so many; None for all.

        Returns:
            The lowest folder that is left, open as long as the chain is. One that cannot be removed is in use.
        """
        count = len(self._parts) if num_folders is None else num_folders
        for i in range(count):
            try:
                os.rmdir(self._parts[-1 - i], dir_fd=self._fds[-2 - i])
            except OSError:
                return self._fds[-1 - i]
        return self._fds[-1 - count]

    def close(self) -> None:
        """Close the folders. May be called again."""
        close_all(self._fds)

    def __enter__(self) -> FolderChain:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open_below(self, part: str, make: bool) -> int:
        above = self._fds[-1]
        try:
            fd = os.open(part, _FOLDER_FLAGS, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
        else:
            self.num_made = 0
            return fd
        try:
            os.mkdir(part, dir_fd=above)
            self.num_made += 1
        except FileExistsError:  # another thread or process was faster
            self.num_made = 0
        return os.open(part, _FOLDER_FLAGS, dir_fd=above)


def sync_folder(fd: int) -> None:
    """Make a folder's entries durable. Blocks. Does nothing on filesystems that cannot sync a folder."""
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in _CANNOT_SYNC:
            raise


def _open_root(root: str, make: bool) -> int:
    try:
        return os.open(root, _ROOT_FLAGS)
    except FileNotFoundError:
        if not make:
            raise
    missing = [root]
    while not os.path.exists(parent := os.path.dirname(missing[-1])):
        missing.append(parent)
    os.makedirs(root, exist_ok=True)
    for path in reversed(missing):
        with contextlib.suppress(PermissionError):
            fd = os.open(os.path.dirname(path), _ROOT_FLAGS)
            try:
                sync_folder(fd)
            finally:
                os.close(fd)
    return os.open(root, _ROOT_FLAGS)
