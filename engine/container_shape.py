"""Tell whether a container looks as one did: its kind, and its keys with their types and order."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import Any

from .skeleton import METADATA


class Shape:
    """The kind and the keys of a container.

    Args:
        x: A list, a tuple, or a dict, OrderedDict or defaultdict whose keys are of type str or int.
    """

    __slots__ = ("_has_metadata", "_key_types", "_keys", "_size", "kind")

    def __init__(self, x: Any) -> None:
        self.kind = type(x)
        self._size = len(x)
        self._keys = None if self.kind in (list, tuple) else list(x)
        self._key_types = list(map(type, self._keys or ()))
        self._has_metadata = self.kind is OrderedDict and bool(vars(x))

    def values(self, x: Any) -> Any:
        """Return the sequence of what a container holds; None if its shape is another."""
        if type(x) is not self.kind or len(x) != self._size:
            return None
        if self._keys is None:
            return x
        if self.kind is OrderedDict and vars(x).keys() != ({METADATA} if self._has_metadata else set()):
            return None
        keys = list(x)
        if list(map(type, keys)) != self._key_types or keys != self._keys:
            return None
        return list(x.values())


class TableShape:
    """The shape of a dict of dicts whose keys are text; what it holds is what the inner ones hold.

    Args:
        x: The dict.
    """

    __slots__ = ("_keys", "_outer", "_sizes")

    def __init__(self, x: Any) -> None:
        self._outer = Shape(x)
        self._sizes = list(map(len, x.values()))
        self._keys = list(chain.from_iterable(x.values()))

    def values(self, x: Any) -> Any:
        """As that of Shape."""
        rows = self._outer.values(x)
        if rows is None or set(map(type, rows)) != {dict} or list(map(len, rows)) != self._sizes:
            return None
        keys = list(chain.from_iterable(rows))
        if set(map(type, keys)) != {str} or keys != self._keys:
            return None
        return list(chain.from_iterable(map(dict.values, rows)))
