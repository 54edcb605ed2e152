"""Turn a state into a skeleton, JSON in which `["t", i]` stands for tensor i, and a list of those tensors.

A JSON object is always a plain dict whose keys are exact strings. Every other container is an array that opens with a
tag: `["list", …]`, `["tuple", …]`, `["dict", [key, value], …]`, `["namedtuple", "module:name", [field, value], …]`, …
Leaves are written as in `leaves.py`. A container that is reached twice is written twice; a tensor is written once.
"""

from __future__ import annotations

import argparse
import collections
import enum
import json
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from tidegate.codec.words import WordType

from .arrays import AnyArray, array_bytes, array_node, array_word, dtype_node, scalar_node
from .classes import class_name, extra_attributes, field_names, kind_of_class
from .leaves import LEAVES, SURROGATE, bytes_node, int_node
from .paths import PathError, step_of_key, step_of_live_key
from .refusals import why_refused
from .types import JSON

MAX_DEPTH = 256
"""How many JSON arrays and objects a skeleton may nest, not counting those of a leaf."""

ROLES = frozenset({
    "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step", "step_size", "sum",
})  # fmt: skip
"""What torch's optimizers call the states of a parameter. Values of one role compress alike."""

MAX_INLINE_BYTES = 4096
FACTORIES: Mapping[str, type] = {
    cls.__name__: cls for cls in (list, dict, int, float, set, str, tuple, bool, OrderedDict)
}
"""What a defaultdict may call for a missing key."""

TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
METADATA = "_metadata"


@dataclass(slots=True)
class Walk:
    """A state taken apart.

    Attributes:
        root: The skeleton.
        tensors: The live tensors, by index; NumPy arrays and long bytes as uint8 tensors over their memory.
        words: Word types of those that are not tensors of the caller's.
        roles: The key under which each tensor stands first, if it is one of ROLES, by index; else "".
        names: By container, in order: its kind and size, its keys, and which positions hold tensors and containers.
        ends: By container, those outside first: how many containers, tensors and names there were at its end.
    """

    root: JSON = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    words: dict[int, WordType] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    names: list[tuple[str | int, ...]] = field(default_factory=list)
    ends: list[tuple[int, int, int]] = field(default_factory=list)


def take_apart(state: object) -> Walk:
    """Write the skeleton of a state. Reads no tensor.

    Raises:
        PathError: A value cannot be saved; its `path` tells where it is.
    """
    return Writer().take_apart(state)


class Writer:
    """One walk over a state.

    Attributes:
        walk: What it has written.
        role: Role of the tensors that come next.
    """

    def __init__(self) -> None:
        self.walk = Walk()
        self.role = ""
        self._indices: dict[int, int] = {}
        self._arrays: dict[int, tuple[AnyArray, int]] = {}
        self._open: set[int] = set()

    def take_apart(self, state: object) -> Walk:
        """As the function of this name."""
        try:
            self.walk.root = self.node(state, 0, 0, [])
        except RecursionError:
            reason = "the state nests too deeply for what is left of the stack; save it from a shallower call"
            raise PathError(reason) from None
        return self.walk

    def node(self, x: object, depth: int, position: int, spots: list[int]) -> JSON:
        """Write a value that lies inside `depth` JSON containers.

        Args:
            x: The value.
            depth: How many.
            position: Where in the innermost one.
            spots: Takes the position and the index of a tensor, or ~position of a container that has names.
        """
        kind = type(x)
        if kind in TENSORS:
            index = self.index_of(x)  # type: ignore[arg-type]
            spots += (position, index)
            return ["t", index]
        if x is None or kind is bool:
            return x  # type: ignore[return-value]
        leaf = LEAVES.get(kind)
        if leaf is not None:
            return leaf(x)
        writer = _CONTAINERS.get(kind) or _writer_of_class(x)
        if depth >= MAX_DEPTH:
            raise PathError(f"the state nests more than {MAX_DEPTH} levels deep here; flatten it")
        if id(x) in self._open:
            raise PathError("the state contains itself here; break the cycle")
        self._open.add(id(x))
        walk = self.walk
        ends, number, num_names = walk.ends, len(walk.ends), len(walk.names)
        ends.append((0, 0, 0))
        node = writer(self, x, depth + 1)
        ends[number] = (len(ends), len(walk.tensors), len(walk.names))
        if len(walk.names) > num_names:
            spots.append(~position)
        self._open.discard(id(x))
        return node

    def key(self, x: object, depth: int) -> JSON:
        """Write a dict key or a member of a set."""
        kind = type(x)
        if depth >= MAX_DEPTH and isinstance(x, tuple | frozenset):
            raise PathError(f"a key nests more than {MAX_DEPTH} levels deep")
        if kind is tuple or kind is frozenset:
            return [kind.__name__, *(self.key(item, depth + 1) for item in x)]  # type: ignore[attr-defined]
        if x is None or kind is bool:
            return x  # type: ignore[return-value]
        if kind in LEAVES:
            return LEAVES[kind](x)
        if isinstance(x, bytes) and kind is bytes:
            return bytes_node(x)
        if isinstance(x, enum.Enum | np.generic | np.dtype):
            return _writer_of_class(x)(self, x, depth)
        if kind_of_class(kind) == "namedtuple":
            names = field_names(kind)
            _check_no_extras(x)
            nodes = (self.key(item, depth + 2) for item in x)  # type: ignore[attr-defined]
            return ["namedtuple", class_name(kind), *map(list, zip(names, nodes, strict=True))]
        raise PathError(
            f"a key of class {kind.__qualname__} ({x!r:.60}) cannot be saved; use text, numbers, bytes, enums or tuples"
        )

    def index_of(self, x: torch.Tensor) -> int:
        """Return the index of a tensor, which it gets when it comes for the first time."""
        tensors = self.walk.tensors
        index = self._indices.setdefault(id(x), len(tensors))
        if index == len(tensors):
            tensors.append(x)
            self.walk.roles.append(self.role)
        return index

    def stored_bytes(self, content: torch.Tensor, word: WordType) -> int:
        """Add bytes to the tensor table and return their index."""
        index = len(self.walk.tensors)
        self.walk.tensors.append(content)
        self.walk.roles.append("")
        self.walk.words[index] = word
        return index

    def array(self, x: AnyArray) -> JSON:
        """Write an array; one that comes again names the same bytes."""
        _, index = self._arrays.get(id(x), (x, len(self.walk.tensors)))
        node = array_node(x, index)  # first, as it refuses what array_bytes cannot take
        if id(x) not in self._arrays:
            self._arrays[id(x)] = (x, self.stored_bytes(array_bytes(x), array_word(x.dtype)))
        return node

    def values(self, tag: str, items: Iterable[object], depth: int) -> list[JSON]:
        """Write the items of a sequence."""
        nodes: list[JSON] = []
        spots: list[int] = []
        try:
            for item in items:
                nodes.append(self.node(item, depth, len(nodes), spots))
        except PathError as exc:
            exc.inside(f".{len(nodes)}")
            raise
        self.walk.names.append((f"\x01{tag}{len(nodes)}", *spots))
        return nodes

    def named(self, tag: str, items: Mapping[str, object], depth: int) -> dict[str, JSON]:
        """Write a mapping whose keys are well-formed text."""
        nodes: dict[str, JSON] = {}
        spots: list[int] = []
        role = self.role
        key = ""
        try:
            for key, item in items.items():
                self.role = key if key in ROLES else ""
                nodes[key] = self.node(item, depth, len(nodes), spots)
        except PathError as exc:
            exc.inside(step_of_key(key))
            raise
        self.role = role
        self.walk.names.append((f"\x02{tag}{len(nodes)}", *nodes, *spots))
        return nodes

    def pairs(self, tag: str, items: Mapping[object, object], depth: int) -> list[JSON]:
        """Write a mapping as [key, value] pairs."""
        pairs: list[JSON] = []
        names: list[str] = []
        spots: list[int] = []
        role = self.role
        key: object = None
        node: JSON = None
        is_key = True
        try:
            for key, item in items.items():
                is_key = True
                node = self.key(key, depth + 1)
                is_key = False
                name, self.role = key_name(node)
                pairs.append([node, self.node(item, depth + 1, len(pairs), spots)])
                names.append(name)
        except PathError as exc:
            exc.inside(step_of_live_key(key) if is_key else step_of_key(node))
            raise
        self.role = role
        self.walk.names.append((f"\x03{tag}{len(pairs)}", *names, *spots))
        return pairs


def key_name(node: JSON) -> tuple[str, str]:
    """Return what stands in `Walk.names` for a key, and the role of what is under it."""
    if isinstance(node, str):
        return node, node if node in ROLES else ""
    return f"\x04{node if type(node) is int else json.dumps(node)}", ""


_ContainerWriter = Callable[[Writer, "object", int], JSON]


def _is_plain_text(keys: Iterable[object]) -> bool:
    if not set(map(type, keys)) <= {str}:
        return False
    joined = "".join(keys)  # type: ignore[arg-type]
    return joined.isascii() or not SURROGATE.search(joined)


def _write_dict(writer: Writer, x: dict[object, object], depth: int) -> JSON:
    if _is_plain_text(x):
        return writer.named("", x, depth)  # type: ignore[arg-type]
    return ["dict", *writer.pairs("dict", x, depth)]


def _write_ordered(writer: Writer, x: OrderedDict[object, object], depth: int) -> JSON:
    attributes = vars(x)
    if not attributes:
        return ["OrderedDict", *writer.pairs("OrderedDict", x, depth)]
    if attributes.keys() != {METADATA}:  # the one that module.state_dict() leaves there for load_state_dict()
        raise PathError(f"an OrderedDict with attributes ({', '.join(attributes)}) cannot be saved; delete them")
    try:
        metadata = writer.node(attributes[METADATA], depth, 0, [])
    except PathError as exc:
        exc.inside(f".{METADATA}")
        raise
    return ["OrderedDict@", metadata, *writer.pairs("OrderedDict", x, depth)]


def _write_defaultdict(writer: Writer, x: defaultdict[object, object], depth: int) -> JSON:
    factory = x.default_factory
    if factory is not None and not (isinstance(factory, type) and FACTORIES.get(factory.__name__) is factory):
        raise PathError(
            f"a defaultdict with the factory {factory!r:.60} cannot be saved; pass dict(x), or use one of "
            f"{', '.join(FACTORIES)}"
        )
    return ["defaultdict", getattr(factory, "__name__", None), *writer.pairs("defaultdict", x, depth)]


def _write_set(writer: Writer, x: set[object] | frozenset[object], depth: int) -> JSON:
    return [type(x).__name__, *sorted((writer.key(item, depth) for item in x), key=json.dumps)]


def _write_deque(writer: Writer, x: deque[object], depth: int) -> JSON:
    return ["deque", x.maxlen, *writer.values("deque", x, depth)]


def _write_attributes(writer: Writer, x: argparse.Namespace | types.SimpleNamespace, depth: int) -> JSON:
    if not _is_plain_text(vars(x)):
        raise PathError("a namespace with names that are not text cannot be saved")
    return [type(x).__name__, writer.named(type(x).__name__, vars(x), depth + 1)]


def _write_bytes(writer: Writer, x: bytes | bytearray, depth: int) -> JSON:
    if len(x) <= MAX_INLINE_BYTES:
        return bytes_node(x)
    content = array_bytes(np.frombuffer(bytes(x), np.uint8))
    return [f"{type(x).__name__}@", writer.stored_bytes(content, WordType.U8)]


def _write_array(writer: Writer, x: AnyArray, depth: int) -> JSON:
    return writer.array(x)


def _write_enum(writer: Writer, x: enum.Enum, depth: int) -> JSON:
    name = class_name(type(x))
    if type(x).__members__.get(x.name) is x:
        return ["enum", name, x.name]
    if isinstance(x, enum.Flag) and type(x.value) is int:
        return ["enum", name, int_node(x.value)]  # a combination has no name of its own
    raise PathError(f"{x!r:.60} is not a member of its class and cannot be saved")


def _write_namedtuple(writer: Writer, x: tuple[object, ...], depth: int) -> JSON:
    name = class_name(type(x))
    _check_no_extras(x)
    nodes = writer.named(name, dict(zip(field_names(type(x)), x, strict=True)), depth + 1)
    return ["namedtuple", name, *([key, node] for key, node in nodes.items())]


def _write_dataclass(writer: Writer, x: object, depth: int) -> JSON:
    name = class_name(type(x))
    _check_no_extras(x)
    names = field_names(type(x))
    unset = [field_name for field_name in names if not hasattr(x, field_name)]
    if unset:
        raise PathError(f"field {unset[0]} of a {type(x).__qualname__} is not set; set it")
    return ["dataclass", name, writer.named(name, {key: getattr(x, key) for key in names}, depth + 1)]


def _check_no_extras(x: object) -> None:
    extra = extra_attributes(x)
    if extra:
        raise PathError(
            f"a {type(x).__qualname__} with attributes beside its fields ({', '.join(extra)}) cannot be saved; "
            "make them fields, or delete them"
        )


def _write_numpy_scalar(writer: Writer, x: np.generic, depth: int) -> JSON:
    return scalar_node(x)


def _write_numpy_dtype(writer: Writer, x: np.dtype[np.generic], depth: int) -> JSON:
    return ["np.dtype", dtype_node(x)]


_CONTAINERS: dict[type, Callable[..., JSON]] = {
    dict: _write_dict,
    OrderedDict: _write_ordered,
    defaultdict: _write_defaultdict,
    Counter: lambda writer, x, depth: ["Counter", *writer.pairs("Counter", x, depth)],
    list: lambda writer, x, depth: ["list", *writer.values("list", x, depth)],
    tuple: lambda writer, x, depth: ["tuple", *writer.values("tuple", x, depth)],
    set: _write_set,
    frozenset: _write_set,
    collections.deque: _write_deque,
    argparse.Namespace: _write_attributes,
    types.SimpleNamespace: _write_attributes,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    np.ndarray: _write_array,
}

_CLASS_WRITERS: dict[str, Callable[..., JSON]] = {
    "enum": _write_enum,
    "namedtuple": _write_namedtuple,
    "dataclass": _write_dataclass,
}


def _writer_of_class(x: object) -> Callable[..., JSON]:
    if isinstance(x, np.generic):
        return _write_numpy_scalar
    if isinstance(x, np.dtype):
        return _write_numpy_dtype
    kind = kind_of_class(type(x))
    if kind is None:
        raise PathError(why_refused(x))
    return _CLASS_WRITERS[kind]
