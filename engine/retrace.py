"""Lay a track (tracks.py) along a state that was just taken apart, so that it can be walked faster the next time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from .container_shape import Shape, TableShape
from .leaves import LEAVES
from .skeleton import METADATA, TENSORS, Walk, key_name
from .tracks import Branch, Constants, Plain, StateDict, TensorRun, Tensors, TensorTrack, Track
from .types import JSON

_CONSTANTS = frozenset({int, str, bool, type(None)})
"""Not float: 0.0 and -0.0 are equal, and are not written alike."""


def make_track(state: object, walk: Walk) -> Track:
    """Lay a track along a state.

    Args:
        state: The state. No tensor of it is kept.
        walk: What `take_apart` made of it.
    """
    try:
        return _Maker(walk).track(state, walk.root, 0, "")
    except RecursionError:
        return Plain(0, "")


@dataclass(slots=True)
class _Container:
    """A list, a tuple or a dict, and its JSON.

    Attributes:
        values: What it holds.
        nodes: Their JSON, which lies inside `depth` JSON containers.
        roles: Role of each.
        depth: See there.
        build: Writes the container again, from the JSON of what it holds.
        num_keys: How many of its keys are in its names.
    """

    values: list[Any]
    nodes: list[Any]
    roles: list[str]
    depth: int
    build: Callable[[list[JSON]], JSON]
    num_keys: int = 0


class _Maker:
    """Goes where the walk went, and counts what it had seen."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._num_containers = 0
        self._num_tensors = 0

    def track(self, x: Any, node: Any, depth: int, role: str) -> Track:
        """Return the track of a value, given its JSON, which lies inside `depth` JSON containers."""
        kind = type(x)
        plain = Plain(depth, role)
        if x is None or kind is bool or kind in LEAVES or kind in TENSORS:
            return plain
        end = self._walk.ends[self._num_containers]
        self._num_containers += 1
        track = self._container(x, node, plain, end) if kind in (dict, OrderedDict, list, tuple) else None
        self._num_containers, self._num_tensors, _ = end
        return track or plain

    def _container(self, x: Any, node: Any, plain: Plain, end: tuple[int, int, int]) -> Track | None:
        found = _read(x, node, plain)
        if found is None:
            return None
        metadata: Track | None = None
        if type(x) is OrderedDict and vars(x):
            metadata = self.track(vars(x)[METADATA], node[1], plain.depth + 1, plain.role)
            node = [type(x).__name__, *node[2:]]
        track = self._whole(x, node, found, plain, end[2]) or self._branch(x, found, plain, end)
        if metadata is None:
            return track
        if isinstance(track, Tensors) or (isinstance(track, Branch) and track.has_tensors):
            return StateDict(metadata, track)
        return None

    def _whole(self, x: Any, node: Any, found: _Container, plain: Plain, end: int) -> Tensors | Constants | None:
        """Return the track of a container, or a dict of dicts, that holds nothing but new tensors, or but constants.

        Args:
            x: The container.
            node: Its JSON.
            found: The two matched.
            plain: How it was written.
            end: The number of names with its own, which is the last.
        """
        shape: type[Shape | TableShape] = Shape
        values, nodes, num_names = found.values, found.nodes, 1
        if values and isinstance(x, dict) and all(map(_is_row, values, nodes)):
            shape, num_names = TableShape, 1 + len(values)  # each row has a name, as it holds no containers
            nodes = [inner for row in nodes for inner in row.values()]
            values = list(chain.from_iterable(map(dict.values, values)))
        kinds = set(map(type, values))
        names = self._walk.names[end - num_names : end]
        first, last = self._num_tensors, self._num_tensors + len(values)
        if kinds and kinds <= TENSORS and [inner[1] for inner in nodes] == list(range(first, last)):
            return Tensors(shape(x), first, self._walk.roles[first:last], node, names)
        return Constants(shape(x), values, node, names, plain) if kinds <= _CONSTANTS else None

    def _branch(self, x: Any, found: _Container, plain: Plain, end: tuple[int, int, int]) -> Branch | None:
        """Return the track of another container; None if nothing in it is worth one."""
        first = self._num_tensors
        children = [
            self._tensor(inner, role) if type(value) in TENSORS else self.track(value, inner, found.depth, role)
            for value, inner, role in zip(found.values, found.nodes, found.roles, strict=True)
        ]
        if all(type(child) is Plain for child in children):
            return None
        has_tensors = end[1] > first or any(type(child) is TensorTrack for child in children)
        head = self._walk.names[end[2] - 1][: 1 + found.num_keys]
        return Branch(Shape(x), _in_runs(children), found.build, head, None if has_tensors else plain)

    def _tensor(self, node: Any, role: str) -> TensorTrack:
        is_first = node[1] == self._num_tensors
        self._num_tensors += is_first
        return TensorTrack(node[1], node, role, is_first)


def _in_runs(children: Sequence[Track]) -> list[tuple[int, Track] | TensorRun]:
    """Gather tensors that stand side by side, and nowhere before."""
    found: list[tuple[int, Track] | TensorRun] = []
    for is_new, members in groupby(enumerate(children), lambda member: _is_new_tensor(member[1])):
        here = list(members)
        if is_new:
            tensors = [track for _, track in here if isinstance(track, TensorTrack)]
            nodes, roles = [track.node for track in tensors], [track.role for track in tensors]
            found.append(TensorRun(here[0][0], tensors[0].index, nodes, roles))
        else:
            found += here
    return found


def _is_new_tensor(track: Track) -> bool:
    return isinstance(track, TensorTrack) and track.is_first


def _is_row(x: Any, node: Any) -> bool:
    return type(x) is dict and type(node) is dict


def _read(x: Any, node: Any, plain: Plain) -> _Container | None:
    """Match a container with its JSON; None if it has keys of types whose equal values are not written alike."""
    if isinstance(x, list | tuple):
        tag = type(x).__name__
        return _Container(list(x), node[1:], [plain.role] * len(x), plain.depth + 1, lambda nodes: [tag, *nodes])
    if not set(map(type, x)) <= {str, int}:
        return None
    if isinstance(node, dict):
        depth, keys, nodes = plain.depth + 1, list(node), list(node.values())
    else:
        pairs = node[2:] if node[0] == "OrderedDict@" else node[1:]
        depth, keys, nodes = plain.depth + 2, [key for key, _ in pairs], [inner for _, inner in pairs]

    roles = [key_name(key)[1] for key in keys]
    return _Container(list(x.values()), nodes, roles, depth, _builder(node, type(x).__name__, keys), len(keys))


def _builder(node: JSON, tag: str, keys: list[Any]) -> Callable[[list[JSON]], JSON]:
    """Return what writes a dict. It keeps neither the dict nor its JSON."""
    if isinstance(node, dict):
        return lambda nodes: dict(zip(keys, nodes, strict=True))
    return lambda nodes: [tag, *map(list, zip(keys, nodes, strict=True))]
