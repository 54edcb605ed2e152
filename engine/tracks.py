"""Walk a state again along the track of the walk before, much faster where its containers look as they did.

A track mirrors the containers of a state: what kind each was, its keys, and what stood in it. A container of tensors,
or a dict of dicts of tensors, is compared in a few calls that see it whole, and its JSON is used again. All else is
written by the walk of skeleton.py. So the result is the same, with two exceptions, both of which `Likeness` finds: a
tensor that comes to stand in a second place may be listed twice, and what is no tensor any more may be taken for one.

A track holds keys, plain values and JSON; it keeps no tensor of the state alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from .container_shape import Shape, TableShape
from .paths import PathError
from .skeleton import METADATA, Walk, Writer
from .types import JSON

Names = list[tuple[str | int, ...]]


class ChangedError(Exception):
    """A container that has tensors is another than it was."""


class Follower(Writer):
    """One walk along a track."""

    def __init__(self) -> None:
        super().__init__()
        self._num_known = 0

    def take(self, tensors: Iterable[torch.Tensor], roles: Sequence[str]) -> None:
        """Add tensors that stand nowhere before."""
        self.walk.tensors.extend(tensors)
        self.walk.roles.extend(roles)

    def index_of(self, x: torch.Tensor) -> int:
        """As that of a Writer, which has to learn of the tensors that were taken."""
        tensors, known = self.walk.tensors, self._num_known
        if known < len(tensors):
            self._indices.update(zip(map(id, tensors[known:]), range(known, len(tensors)), strict=True))
        index = super().index_of(x)
        self._num_known = len(tensors)
        return index


class Track(Protocol):
    """How to write what stands in one place of a state."""

    def follow(self, x: object, writer: Follower, position: int, spots: list[int]) -> JSON:
        """Write it; the arguments are those of `Writer.node`. Raises ChangedError, PathError, RecursionError."""


def follow(track: Track, state: object) -> Walk | None:
    """Walk a state along a track. None if it has changed so much, or cannot be saved, that `take_apart` must see it."""
    writer = Follower()
    try:
        writer.walk.root = track.follow(state, writer, 0, [])
    except (ChangedError, PathError, RecursionError):
        return None
    return writer.walk


class Plain:
    """Anything: written as if it were new."""

    __slots__ = ("depth", "role")

    def __init__(self, depth: int, role: str) -> None:
        self.depth = depth
        self.role = role

    def follow(self, x: object, writer: Follower, position: int, spots: list[int]) -> JSON:
        writer.role = self.role
        return writer.node(x, self.depth, position, spots)


class TensorTrack:
    """A tensor that stands among other things."""

    __slots__ = ("index", "is_first", "node", "role")

    def __init__(self, index: int, node: JSON, role: str, is_first: bool) -> None:
        self.index = index
        self.node = node
        self.role = role
        self.is_first = is_first

    def follow(self, x: object, writer: Follower, position: int, spots: list[int]) -> JSON:
        tensors = writer.walk.tensors
        if self.is_first and len(tensors) == self.index:
            writer.take([x], [self.role])  # type: ignore[list-item]
        elif self.is_first or self.index >= len(tensors) or tensors[self.index] is not x:
            raise ChangedError
        spots += (position, self.index)
        return self.node


class TensorRun:
    """Tensors that stand side by side among other things, and nowhere before.

    Args:
        place: Of the first in its container.
        first: Its index.
        nodes: JSON of each.
        roles: Role of each.
    """

    __slots__ = ("_first", "_nodes", "_roles", "_span", "_spots")

    def __init__(self, place: int, first: int, nodes: Sequence[JSON], roles: Sequence[str]) -> None:
        num_tensors = len(nodes)
        self._span = slice(place, place + num_tensors)
        self._first = first
        self._nodes = nodes
        self._roles = roles
        places = range(place, place + num_tensors)
        self._spots = [spot for pair in zip(places, range(first, first + num_tensors), strict=True) for spot in pair]

    def take(self, values: Sequence[Any], writer: Follower, nodes: list[JSON], spots: list[int]) -> None:
        """Write them, given all that the container holds; add their JSON. Raises ChangedError."""
        if len(writer.walk.tensors) != self._first:
            raise ChangedError
        writer.take(values[self._span], self._roles)
        nodes += self._nodes
        spots += self._spots


class Tensors:
    """A container of nothing but tensors, which stand nowhere before."""

    __slots__ = ("_names", "_node", "first", "roles", "shape")

    def __init__(self, shape: Shape | TableShape, first: int, roles: list[str], node: JSON, names: Names) -> None:
        self.shape = shape
        self.first = first
        self.roles = roles
        self._node = node
        self._names = names

    def follow(self, x: object, writer: Follower, position: int, spots: list[int]) -> JSON:
        values = self.shape.values(x)
        if values is None or len(writer.walk.tensors) != self.first:
            raise ChangedError
        writer.take(values, self.roles)
        writer.walk.names.extend(self._names)
        spots.append(~position)
        return self._node


class Constants:
    """A container of plain values that may well be the same again, of types whose equal values are written alike."""

    __slots__ = ("_names", "_node", "_plain", "_types", "shape", "values")

    def __init__(
        self, shape: Shape | TableShape, values: list[object], node: JSON, names: Names, plain: Plain
    ) -> None:
        self.shape = shape
        self.values = values
        self._types = list(map(type, values))
        self._node = node
        self._names = names
        self._plain = plain

    def follow(self, x: object, writer: Follower, position: int, spots: list[int]) -> JSON:
        values = self.shape.values(x)
        if values is None or list(map(type, values)) != self._types or list(values) != self.values:
            return self._plain.follow(x, writer, position, spots)
        writer.walk.names.extend(self._names)
        spots.append(~position)
        return self._node


class Branch:
    """A container of several things.

    Args:
        shape: Its shape.
        children: What it holds, and in which place; or runs of tensors.
        build: Writes it, given the JSON of what it holds.
        head: How its names begin.
        plain: How to write it if it has another shape; None if it has tensors, so that it may not.
    """

    __slots__ = ("_build", "_children", "_head", "_plain", "_shape", "has_tensors")

    def __init__(
        self,
        shape: Shape,
        children: Sequence[tuple[int, Track] | TensorRun],
        build: Callable[[list[JSON]], JSON],
        head: tuple[str | int, ...],
        plain: Plain | None,
    ) -> None:
        self._shape = shape
        self._children = children
        self._build = build
        self._head = head
        self._plain = plain
        self.has_tensors = plain is None

    def follow(self, x: object, writer: Follower, position: int, spots: list[int]) -> JSON:
        values = self._shape.values(x)
        if values is None:
            if self._plain is None:
                raise ChangedError
            return self._plain.follow(x, writer, position, spots)
        inner: list[int] = []
        nodes: list[JSON] = []
        for child in self._children:
            if isinstance(child, TensorRun):
                child.take(values, writer, nodes, inner)
            else:
                place, track = child
                nodes.append(track.follow(values[place], writer, place, inner))
        writer.walk.names.append((*self._head, *inner))
        spots.append(~position)
        return self._build(nodes)


class StateDict:
    """An OrderedDict that has tensors and the metadata of `module.state_dict()`.

    Args:
        metadata: Its metadata.
        content: The rest; it raises ChangedError where its shape is another.
    """

    __slots__ = ("_content", "_metadata")

    def __init__(self, metadata: Track, content: Tensors | Branch) -> None:
        self._metadata = metadata
        self._content = content

    def follow(self, x: object, writer: Follower, position: int, spots: list[int]) -> JSON:
        if type(x) is not OrderedDict or METADATA not in vars(x):
            raise ChangedError
        metadata = self._metadata.follow(vars(x)[METADATA], writer, 0, [])
        content: Any = self._content.follow(x, writer, position, spots)
        return ["OrderedDict@", metadata, *content[1:]]
