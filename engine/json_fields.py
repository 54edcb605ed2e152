"""Values out of JSON that may be hostile: each is of the kind that is asked for, or a TypeError says what it is."""

from __future__ import annotations

from .paths import shown
from .types import JSON


def as_int(value: JSON, *, minimum: int = 0) -> int:
    """Return a whole number from `minimum` to 2**63 - 1."""
    if type(value) is not int or not minimum <= value < 1 << 63:
        raise TypeError(f"expected a whole number, got {shown(value)}")
    return value


def as_ints(value: JSON) -> tuple[int, ...]:
    """Return a list of whole numbers that are not negative."""
    items = as_list(value)
    if set(map(type, items)) - {int} or (items and not 0 <= min(items) <= max(items) < 1 << 63):  # type: ignore[type-var,operator]
        raise TypeError(f"expected whole numbers, got {shown(value)}")
    return tuple(items)  # type: ignore[arg-type]


def as_str(value: JSON) -> str:
    """Return text."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {shown(value)}")
    return value


def as_bool(value: JSON) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, got {shown(value)}")
    return value


def as_list(value: JSON) -> list[JSON]:
    """Return a list."""
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {shown(value)}")
    return value


def as_dict(value: JSON) -> dict[str, JSON]:
    """Return an object."""
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {shown(value)}")
    return value
