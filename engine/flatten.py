"""Take a nested state with DTensors apart into named leaves, and put one together again.

Names are those of `torch.distributed.checkpoint`: keys and places joined by dots. Unlike there, tuples, OrderedDicts
and keys that are no text come back as they were. A container without a tensor is a leaf as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from .errors import UnsupportedStateError
from .paths import PathError, shown
from .rebuild import Reader
from .shard_map import PathSteps
from .skeleton import Writer
from .types import JSON

_MAX_DEPTH = 200

PLAIN = frozenset({int, float, str, bool, type(None), bytes, complex})
"""Types of values that have no tensor in them; there are more."""


@dataclass(slots=True)
class Flat:
    """A state's leaves by name, in the order of the state.

    Attributes:
        tensors: Tensors and DTensors.
        values: Everything else.
        paths: How each is reached.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    paths: dict[str, PathSteps] = field(default_factory=dict)


def flatten(state: object) -> Flat:
    """Name the leaves of a state.

    Args:
        state: A mapping, or any nesting of mappings, lists and tuples below one.

    Raises:
        UnsupportedStateError: It is no mapping, nests too deeply, or has a key that cannot be saved.
    """
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(
            f"a sharded state is a mapping, not a {type(state).__name__}; put it into one", path="state"
        )
    flat = Flat()
    for name, steps, leaf in _leaves(state, (), (), 0):
        name = _unused(name, flat)
        flat.paths[name] = steps
        if isinstance(leaf, torch.Tensor):
            flat.tensors[name] = leaf
        else:
            flat.values[name] = leaf
    return flat


def assemble(leaves: Mapping[str, object], paths: Mapping[str, PathSteps] | None) -> object:
    """Build a nested state from leaves by name, those of a list in order.

    Raises:
        ValueError: The paths do not fit together.
    """
    if paths is None:
        return dict(leaves)
    root = _Node()
    for name, leaf in leaves.items():
        root.put(paths[name], leaf)
    return root.built()


def _unused(name: str, flat: Flat) -> str:
    while name in flat.paths:
        name += "'"
    return name


def _leaves(x: object, names: tuple[str, ...], steps: PathSteps, depth: int) -> Iterator[tuple[str, PathSteps, object]]:
    below = list(_children(x)) if depth == 0 or has_tensor(x, depth) else None
    if below is None or (not below and depth):
        yield ".".join(names), steps, x
        return
    for name, step, child in below:
        yield from _leaves(child, (*names, name), (*steps, step), depth + 1)


def _children(x: object) -> Iterator[tuple[str, JSON, object]]:
    if isinstance(x, Mapping):
        kind = "odict" if isinstance(x, OrderedDict) else "key"
        for key, child in x.items():
            is_plain = type(key) is str and kind == "key"
            yield str(key), key if is_plain else [kind, _key_node(key)], child
    elif isinstance(x, list | tuple):
        for i, child in enumerate(x):
            yield str(i), i if isinstance(x, list) else ["tuple", i], child


def has_tensor(x: object, depth: int) -> bool:
    """Tell whether something is a container that has a tensor in it that can be named.

    Args:
        x: Anything.
        depth: In how many containers it stands.

    Raises:
        UnsupportedStateError: It nests too deeply.
    """
    if depth > _MAX_DEPTH:
        raise UnsupportedStateError(f"the state nests more than {_MAX_DEPTH} levels deep; flatten it", path="state")
    if isinstance(x, dict | Mapping):  # a dict first, which is found sooner
        inner = list(x.values())
    elif type(x) in (list, tuple):
        inner = list(x)  # type: ignore[call-overload]
    else:
        return False
    if depth < _MAX_DEPTH and set(map(type, inner)) <= PLAIN:
        return False
    return any(isinstance(item, torch.Tensor) or has_tensor(item, depth + 1) for item in inner)


def _key_node(key: object) -> JSON:
    try:
        return Writer().key(key, 0)
    except PathError as exc:
        raise UnsupportedStateError(f"cannot save a state with the key {shown(key)}: {exc.reason}") from None


class _Node:
    """A container in the making: children by step."""

    def __init__(self) -> None:
        self._kind = ""
        self._children: dict[object, object] = {}

    def put(self, steps: PathSteps, leaf: object) -> None:
        node = self
        for step in steps[:-1]:
            child = node._children.setdefault(node._key(step), _Node())
            if not isinstance(child, _Node):
                raise ValueError("a path leads through a leaf")
            node = child
        node._children[node._key(steps[-1])] = leaf

    def built(self) -> object:
        children = {key: child.built() if isinstance(child, _Node) else child for key, child in self._children.items()}
        match self._kind:
            case "list" | "tuple":
                places = sorted(children)  # type: ignore[type-var]
                if places != list(range(len(places))):
                    raise ValueError("a list has gaps")
                items = [children[place] for place in places]
                return items if self._kind == "list" else tuple(items)
            case "odict":
                return OrderedDict(children)
            case _:
                return children

    def _key(self, step: JSON) -> object:
        kind: str
        key: object
        match step:
            case str():
                kind, key = "dict", step
            case int() if not isinstance(step, bool) and step >= 0:
                kind, key = "list", step
            case ["tuple", int(place)] if place >= 0:
                kind, key = "tuple", place
            case ["key" | "odict" as word, node]:
                kind, key = ("dict" if word == "key" else "odict"), Reader([]).keys([node])[0]
            case _:
                raise ValueError(f"{shown(step)} is no step of a path")
        if self._kind not in ("", kind):
            raise ValueError(f"a {self._kind} is a {kind} as well")
        self._kind = kind
        return key
