"""Turn a skeleton and its tensors back into the state. The JSON may be hostile: nothing it names is imported or run."""

from __future__ import annotations

import argparse
import enum
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import torch

from .arrays import read_array, read_bytes_scalar, read_dtype, read_scalar, read_text_scalar
from .classes import AllowedClasses, ClassKind, field_names
from .errors import CorruptCheckpointError, LoadError
from .leaves import LEAF_TAGS, fields, read_int, read_leaf, read_str
from .paths import PathError, join_steps, shown, step_of_key
from .skeleton import FACTORIES
from .types import JSON

MAX_DEPTH = 300
"""How deep the JSON of a skeleton may nest; more than `take_apart` ever writes."""

INDEX_TAGS = ("t", "ndarray", "bytes@", "bytearray@")
"""The tags of arrays that name a tensor: after the tag comes its index."""

MAPPING_TAGS = frozenset({"dict", "OrderedDict", "OrderedDict@", "defaultdict", "Counter"})
_KEY_TAGS = frozenset(LEAF_TAGS.keys() - {"bytearray"}) | {
    "tuple", "frozenset", "enum", "namedtuple", "npscalar", "np.str_", "np.bytes_", "np.dtype",
}  # fmt: skip


def rebuild(skeleton: JSON, tensors: Sequence[torch.Tensor | None], steps: str = "") -> object:
    """Build the state, or a part of it, again.

    Args:
        skeleton: What `take_apart` wrote, or what a file claims that it wrote; or what stands somewhere in it.
        tensors: By index; those of `make_tensors`, or the caller's own to be loaded into. None: not loaded.
        steps: The steps to where `skeleton` stands in the state's, in a row, for error messages.

    Returns:
        The state or part, in which every place that names tensor i holds `tensors[i]` itself.

    Raises:
        CorruptCheckpointError: The skeleton is malformed.
        LoadError: It holds instances of classes that the caller has not allowed, or values that this machine lacks.
    """
    return Reader(tensors).state(skeleton, steps)


def tensor_paths(skeleton: JSON, num_tensors: int) -> list[str]:
    """Return the first path of every tensor; "" for one that the skeleton does not reach or in a malformed one.

    Of a path longer than 500 characters only the end is returned: many tensors may lie under one long key.
    """
    paths = [""] * num_tensors
    stack: list[tuple[_Way, JSON]] = [(None, skeleton)]
    while stack:
        way, node = stack.pop()
        if isinstance(node, list) and tag_of(node) in INDEX_TAGS:
            index = node[1] if len(node) > 1 else None
            if type(index) is int and 0 <= index < num_tensors and not paths[index]:
                paths[index] = _spelled(way)
            continue
        below = [((way, step), child) for step, child in children(node)]
        stack.extend(reversed(below))
    return paths


_Way = tuple["_Way", str] | None
"""The last step to a place, and the way to where that began."""

_MAX_PATH_CHARS = 500


def _spelled(way: _Way) -> str:
    steps: list[str] = []
    num_chars = 0
    while way is not None and num_chars <= _MAX_PATH_CHARS:
        way, step = way
        steps.append(step)
        num_chars += len(step)
    if num_chars > _MAX_PATH_CHARS:
        return "…" + "".join(reversed(steps))[-_MAX_PATH_CHARS:]
    return join_steps(reversed(steps))


def tag_of(node: JSON) -> str:
    """Return the tag of an array; "" for anything else, and for an array that opens with no text."""
    return node[0] if isinstance(node, list) and node and isinstance(node[0], str) else ""


def children(node: JSON) -> Iterator[tuple[str, JSON]]:
    """Yield the step to, and the node of, each value inside a container; nothing for a leaf or what is malformed."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield step_of_key(key), child
        return
    tag = tag_of(node)
    if not isinstance(node, list) or not tag:
        return
    if tag in ("list", "tuple", "deque"):
        for i, child in enumerate(node[2:] if tag == "deque" else node[1:]):
            yield f".{i}", child
    elif tag in ("Namespace", "SimpleNamespace", "dataclass"):
        yield from children(node[-1] if isinstance(node[-1], dict) else None)
    elif tag in MAPPING_TAGS or tag == "namedtuple":
        for pair in node[1 if tag in ("dict", "OrderedDict", "Counter") else 2 :]:
            if isinstance(pair, list) and len(pair) == 2:
                yield step_of_key(pair[0]), pair[1]


def _nests_deeper(skeleton: JSON, limit: int) -> bool:
    level: list[JSON] = [skeleton]
    for _ in range(limit + 1):
        inner = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list))]
        level = [child for nodes in inner for child in nodes]
    return bool(level)


class Reader:
    """One reading of a skeleton.

    Args:
        tensors: By index.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._tensors = tensors
        self._classes = AllowedClasses.now()

    def state(self, skeleton: JSON, steps: str = "") -> object:
        """Read the root, or what stands where `steps` lead; see `rebuild`."""
        try:
            state = self.node(skeleton, 0)
        except PathError as exc:
            exc.inside(steps)
            kind = CorruptCheckpointError if exc.is_damage else LoadError
            where = "the state's description is damaged" if exc.is_damage else "cannot load"
            raise kind(f"{where} at {exc.path}: {exc.reason}", stage="place", fqn=exc.path) from None
        except RecursionError:
            if _nests_deeper(skeleton, MAX_DEPTH):
                raise CorruptCheckpointError(
                    f"the state's description is damaged: it nests more than {MAX_DEPTH} levels deep", stage="place"
                ) from None
            reason = "the state nests too deeply for what is left of the stack; load it from a shallower call"
            raise LoadError(reason, stage="place") from None
        self._classes.check_none_missing()
        return state

    def node(self, node: JSON, depth: int) -> object:
        """Read a value that lies inside `depth` JSON containers. Raises PathError."""
        if isinstance(node, dict):
            return self._named(node, depth)
        if not isinstance(node, list):
            return node
        if depth >= MAX_DEPTH:
            raise PathError(f"it nests more than {MAX_DEPTH} levels deep")
        if node and node[0] == "t" and len(node) == 2:
            return self._tensor(node[1])
        tag = tag_of(node)
        reader = _READERS.get(tag)
        if reader is None:
            return read_leaf(node)
        try:
            return reader(self, node[1:], depth + 1)
        except (ValueError, TypeError, OverflowError) as exc:
            raise PathError(f"malformed {tag} ({exc!s:.120})") from None
        except MemoryError as exc:
            raise PathError(f"no memory is left for it ({exc!s:.120})", is_damage=False) from exc

    def key(self, node: JSON, depth: int) -> object:
        """Read a dict key or a member of a set. Raises PathError."""
        if isinstance(node, dict) or (isinstance(node, list) and tag_of(node) not in _KEY_TAGS):
            raise PathError(f"{shown(node)} cannot be a key")
        if isinstance(node, list) and node[0] in ("tuple", "frozenset"):
            if depth >= MAX_DEPTH:
                raise PathError("a key nests too deeply")
            items = [self.key(item, depth + 1) for item in node[1:]]
            return tuple(items) if node[0] == "tuple" else _distinct(frozenset(items), items)
        if isinstance(node, list) and node[0] == "namedtuple":
            for item in node[2:]:
                self.key(item[1] if isinstance(item, list) and len(item) == 2 else None, depth + 2)
        key = self.node(node, depth)
        try:
            hash(key)
        except TypeError:
            raise PathError(f"{shown(node)} cannot be a key") from None
        return key

    def _tensor(self, index: JSON) -> torch.Tensor:
        if type(index) is not int or not 0 <= index < len(self._tensors):
            raise PathError(f"it names tensor {shown(index)} of {len(self._tensors)}")
        tensor = self._tensors[index]
        if tensor is None:
            raise PathError(f"it names tensor {index} where none can stand")
        return tensor

    def _named(self, node: dict[str, JSON], depth: int) -> dict[str, object]:
        if depth >= MAX_DEPTH:
            raise PathError(f"it nests more than {MAX_DEPTH} levels deep")
        values: dict[str, object] = {}
        key = ""
        try:
            for key, child in node.items():
                values[key] = self.node(child, depth + 1)
        except PathError as exc:
            exc.inside(step_of_key(key))
            raise
        return values

    def values(self, nodes: Sequence[JSON], depth: int) -> list[object]:
        """Read the items of a sequence."""
        values: list[object] = []
        try:
            for node in nodes:
                values.append(self.node(node, depth))  # noqa: PERF401 - the count is needed when it raises
        except PathError as exc:
            exc.inside(f".{len(values)}")
            raise
        return values

    def pairs(self, nodes: Sequence[JSON], depth: int) -> Iterator[tuple[object, object]]:
        """Read [key, value] pairs. Raises PathError for a key that comes twice."""
        seen = set()
        for pair in nodes:
            if not isinstance(pair, list) or len(pair) != 2:
                raise PathError(f"expected a key and a value, found {shown(pair)}")
            try:
                key = self.key(pair[0], depth + 1)
                value = self.node(pair[1], depth + 1)
            except PathError as exc:
                exc.inside(step_of_key(pair[0]))
                raise
            if key in seen:
                raise PathError(f"key {shown(pair[0])} comes twice")
            seen.add(key)
            yield key, value

    def keys(self, nodes: Sequence[JSON]) -> list[object]:
        """Read keys on their own. Raises PathError, and LoadError for keys of a class that is not allowed."""
        keys = [self.key(node, 0) for node in nodes]
        self._classes.check_none_missing()
        return keys

    def find_class(self, name: JSON, kind: ClassKind) -> type | None:
        """Look up an allowed class."""
        return self._classes.find(read_str(name), kind)

    def stored(self, args: list[JSON]) -> tuple[list[JSON], torch.Tensor]:
        """Split the index off and return the bytes that it names."""
        if not args:
            raise ValueError("no index")
        return args[1:], self._tensor(args[0])


def _distinct(collection: set[object] | frozenset[object], items: list[object]) -> set[object] | frozenset[object]:
    if len(collection) != len(items):
        raise PathError("a set has a member twice")
    return collection


def _read_set(reader: Reader, args: list[JSON], depth: int) -> object:
    items = [reader.key(item, depth) for item in args]
    return _distinct(set(items), items)


def _read_ordered_with_metadata(reader: Reader, args: list[JSON], depth: int) -> object:
    metadata, *pairs = args
    result = OrderedDict(reader.pairs(pairs, depth))
    result._metadata = reader.node(metadata, depth)  # type: ignore[attr-defined]
    return result


def _read_defaultdict(reader: Reader, args: list[JSON], depth: int) -> object:
    name, *pairs = args
    if name is not None and (not isinstance(name, str) or name not in FACTORIES):
        raise PathError(f"unknown factory {shown(name)}")
    return defaultdict(None if name is None else FACTORIES[name], reader.pairs(pairs, depth))


def _read_counter(reader: Reader, args: list[JSON], depth: int) -> object:
    counts = dict(reader.pairs(args, depth))
    result: Counter[object] = Counter()
    dict.update(result, counts)  # type: ignore[misc] # Counter's own would add, and |= would drop what is not positive
    return result


def _read_deque(reader: Reader, args: list[JSON], depth: int) -> object:
    maxlen, *items = args
    limit = None if maxlen is None else read_int(maxlen)
    if limit is not None and len(items) > limit:
        raise ValueError(f"{len(items)} items in a deque of at most {limit}")
    return deque(reader.values(items, depth), limit)


def _read_namespace(kind: type[argparse.Namespace | types.SimpleNamespace]) -> Callable[..., object]:
    def read(reader: Reader, args: list[JSON], depth: int) -> object:
        (node,) = fields(args, 1)
        if not isinstance(node, dict):
            raise ValueError("no names")
        result = kind()
        vars(result).update(reader.node(node, depth))  # type: ignore[call-overload]
        return result

    return read


def _read_enum(reader: Reader, args: list[JSON], depth: int) -> object:
    name, member = fields(args, 2)
    cls = reader.find_class(name, "enum")
    if cls is None:
        return object()
    if isinstance(member, str):
        members = cls.__members__  # type: ignore[attr-defined]
        if member not in members:
            raise PathError(f"{name} has no member {shown(member)}")
        return members[member]
    if not issubclass(cls, enum.Flag):
        raise PathError(f"{name} has no members by value")
    return cls(read_int(member))


def _read_namedtuple(reader: Reader, args: list[JSON], depth: int) -> object:
    name, *pairs = args
    items = list(reader.pairs(pairs, depth))
    cls = reader.find_class(name, "namedtuple")
    if cls is None:
        return object()
    _check_fields(cls, name, [key for key, _ in items])
    return tuple.__new__(cls, [value for _, value in items])


def _read_dataclass(reader: Reader, args: list[JSON], depth: int) -> object:
    name, node = fields(args, 2)
    if not isinstance(node, dict):
        raise ValueError("no fields")
    values = reader._named(node, depth)
    cls = reader.find_class(name, "dataclass")
    if cls is None:
        return object()
    _check_fields(cls, name, list(values))
    result: object = object.__new__(cls)
    for key, value in values.items():
        object.__setattr__(result, key, value)
    return result


def _check_fields(cls: type, name: JSON, found: list[object]) -> None:
    expected = field_names(cls)
    if found != expected:
        raise PathError(
            f"{name} was saved with the fields {found!s:.200} but has {expected!s:.200} here; load it with the class "
            "as it was",
            is_damage=False,
        )


def _read_ndarray(reader: Reader, args: list[JSON], depth: int) -> object:
    return read_array(*reader.stored(args))


def _read_stored_bytes(kind: type[bytes | bytearray]) -> Callable[..., object]:
    def read(reader: Reader, args: list[JSON], depth: int) -> object:
        rest, stored = reader.stored(args)
        fields(rest, 0)
        if stored.dtype != torch.uint8 or stored.dim() != 1:
            raise ValueError("its tensor is not one of bytes")
        return kind(stored.detach().cpu().numpy().tobytes())

    return read


_READERS: dict[str, Callable[[Reader, list[JSON], int], object]] = {
    "list": lambda reader, args, depth: reader.values(args, depth),
    "tuple": lambda reader, args, depth: tuple(reader.values(args, depth)),
    "dict": lambda reader, args, depth: dict(reader.pairs(args, depth)),
    "OrderedDict": lambda reader, args, depth: OrderedDict(reader.pairs(args, depth)),
    "OrderedDict@": _read_ordered_with_metadata,
    "defaultdict": _read_defaultdict,
    "Counter": _read_counter,
    "set": _read_set,
    "frozenset": lambda reader, args, depth: reader.key(["frozenset", *args], depth),
    "deque": _read_deque,
    "Namespace": _read_namespace(argparse.Namespace),
    "SimpleNamespace": _read_namespace(types.SimpleNamespace),
    "enum": _read_enum,
    "namedtuple": _read_namedtuple,
    "dataclass": _read_dataclass,
    "ndarray": _read_ndarray,
    "bytes@": _read_stored_bytes(bytes),
    "bytearray@": _read_stored_bytes(bytearray),
    "npscalar": lambda reader, args, depth: read_scalar(args),
    "np.str_": lambda reader, args, depth: read_text_scalar(args),
    "np.bytes_": lambda reader, args, depth: read_bytes_scalar(args),
    "np.dtype": lambda reader, args, depth: read_dtype(*fields(args, 1)),
}
