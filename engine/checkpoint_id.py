"""What DCP calls `checkpoint_id`: which step, under which root."""

from __future__ import annotations

import operator
import os
import re

from .commit import MAX_STEP
from .errors import ConfigError

_STEP = re.compile(r"(?:.*\D)?(\d{1,10})")


def split_checkpoint_id(checkpoint_id: str | os.PathLike[str] | int) -> tuple[str | None, int]:
    """Split a checkpoint id into a root and a step.

    Args:
        checkpoint_id: A step, as a number or text; or a path or URL whose last part ends in the step, such as
            `runs/7/step-1200`.

    Returns:
        The root, None where the id names none; and the step.

    Raises:
        ConfigError: It names no step.
    """
    if isinstance(checkpoint_id, str | os.PathLike):
        root, _, name = os.fspath(checkpoint_id).rstrip("/").rpartition("/")
        match = _STEP.fullmatch(name)
        if match is None:
            raise ConfigError(f"checkpoint_id {checkpoint_id!r} names no step; let it end in one, such as 'step-1200'")
        return root or None, int(match[1])
    return None, checked_step(checkpoint_id)


def names_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Tell whether `split_checkpoint_id` takes it."""
    try:
        split_checkpoint_id(checkpoint_id)
    except ConfigError:
        return False
    return True


def checked_step(step: int) -> int:
    """Return a step as a plain number. Raises ConfigError."""
    try:
        number = operator.index(step)
    except TypeError:
        raise ConfigError(f"step is {step!r}; give a whole number") from None
    if isinstance(step, bool) or not 0 <= number <= MAX_STEP:
        raise ConfigError(f"step is {step!r}; give a whole number from 0 to {MAX_STEP:,}")
    return number
