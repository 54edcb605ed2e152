"""Where errors of codecs, stores and the system become errors of the public API."""

from __future__ import annotations

from typing import TypeVar

from tidegate.codec.errors import CodecError, CorruptionError, UnknownCodecError
from tidegate.codec.errors import CodecUnavailableError as CodecMissing
from tidegate.storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoreIOError,
)

from .errors import (
    CheckpointError,
    CodecUnavailableError,
    CorruptCheckpointError,
    InternalError,
    LoadError,
    LoadOSError,
    SaveError,
    SaveOSError,
    StepExistsError,
)

_Error = TypeVar("_Error", bound=CheckpointError)


def save_error(exc: BaseException, what: str, *, stage: str = "write") -> CheckpointError:
    """Return the public error for a failed save, with `exc` as its cause.

    Args:
        exc: What was raised; a CheckpointError is returned as it is.
        what: The save, for the message, such as "save of step 7".
        stage: Where it happened.
    """
    if isinstance(exc, CheckpointError):
        return exc
    if not isinstance(exc, Exception):
        text = f"{what} was interrupted by {type(exc).__name__}; nothing was committed"
        return _from(SaveError(text, stage=stage), exc)
    message = f"{what} failed, nothing was committed: {exc}"
    key = getattr(exc, "key", "") or ""
    if isinstance(exc, CodecMissing):
        return _from(CodecUnavailableError(message), exc)
    if isinstance(exc, ObjectExistsError):
        return _from(StepExistsError(f"{what} failed: somebody else committed it meanwhile ({exc})"), exc)
    if isinstance(exc, OSError):
        return _from(SaveOSError(message, errno=exc.errno, key=key, stage=stage), exc)
    if isinstance(exc, StorageError | CodecError | MemoryError | RuntimeError):
        return _from(SaveError(message, key=key, stage="encode" if isinstance(exc, CodecError) else stage), exc)
    return _internal(exc, what)


def load_error(exc: BaseException, what: str, *, stage: str, key: str = "", fqn: str = "") -> CheckpointError:
    """Return the public error for a failed load, with `exc` as its cause.

    Args:
        exc: What was raised; a CheckpointError is returned as it is.
        what: The frame or object, for the message.
        stage: `open`, `read`, `decode` or `place`.
        key: The object concerned.
        fqn: The first tensor concerned.
    """
    if isinstance(exc, CheckpointError):
        return exc
    key = getattr(exc, "key", "") or key
    message = f"{what}: {exc}"
    if isinstance(exc, CodecMissing):
        return _from(CodecUnavailableError(message), exc)
    if isinstance(exc, CorruptionError | UnknownCodecError):
        return _from(CorruptCheckpointError(message, stage=stage, key=key, fqn=fqn), exc)
    if isinstance(exc, ObjectNotFoundError) or (isinstance(exc, StoreIOError) and exc.errno is None):
        # the manifest promises this object and this range
        return _from(CorruptCheckpointError(message, stage=stage, key=key, fqn=fqn), exc)
    if isinstance(exc, OSError):
        return _from(LoadOSError(message, errno=exc.errno, stage=stage, key=key, fqn=fqn), exc)
    if isinstance(exc, StorageError | CodecError | MemoryError | RuntimeError):
        return _from(LoadError(message, stage=stage, key=key, fqn=fqn), exc)
    return _internal(exc, what)


def _internal(exc: BaseException, what: str) -> CheckpointError:
    text = f"{what} failed on a bug of tidegate's own, please report it: {type(exc).__name__}: {exc}"
    return _from(InternalError(text), exc)


def _from(error: _Error, cause: BaseException) -> _Error:
    error.__cause__ = cause
    return error
