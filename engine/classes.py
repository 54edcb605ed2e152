"""Classes of the caller's own: which can be saved, and which a checkpoint may bring back.

A checkpoint names a class as "module:qualname". Loading never imports it: it is looked up among the classes that the
caller has allowed with `torch.serialization.add_safe_globals` or inside `torch.serialization.safe_globals`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Iterable
from typing import Literal

import torch

from .errors import LoadError
from .paths import PathError

ClassKind = Literal["dataclass", "namedtuple", "enum"]

_NOT_BARE = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, BaseException)
"""Bases whose instances `object.__new__` cannot make, and whose own content the fields would not cover."""


def kind_of_class(cls: type) -> ClassKind | None:
    """Tell how instances of a class are saved; None: not at all."""
    if issubclass(cls, enum.Enum):
        return "enum"
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return "namedtuple"
    if dataclasses.is_dataclass(cls) and not issubclass(cls, (*_NOT_BARE, torch.nn.Module, torch.Tensor)):
        return "dataclass"
    return None


def class_name(cls: type) -> str:
    """Return "module:qualname" of a class.

    Raises:
        PathError: That name does not lead to this class, so that nobody could allow it at load.
    """
    found: object = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not cls:
        raise PathError(
            f"an instance of {cls.__module__}.{cls.__qualname__} cannot be saved, because that name does not lead to "
            "its class; define the class at the top level of a module, or save a dict instead"
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def field_names(cls: type) -> list[str]:
    """Return the fields of a dataclass or a namedtuple, in order."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return list(getattr(cls, "_fields", ()))


def extra_attributes(x: object) -> list[str]:
    """Return the names of attributes that the fields of a dataclass or namedtuple do not cover.

    What a `cached_property` has put there does not count: it is computed again.
    """
    known = set(field_names(type(x)))
    return [
        name
        for name in getattr(x, "__dict__", ())
        if name not in known and not isinstance(getattr(type(x), name, None), functools.cached_property)
    ]


class AllowedClasses:
    """The classes that a load may bring back, and those that it misses."""

    def __init__(self, allowed: Iterable[object]) -> None:
        self._by_name: dict[str, object] = {}
        self._missing: dict[str, None] = {}
        for item in allowed:
            if isinstance(item, tuple):
                cls, name = item
                self._by_name[str(name)] = cls
            else:
                self._by_name[f"{getattr(item, '__module__', '')}.{getattr(item, '__qualname__', '')}"] = item

    @classmethod
    def now(cls) -> AllowedClasses:
        """Take what the caller has allowed at this moment."""
        return cls(torch.serialization.get_safe_globals())

    def find(self, name: str, kind: ClassKind) -> type | None:
        """Return the class that a checkpoint names; None, and remember it as missing, if it is not allowed.

        Raises:
            PathError: It is allowed but is not of that kind.
        """
        found = self._by_name.get(name.replace(":", "."))
        if found is None:
            self._missing[name] = None
            return None
        if not isinstance(found, type) or kind_of_class(found) != kind:
            raise PathError(f"{name!r:.120} is allowed here, but it is not a {kind}")
        return found

    def check_none_missing(self) -> None:
        """Raise LoadError naming every class that was asked for and is not allowed."""
        if not self._missing:
            return
        shown = ", ".join(f"{name:.120}" for name in list(self._missing)[:20])
        names = ", ".join(name.rpartition(":")[2][:60] for name in list(self._missing)[:20])
        raise LoadError(
            f"the checkpoint holds instances of classes that are not allowed here: {shown}. If you trust them, import "
            f"them and load inside `with torch.serialization.safe_globals([{names}]):`, or call "
            f"torch.serialization.add_safe_globals([{names}]) first",
            stage="place",
        )
