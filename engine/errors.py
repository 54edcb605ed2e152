"""All that the public API raises.

    CheckpointError
    ├── ConfigError                 (also ValueError)
    ├── UnsupportedStateError       (also TypeError)   .path
    ├── StepExistsError             .step
    ├── CheckpointNotFoundError     (also FileNotFoundError)
    ├── CodecUnavailableError       (also tidegate.codec's error of that name)
    ├── SaveError                   .rank .stage .fqn .key
    │   ├── SaveOSError             (also OSError, with its .errno: disk full, no permission, …)
    │   ├── TornSnapshotError
    │   └── RankFailedError         .failures
    ├── LoadError                   .rank .stage .fqn .key
    │   ├── LoadOSError             (also OSError)
    │   └── CorruptCheckpointError
    ├── WaitTimeoutError            (also TimeoutError) the save goes on
    └── InternalError               a bug of ours

    CheckpointWarning               (a UserWarning) something was worked around; the text says what
"""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.codec.errors import CodecUnavailableError as _CodecUnavailable


class CheckpointError(Exception):
    """Base of all errors raised by the public API.

    Args:
        message: What happened, where, and what to do.
        **fields: The attributes that the class documents; kept when the error is pickled.
    """

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self._fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message

    def saying(self, message: str) -> CheckpointError:
        """Return the same error with another message."""
        return type(self)(message, **self._fields)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self._fields))


def _rebuild(cls: type[CheckpointError], message: str, fields: Mapping[str, object]) -> CheckpointError:
    return cls(message, **fields)


class ConfigError(CheckpointError, ValueError):
    """An argument is wrong, or does not fit this machine."""


class UnsupportedStateError(CheckpointError, TypeError):
    """A value in the state cannot be saved; raised at the call, before a byte is written.

    Attributes:
        path: Where in the state it stands, such as `model.layers.0.weight`.
    """

    path: str = ""


class StepExistsError(CheckpointError):
    """This step is committed already. Pass `overwrite=True` to replace it.

    Attributes:
        step: The step.
    """

    step: int = -1


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint of this step, or none at all."""


class CodecUnavailableError(CheckpointError, _CodecUnavailable):
    """The codec needs a package or a device that is not here."""


class _TransferError(CheckpointError):
    rank: int = 0
    stage: str = ""
    fqn: str = ""
    key: str = ""


class SaveError(_TransferError):
    """A save failed; nothing was committed and what it wrote is gone.

    Attributes:
        rank: The rank that failed.
        stage: `stage`, `encode`, `write`, `commit` or `retain`.
        fqn: The first tensor concerned, or "".
        key: The object concerned, or "".
    """


class SaveOSError(SaveError, OSError):
    """A save failed because the operating system said no; `.errno` tells why."""

    errno: int | None = None


class TornSnapshotError(SaveError):
    """A tensor was changed while the save was reading it, so the checkpoint would mix two steps."""


class RankFailedError(SaveError):
    """Another rank failed, so this save failed on all.

    Attributes:
        failures: The message of each rank that failed.
    """

    failures: Mapping[int, str] = {}


class LoadError(_TransferError):
    """A load failed. Attributes as for SaveError; `stage` is `open`, `read`, `decode` or `place`."""


class LoadOSError(LoadError, OSError):
    """A load failed because the operating system said no; `.errno` tells why."""

    errno: int | None = None


class CorruptCheckpointError(LoadError):
    """What is stored is not what was saved, or is not a checkpoint of a version that this build reads."""


class WaitTimeoutError(CheckpointError, TimeoutError):
    """A wait ended before the save did. The save goes on; wait again."""


class InternalError(CheckpointError):
    """A bug of tidegate's own. Please report it."""


class CheckpointWarning(UserWarning):
    """Something went wrong and was worked around; the text says what."""
