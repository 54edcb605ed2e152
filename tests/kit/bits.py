"""A strict comparer of whole states: bytes, dtypes, shapes, strides, aliasing, Python types, order of keys, flags."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import struct
import types
from itertools import pairwise

import numpy as np
import torch

_Pair = tuple[str, torch.Tensor, torch.Tensor]
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(a: object, b: object, *, device: bool = True, aliasing: bool = True) -> None:
    """Assert that one state is the other, saved and loaded.

    A tensor with gaps may be contiguous in the other; every other tensor has the same strides. Tensors that share
    elements must share them in the same way, and tensors that share none must not.

    Args:
        a: A state.
        b: Another.
        device: Whether tensors must be on the same device.
        aliasing: Whether to compare which tensors share memory, and which are one object.
    """
    comparer = _Comparer(device)
    comparer.same(a, b, "state")
    if aliasing:
        comparer.same_aliasing()


def physical_bytes(x: torch.Tensor) -> bytes:
    """Return the stored bytes of a tensor's elements in row-major order, whatever its dtype, strides and lazy bits."""
    return _carrier(x).contiguous().cpu().numpy().tobytes()


def elements(x: torch.Tensor) -> np.ndarray:
    """Return the byte offset in its storage of every element, as an array of the tensor's shape."""
    offsets = np.full((), x.storage_offset() * x.itemsize, dtype=np.int64)
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        steps = np.arange(size, dtype=np.int64) * stride * x.itemsize
        offsets = np.add.outer(steps, offsets)
    return offsets


def has_gaps(x: torch.Tensor) -> bool:
    """Tell whether the bytes from a tensor's first element to its last hold more than its elements."""
    if x.numel() == 0:
        return False
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) > x.numel()


def _carrier(x: torch.Tensor) -> torch.Tensor:
    size = min(x.itemsize, 8)
    parts = x.itemsize // size
    shape, strides = list(x.shape), [stride * parts for stride in x.stride()]
    if parts > 1:
        shape, strides = [*shape, parts], [*strides, 1]
    plain = torch.empty(0, dtype=_CARRIERS[size], device=x.device)
    return plain.set_(x.untyped_storage(), x.storage_offset() * parts, shape, strides)


class _Comparer:
    def __init__(self, device: bool) -> None:
        self._device = device
        self._pairs: list[_Pair] = []

    def same(self, a: object, b: object, at: str) -> None:
        assert type(a) is type(b), f"{at}: {type(a)} became {type(b)}"
        if isinstance(a, torch.Tensor):
            self._tensor(a, b, at)
        elif isinstance(a, np.ndarray):
            self._array(a, b, at)
        elif isinstance(a, np.generic):
            assert a.dtype == b.dtype, f"{at}: {a.dtype} became {b.dtype}"
            assert a.tobytes() == b.tobytes(), f"{at}: {a!r} became {b!r}"
        elif isinstance(a, dict):
            self._mapping(a, b, at)
        elif isinstance(a, list | tuple | collections.deque):
            assert len(a) == len(b), f"{at}: {len(a)} items became {len(b)}"
            assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None), f"{at}: maxlen"
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                self.same(x, y, f"{at}[{i}]")
        elif isinstance(a, argparse.Namespace | types.SimpleNamespace):
            self._mapping(vars(a), vars(b), at)
        elif dataclasses.is_dataclass(a) and not isinstance(a, type | enum.Enum):
            for field in dataclasses.fields(a):
                self.same(getattr(a, field.name), getattr(b, field.name), f"{at}.{field.name}")
        else:
            assert_same_leaf(a, b, at)

    def _mapping(self, a: dict, b: dict, at: str) -> None:
        assert len(a) == len(b), f"{at}: {len(a)} keys became {len(b)}"
        for key_a, key_b in zip(a, b, strict=True):
            self.same(key_a, key_b, f"{at}<key {key_a!r}>")
        for (key, x), y in zip(a.items(), b.values(), strict=True):
            self.same(x, y, f"{at}[{key!r}]")
        if isinstance(a, collections.defaultdict):
            assert a.default_factory is b.default_factory, f"{at}: factory"
        if type(a) is collections.OrderedDict:
            self._mapping(vars(a), vars(b), f"{at}.__dict__")

    def _array(self, a: np.ndarray, b: np.ndarray, at: str) -> None:
        assert a.dtype == b.dtype, f"{at}: {a.dtype} became {b.dtype}"
        assert a.dtype.str == b.dtype.str, f"{at}: {a.dtype.str} became {b.dtype.str}"
        assert a.shape == b.shape, f"{at}: shape {a.shape} became {b.shape}"
        assert a.tobytes() == b.tobytes(), f"{at}: bytes differ"
        if a.flags.c_contiguous or a.flags.f_contiguous:
            assert a.flags.c_contiguous == b.flags.c_contiguous, f"{at}: order"
            assert a.flags.f_contiguous == b.flags.f_contiguous, f"{at}: order"

    def _tensor(self, a: torch.Tensor, b: torch.Tensor, at: str) -> None:
        assert a.dtype == b.dtype, f"{at}: {a.dtype} became {b.dtype}"
        assert a.shape == b.shape, f"{at}: shape {tuple(a.shape)} became {tuple(b.shape)}"
        assert not self._device or a.device == b.device, f"{at}: {a.device} became {b.device}"
        assert a.requires_grad == b.requires_grad, f"{at}: requires_grad"
        assert a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg(), f"{at}: lazy bits"
        if a.stride() != b.stride():
            gappy, other = (a, b) if has_gaps(a) else (b, a)
            assert has_gaps(gappy) and other.is_contiguous(), f"{at}: strides {a.stride()} became {b.stride()}"
        assert physical_bytes(a) == physical_bytes(b), f"{at}: bytes differ"
        self._pairs.append((at, a, b))

    def same_aliasing(self) -> None:
        """Compare how tensors share memory."""
        ids = [{id(pair[side]): i for i, pair in reversed(list(enumerate(self._pairs)))} for side in (1, 2)]
        for at, a, b in self._pairs:
            assert ids[0][id(a)] == ids[1][id(b)], f"{at}: the same object elsewhere, or not any more"
        distinct = [self._pairs[i] for i in sorted(set(ids[0].values()))]
        self._same_groups(distinct, 1)
        self._same_groups(distinct, 2)

    def _same_groups(self, pairs: list[_Pair], side: int) -> None:
        """For tensors that share a storage on one side: those that share elements there do so on the other side."""
        storages = collections.defaultdict(list)
        for pair in pairs:
            if pair[side].numel():
                storages[pair[side].untyped_storage()._cdata].append(pair)
        for group in storages.values():
            if len(group) > 1:
                for one, two in _overlapping(group, side):
                    self._same_tie(one, two)

    def _same_tie(self, one: _Pair, two: _Pair) -> None:
        (_, a1, b1), (_, a2, b2) = one, two
        is_alike = a1.stride() == b1.stride() and a2.stride() == b2.stride() and _delta(a1, a2) == _delta(b1, b2)
        if is_alike and _are_in_one_storage(a1, a2) and _are_in_one_storage(b1, b2):
            return
        before, after = _shared_elements(a1, a2), _shared_elements(b1, b2)
        if any(has_gaps(x) and _overlaps_itself(x) for x in (a1, a2, b1, b2)):
            before, after = (before >= 0).any(keepdims=True), (after >= 0).any(keepdims=True)
        assert before.tolist() == after.tolist(), f"{one[0]} and {two[0]}: they share memory in another way than before"


def _are_in_one_storage(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def _delta(x: torch.Tensor, y: torch.Tensor) -> int:
    return y.data_ptr() - x.data_ptr()


def _overlaps_itself(x: torch.Tensor) -> bool:
    return len(np.unique(elements(x))) < x.numel()


def _shared_elements(x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """For each element of y, the first element of x that begins at the same byte; -1 for none."""
    if not _are_in_one_storage(x, y):
        return np.full(y.numel(), -1)
    places, first = np.unique(elements(x), return_index=True)
    wanted = elements(y).reshape(-1)
    nearest = np.searchsorted(places, wanted).clip(max=len(places) - 1)
    return np.where(places[nearest] == wanted, first[nearest], -1)


def _overlapping(group: list[_Pair], side: int):
    spans = [(int(elements(pair[side]).min()), int(elements(pair[side]).max()) + pair[side].itemsize) for pair in group]
    order = sorted(range(len(group)), key=lambda i: spans[i])
    if all(spans[i][1] <= spans[j][0] for i, j in pairwise(order)):
        return
    for n, i in enumerate(order):
        for j in order[n + 1 :]:
            if spans[j][0] >= spans[i][1]:
                break
            yield group[i], group[j]


def assert_same_leaf(a: object, b: object, at: str = "leaf") -> None:
    """Assert that a Python value came back as it was, to the last bit of a float."""
    assert type(a) is type(b), f"{at}: {type(a)} became {type(b)}"
    if isinstance(a, enum.Enum) or a is None or isinstance(a, bool | torch.dtype | torch.layout | torch.memory_format):
        assert a is b, f"{at}: {a!r} became {b!r}"
    elif isinstance(a, float):
        assert struct.pack(">d", a) == struct.pack(">d", b), f"{at}: {a!r} became {b!r}"
    elif isinstance(a, complex):
        assert struct.pack(">2d", a.real, a.imag) == struct.pack(">2d", b.real, b.imag), f"{at}: {a!r} became {b!r}"
    elif isinstance(a, set | frozenset):
        assert _sorted(a) == _sorted(b), f"{at}: {a!r} became {b!r}"
    elif hasattr(a, "tzinfo"):
        assert repr(a) == repr(b) and a.fold == b.fold, f"{at}: {a!r} became {b!r}"
        assert type(a.tzinfo) is type(b.tzinfo), f"{at}: time zone"
    else:
        assert repr(a) == repr(b), f"{at}: {a!r} became {b!r}"


def _sorted(x: object) -> object:
    """Write a member of a set so that equal ones compare equal, whatever order their own members are in."""
    if isinstance(x, set | frozenset):
        return type(x).__name__, sorted(map(repr, map(_sorted, x)))
    if isinstance(x, tuple):
        return type(x).__name__, *map(_sorted, x)
    return type(x).__qualname__, repr(x)
