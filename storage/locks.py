"""A lock on one name in a folder, between threads, processes and machines."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator

from .errors import StoreTimeoutError
from .keys import lock_name

LOCK_TIMEOUT_S = 60.0

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CANNOT_LOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def name_lock(
    folder_fd: int, name: str, *, key: str, required: bool, timeout_s: float = LOCK_TIMEOUT_S
) -> Iterator[None]:
    """Hold the lock of `name`. It is an flock on `.<name>.lock` beside it; the file is removed when the lock is let go.

    A holder that dies lets go; the file that it leaves behind does no harm.

    Args:
        folder_fd: The folder.
        name: The name in it.
        key: The object concerned, for messages.
        required: If False, go on without the lock where the filesystem has no locks, or no room for the file.
        timeout_s: How long to wait for another holder.

    Raises:
        StoreTimeoutError: Another holder kept it for that long.
        OSError: The lock file cannot be opened or locked.
    """
    fd = None
    try:
        fd = _acquire(folder_fd, lock_name(name), key, timeout_s)
    except OSError as exc:
        if required or exc.errno not in _CANNOT_LOCK:
            raise
    try:
        yield
    finally:
        if fd is not None:
            release(folder_fd, lock_name(name), fd)


def try_lock(folder_fd: int, file_name: str) -> int | None:
    """Take the lock whose file is `file_name`, without waiting.

    Returns:
        A descriptor for `release`; None if another has the lock.
    """
    fd = os.open(file_name, _FLAGS, 0o666, dir_fd=folder_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before us removes the file before it lets go, so what we have locked may have no name any more.
        if _is_named(folder_fd, file_name, fd):
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def release(folder_fd: int, file_name: str, fd: int) -> None:
    """Remove the lock file and let go of the lock."""
    with contextlib.suppress(OSError):
        os.unlink(file_name, dir_fd=folder_fd)
    os.close(fd)


def _acquire(folder_fd: int, file_name: str, key: str, timeout_s: float) -> int:
    # Polled, not awaited, so that a holder that hangs makes an error and not another one that hangs.
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.0005
    while (fd := try_lock(folder_fd, file_name)) is None:
        if time.monotonic() > deadline_s:
            raise StoreTimeoutError(
                f"another process has held the lock {file_name} of {key} for {timeout_s:g} s; end it, or try again",
                key=key,
                errno=errno.ETIMEDOUT,
                retryable=True,
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return fd


def _is_named(folder_fd: int, file_name: str, fd: int) -> bool:
    try:
        named = os.stat(file_name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))
