"""Take a nested state apart a second time, much faster where its containers look as they did the first time.

A track mirrors the containers that have tensors: what kind each was, its keys, and what stood in it. So names and paths
of the leaves (flatten.py) are what they were, and only the leaves are taken from the state. All values are looked at,
for one may have become a tensor or have got one; that no tensor has become something else is left to TensorKinds, which
looks at the types of all tensors at once.

A track holds types and keys; it keeps nothing of a state alive.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Protocol

import torch

from .container_shape import Shape, TableShape
from .errors import UnsupportedStateError
from .flatten import PLAIN, has_tensor


class _Leaf:
    """What stands for a leaf among tracks."""


_TENSOR: Final = _Leaf()
_VALUE: Final = _Leaf()


@dataclass(slots=True)
class Leaves:
    """The leaves of a state, in the order of a Flat: tensors, and what is none."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    values: list[object] = field(default_factory=list)


class FlatTrack:
    """How to take states of one structure apart.

    Args:
        state: One that `flatten` has taken apart.
    """

    def __init__(self, state: object) -> None:
        try:
            self._root: _Track | None = _track(state, 0)
        except _ChangedError:
            self._root = None

    def follow(self, state: object) -> Leaves | None:
        """Return the leaves; None if the state must be flattened, as something is, or may be, another than it was.

        Anything may be listed in the place of a tensor.
        """
        leaves = Leaves()
        if self._root is None:
            return None
        try:
            self._root.follow(state, leaves)
        except (_ChangedError, UnsupportedStateError):
            return None
        return leaves


class _ChangedError(Exception):
    """A container is another than it was, or of a kind that no track knows."""


class _Track(Protocol):
    def follow(self, x: Any, leaves: Leaves) -> None:
        """Add the leaves of a container. Raises _ChangedError, UnsupportedStateError."""


_Child = _Track | _Leaf


class _Tensors:
    """A container of nothing but tensors."""

    __slots__ = ("_shape",)

    def __init__(self, shape: Shape | TableShape) -> None:
        self._shape = shape

    def follow(self, x: Any, leaves: Leaves) -> None:
        values = self._shape.values(x)
        if values is None:
            raise _ChangedError
        leaves.tensors.extend(values)


class _Branch:
    """A container of several things.

    Args:
        shape: Its shape.
        children: What it holds.
        depth: In how many containers that stands.
    """

    __slots__ = ("_children", "_depth", "_shape")

    def __init__(self, shape: Shape | TableShape, children: Sequence[_Child], depth: int) -> None:
        self._shape = shape
        self._children = children
        self._depth = depth

    def follow(self, x: Any, leaves: Leaves) -> None:
        found = self._shape.values(x)
        if found is None:
            raise _ChangedError
        tensors, values = leaves.tensors, leaves.values
        for child, inner in zip(self._children, found, strict=True):
            if child is _TENSOR:
                tensors.append(inner)
            elif isinstance(child, _Leaf):
                if type(inner) not in PLAIN and not _is_value(inner, self._depth):
                    raise _ChangedError
                values.append(inner)
            else:
                child.follow(inner, leaves)


def _is_value(x: object, depth: int) -> bool:
    return not (isinstance(x, torch.Tensor) or has_tensor(x, depth))


def _track(x: Any, depth: int) -> _Track:
    """Return the track of a container that has tensors, or of the root. Raises _ChangedError if none can be laid."""
    kind = type(x)
    is_dict = kind in (dict, OrderedDict, defaultdict)
    if kind not in (list, tuple) and not (is_dict and set(map(type, x)) <= {str, int}):
        raise _ChangedError  # equal keys of other types may have other names
    inner = list(x.values()) if is_dict else x
    shape: Shape | TableShape
    children: list[_Child]
    if is_dict and inner and all(_is_row(row, depth + 1) for row in inner):
        shape, depth = TableShape(x), depth + 1
        children = [_child(value, depth + 1) for value in chain.from_iterable(map(dict.values, inner))]
    else:
        shape, children = Shape(x), [_child(value, depth + 1) for value in inner]
    if children and all(child is _TENSOR for child in children):
        return _Tensors(shape)
    return _Branch(shape, children, depth + 1)


def _child(x: object, depth: int) -> _Child:
    if isinstance(x, torch.Tensor):
        return _TENSOR
    return _track(x, depth) if has_tensor(x, depth) else _VALUE


def _is_row(x: object, depth: int) -> bool:
    return type(x) is dict and set(map(type, x)) == {str} and has_tensor(x, depth)
