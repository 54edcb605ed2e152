"""Match a stored state with one of the caller's, tensor by tensor, so that a load can fill the caller's own tensors."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Iterable, Sequence

import torch

from tidegate.codec.words import dtype_name

from .classes import field_names
from .errors import LoadError
from .geometry import Geometry, share_an_element
from .parts import Part, whole
from .paths import PathError, join_steps, step_of_key, step_of_live_key
from .rebuild import MAPPING_TAGS, MAX_DEPTH, Reader, children, tag_of
from .table import StateTable
from .tensors import TensorSpec, reach, row_major
from .types import JSON

_MAX_SHOWN = 5
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

_Way = str | tuple["_Way", str | None, JSON]
"""The steps to a place; or the way to a container and the step from there, as text, or by the key that it is of. Texts
are put together for messages only."""


def match_into(table: StateTable, into: object) -> list[torch.Tensor | None]:
    """Find the caller's tensor for each stored one; see `match_parts`."""
    return match_parts(table, [(whole(table.skeleton), into)])


def match_parts(table: StateTable, pairs: Sequence[tuple[Part, object]]) -> list[torch.Tensor | None]:
    """Find the caller's tensor for each stored one of some parts of the state.

    Containers must have the same keys or lengths (dicts of any class match each other, and so do lists and tuples);
    tensors the same shape and dtype. Leaves that are not tensors are not compared. Nothing is changed.

    Args:
        table: What is stored.
        pairs: The parts, each with the caller's own.

    Returns:
        By tensor: the one to fill; None for an array or bytes, which the load makes anew, and outside of the parts.

    Raises:
        LoadError: They do not match; `fqn` and the message say where, and what both sides are.
    """
    matcher = _Matcher(table)
    try:
        for part, into in pairs:
            matcher.node(part.node, into, part.steps, 0)
    except (PathError, RecursionError) as exc:
        raise LoadError(f"the stored state cannot be matched with `into`: {exc}", stage="place") from None
    _check_sharing(table, matcher.found, matcher.spans)
    return matcher.found


class _Matcher:
    """Walks the stored state and the caller's side by side.

    Attributes:
        found: The caller's tensors, by stored one.
        spans: Of each that has elements: device, first and end address, and which it is.
    """

    def __init__(self, table: StateTable) -> None:
        self.found: list[torch.Tensor | None] = [None] * len(table.tensor_spec)
        self.spans: list[tuple[int, int, int, int]] = []
        self._table = table
        self._reader = Reader(())
        self._span_bytes: dict[tuple[object, ...], int] = {}

    def node(self, node: JSON, value: object, path: _Way, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise PathError(f"it nests more than {MAX_DEPTH} levels deep")
        if type(node) is list and node and node[0] == "t":
            self._tensor(node[1] if len(node) > 1 else None, value, path)
            return
        tag = tag_of(node)
        if isinstance(node, dict) or tag in MAPPING_TAGS or tag in ("Namespace", "SimpleNamespace", "dataclass"):
            self._mapping(node, value, path, depth)
        elif tag in ("list", "tuple", "namedtuple", "deque"):
            self._sequence(node, value, path, depth)
        elif isinstance(value, (torch.Tensor, dict, list)) or type(value) is tuple:
            raise _mismatch(path, _kind_of_leaf(node, tag), _kind_of(value))

    def _tensor(self, index: JSON, value: object, path: _Way) -> None:
        if type(index) is not int or not 0 <= index < len(self.found):
            raise PathError(f"the skeleton names a tensor that is not there at {join_steps([_spelled(path)])}")
        number = self._table.tensor_spec[index]
        if type(value) not in _PLAIN or not isinstance(value, torch.Tensor):
            raise _mismatch(path, str(self._table.specs[number]), _kind_of(value))
        kind: tuple[object, ...] = ()
        if value.layout == torch.strided:
            kind = (number, value.dtype, value.shape, value.stride(), value.is_inference(), value.is_meta)
        span_bytes = self._span_bytes.get(kind)
        if span_bytes is None:
            span_bytes = self._span_bytes[kind] = self._checked(self._table.specs[number], value, path)
        earlier = self.found[index]
        if earlier is not None and not _is_same_memory(earlier, value):
            raise _mismatch(path, f"the same tensor as {self._table.fqn(index)}", "a tensor apart; tie them first")
        if earlier is None:
            self.found[index] = value
            if span_bytes:
                start = value.data_ptr()
                self.spans.append((value.get_device(), start, start + span_bytes, index))

    def _checked(self, spec: TensorSpec, value: torch.Tensor, path: _Way) -> int:
        """Return the bytes from the first element of a tensor to the end of its furthest. Raises LoadError: no fit."""
        reason = _why_not_filled(value)
        if reason:
            name = join_steps([_spelled(path)])
            raise LoadError(f"cannot load into {name}: {reason}", stage="place", fqn=name)
        if tuple(value.shape) != spec.shape or dtype_name(value.dtype) != spec.dtype:
            raise _mismatch(path, str(spec), _kind_of(value))
        return reach(spec.shape, value.stride()) * spec.itemsize if spec.num_bytes else 0

    def _mapping(self, node: JSON, value: object, path: _Way, depth: int) -> None:
        live = _attributes(value) if not isinstance(value, dict) else value
        if live is None:
            raise _mismatch(path, _kind_of_node(node), _kind_of(value))
        inner = node[-1] if isinstance(node, list) and node[0] not in MAPPING_TAGS else node
        if isinstance(inner, dict) and inner.keys() == live.keys():
            for name, child in inner.items():
                self.node(child, live[name], (path, None, name), depth + 1)
            return
        pairs = list(children(inner))
        keys = list(inner) if isinstance(inner, dict) else self._keys(inner)
        missing = [step for key, (step, _) in zip(keys, pairs, strict=True) if key not in live]
        if missing or len(live) != len(keys):
            known = set(keys)
            extra = [step_of_live_key(key) for key in live if key not in known]
            raise _mismatch(path, _listed("keys that `into` lacks", missing), _listed("keys of its own", extra))
        for key, (step, child) in zip(keys, pairs, strict=True):
            self.node(child, live[key], (path, step, None), depth + 1)

    def _keys(self, node: JSON) -> list[object]:
        if not isinstance(node, list):
            return []
        first = 2 if node[0] in ("OrderedDict@", "defaultdict") else 1
        pairs = [pair for pair in node[first:] if isinstance(pair, list) and len(pair) == 2]
        return self._reader.keys([pair[0] for pair in pairs])

    def _sequence(self, node: JSON, value: object, path: _Way, depth: int) -> None:
        nodes = list(children(node))
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise _mismatch(path, _kind_of_node(node), _kind_of(value))
        if len(value) != len(nodes):
            raise _mismatch(path, f"a {_kind_of_node(node)} of {len(nodes)}", f"{_kind_of(value)} of {len(value)}")
        for (step, child), item in zip(nodes, value, strict=True):
            self.node(child, item, (path, step, None), depth + 1)


def _attributes(value: object) -> dict[object, object] | None:
    if isinstance(value, (type, torch.nn.Module, torch.Tensor)):
        return None
    if dataclasses.is_dataclass(value):
        return {name: getattr(value, name) for name in field_names(type(value))}
    if type(value) in (argparse.Namespace, types.SimpleNamespace):
        return {name: getattr(value, name) for name in vars(value)}
    return None


def _why_not_filled(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "it is a meta tensor, which has no memory; materialise it first, for instance with module.to_empty()"
    if tensor.layout != torch.strided:
        return "it is not a strided tensor"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "it is an inference tensor, which torch does not let anyone change; pass x.clone()"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "it is an expanded tensor, whose elements share memory; pass x.contiguous()"
    return None


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _check_sharing(
    table: StateTable, found: Sequence[torch.Tensor | None], spans: list[tuple[int, int, int, int]]
) -> None:
    """Refuse tensors of the caller's that share memory where the stored ones have values of their own."""
    group: list[int] = []
    where, end = -2, 0
    for device, start, stop, i in sorted(spans):
        if device != where or start >= end:
            _check_group(table, found, group)
            group, where, end = [], device, 0
        group.append(i)
        end = max(end, stop)
    _check_group(table, found, group)


def _check_group(table: StateTable, found: Sequence[torch.Tensor | None], group: Sequence[int]) -> None:
    """Check tensors whose spans overlap: those that the checkpoint does not tie alike may share no element."""
    if len(group) < 2:
        return
    tied: dict[tuple[int, int, int], list[Geometry]] = {}
    for i in group:
        tensor, spec = found[i], table.spec(i)
        if tensor is None:
            continue
        is_alike = tensor.stride() == (row_major(spec.shape) if spec.strides is None else spec.strides)
        base = tensor.data_ptr() - table.tensor_offset[i]
        geometry = Geometry(tensor.data_ptr(), tensor.itemsize, spec.shape, tensor.stride())
        tied.setdefault((table.tensor_extent[i], base, -1 if is_alike else i), []).append(geometry)
    if len(tied) > 1 and share_an_element(list(tied.values())):
        first, *others = map(table.fqn, group)
        given = f"memory that it shares with {', '.join(others[:_MAX_SHOWN])}; untie them first"
        raise _mismatch_of(first, "values of its own", given)


def _kind_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        name = type(value).__name__
        plain = str(TensorSpec(dtype_name(value.dtype), tuple(value.shape)))
        return plain if name in ("Tensor", "Parameter") else f"{name} {plain}"
    return f"a {type(value).__qualname__}"


def _kind_of_leaf(node: JSON, tag: str) -> str:
    return f"a {tag.removesuffix('@') or type(node).__name__}"


def _kind_of_node(node: JSON) -> str:
    return str(node[0]).removesuffix("@") if isinstance(node, list) and node else "dict"


def _listed(what: str, steps: Iterable[str]) -> str:
    names = [step.removeprefix(".") for step in steps]
    shown = ", ".join(names[:_MAX_SHOWN]) + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
    return f"{what} ({shown})" if names else f"no {what}"


def _mismatch(path: _Way, stored: str, given: str) -> LoadError:
    return _mismatch_of(join_steps([_spelled(path)]), stored, given)


def _spelled(way: _Way) -> str:
    steps: list[str] = []
    while isinstance(way, tuple):
        way, step, key = way
        steps.append(step_of_key(key) if step is None else step)
    return "".join([way, *reversed(steps)])


def _mismatch_of(path: str, stored: str, given: str) -> LoadError:
    message = f"{path} does not match: the checkpoint has {stored}, `into` has {given}"
    return LoadError(message, stage="place", fqn=path)
