"""Errors of the stores.

    StorageError                  .key, .retryable
    ├── ObjectNotFoundError       (also FileNotFoundError)
    ├── ObjectExistsError         (also FileExistsError)
    ├── StoreFullError            (also OSError, with .errno ENOSPC, EDQUOT or EFBIG)
    ├── StorePermissionError      (also PermissionError)
    ├── StoreTimeoutError         (also TimeoutError)
    ├── InvalidKeyError           (also ValueError) the key would leave the store, or is no plain object
    └── StoreIOError              (also OSError) any other failure of the medium
"""

from __future__ import annotations


class StorageError(Exception):
    """Base of all errors raised by `tidegate.storage`.

    Args:
        message: What happened, where, and what to do.
        key: The object concerned.
        errno: The operating system's error number, where there is one.
        retryable: Whether the same call may succeed later.
    """

    def __init__(self, message: str, *, key: str = "", errno: int | None = None, retryable: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.key = key
        self.errno = errno
        self.retryable = retryable

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.key, self.errno, self.retryable))


def _rebuild(cls: type[StorageError], message: str, key: str, errno: int | None, retryable: bool) -> StorageError:
    return cls(message, key=key, errno=errno, retryable=retryable)


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """No object has this key."""


class ObjectExistsError(StorageError, FileExistsError):
    """The object is there already, or is not what compare-and-put expected."""


class StoreFullError(StorageError, OSError):
    """No room is left: the medium is full or a quota is used up."""


class StorePermissionError(StorageError, PermissionError):
    """The store refuses this to us."""


class StoreTimeoutError(StorageError, TimeoutError):
    """The store did not answer in time."""


class InvalidKeyError(StorageError, ValueError):
    """The key would leave the store, or names something that is not a plain object."""


class StoreIOError(StorageError, OSError):
    """The medium failed in some other way."""
