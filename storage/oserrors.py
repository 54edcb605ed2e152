"""The one place where the operating system's errors become errors of the stores."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import (
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoreFullError,
    StoreIOError,
    StorePermissionError,
    StoreTimeoutError,
)

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_CLASS_OF_ERRNO: dict[int, type[StorageError]] = {
    **dict.fromkeys(FULL_ERRNOS, StoreFullError),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), StorePermissionError),
    **dict.fromkeys((errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO), InvalidKeyError),
    errno.ENOENT: ObjectNotFoundError,
    errno.EEXIST: ObjectExistsError,
    errno.ETIMEDOUT: StoreTimeoutError,
}
_RETRYABLE = frozenset({errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT})
_ADVICE = {
    errno.ENOSPC: "free some room there, keep fewer checkpoints, or write elsewhere",
    errno.EDQUOT: "your quota is used up: free some room, have it raised, or write elsewhere",
    errno.EFBIG: "this is over the limit for one file: see `ulimit -f`, or use a filesystem that takes larger ones",
    errno.EACCES: "have the owner grant access, or write elsewhere",
    errno.EPERM: "have the owner grant access, or write elsewhere",
    errno.EROFS: "the filesystem is mounted read-only: remount it, or write elsewhere",
    errno.ELOOP: "a symbolic link inside the root is never followed: put the file itself there",
    errno.ENOTDIR: "a part of the root or the key is a file or a symbolic link where a folder is needed",
    errno.EISDIR: "this is a folder, not an object",
    errno.ENXIO: "this is a socket or a device, not an object",
    errno.ENOENT: "check the root and the key",
    errno.EEXIST: "it is never overwritten unless asked",
    errno.EMFILE: "too many files are open in this process: see `ulimit -n`",
    errno.ESTALE: "the file server lost this file: try again",
    errno.EIO: "the medium failed: see the kernel's log",
}


def storage_error(exc: OSError, *, action: str, path: str, key: str, needed_bytes: int = 0) -> StorageError:
    """Translate an error of the operating system.

    Args:
        exc: What was raised.
        action: What was tried, to follow "cannot": "read", "write", …
        path: The file or folder concerned.
        key: The object concerned.
        needed_bytes: How many bytes had to go there.

    Returns:
        The error to be raised from `exc`. Its message has the path, the errno's name and what to do; where the medium
        is full also the bytes needed and free.
    """
    number = exc.errno if exc.errno is not None else 0
    name = errno.errorcode.get(number, "no errno")
    message = f"cannot {action} {path}: {exc.strerror or exc} [{name}]"
    if number in FULL_ERRNOS:
        message += f"; {needed_bytes} more bytes are needed and {_or_unknown(free_bytes(path))} are free"
    if number in _ADVICE:
        message += f"; {_ADVICE[number]}"
    cls = _CLASS_OF_ERRNO.get(number, StoreIOError)
    return cls(message, key=key, errno=exc.errno, retryable=number in _RETRYABLE)


@contextmanager
def mapped_errors(action: str, path: str, key: str, needed_bytes: int = 0) -> Iterator[None]:
    """Raise what `storage_error` makes of any OSError in the body; let the stores' own errors pass."""
    try:
        yield
    except StorageError:
        raise
    except OSError as exc:
        raise storage_error(exc, action=action, path=path, key=key, needed_bytes=needed_bytes) from exc


def _or_unknown(num_bytes: int | None) -> str:
    return "an unknown number" if num_bytes is None else str(num_bytes)


def free_bytes(path: str) -> int | None:
    """Return the bytes that an ordinary user can still write where `path` is or will be; None if nobody can tell."""
    while True:
        try:
            stats = os.statvfs(path)
        except OSError:
            parent = os.path.dirname(path)
            if parent in ("", path):
                return None
            path = parent
        else:
            return stats.f_bavail * stats.f_frsize
