"""Tell, in a few calls that each look at all of them, whether tensors are what those of an earlier save were."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .measure import Measured, kind_key

_Check = Callable[..., bool]

_NUM_FEW = 16
"""For each of so many that have moved, such as states of random number generators, all are looked through."""
_BLOCK_TENSORS = 256
"""So many are looked at in one go, call after call, while what the first call has read of them is in the core's cache.

Passes over all of thousands would find it gone.
"""


@dataclass(frozen=True, slots=True)
class Alike:
    """Tensors that are what those before were.

    Attributes:
        storages: The storage of each.
        moved: The addresses of those that lie elsewhere, by index; no other tensor has bytes there.
        likeness: What they are now.
    """

    storages: list[torch.UntypedStorage]
    moved: dict[int, int]
    likeness: Likeness


@dataclass(frozen=True, slots=True)
class _Block:
    """What neighbours among the tensors were.

    Attributes:
        place: Where they are.
        are_alike: Tells whether its arguments are distinct tensors of the same kinds.
        storage_bytes: The length of the storage of each.
    """

    place: slice
    are_alike: _Check
    storage_bytes: list[int]


class Likeness:
    """What some tensors were, in numbers alone: class, dtype, device, geometry, flags, address, ties. Never changed.

    Args:
        tensors: Distinct tensor objects. They are not kept.
        found: The same, measured.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], found: Measured) -> None:
        self._num_tensors = len(tensors)
        storage_bytes = list(map(len, found.storages))
        self._blocks = [
            _Block(place, _checker(tensors[place]), storage_bytes[place]) for place in _places(len(tensors))
        ]
        self._addresses = [found.addresses[block.place] for block in self._blocks]
        spans = [kind.span_bytes for kind in found.kinds]
        self._starts = np.array(found.addresses, dtype=np.int64)
        self._ends = self._starts + np.array(spans, dtype=np.int64)
        rows = enumerate(zip(spans, found.starts, storage_bytes, strict=True))
        self._loose = [i for i, (span, start, size) in rows if span and (start or span != size)]
        self._tied = _overlapping(self._starts, self._ends)
        self._alike_in_address = [*self._tied, *(i for i, span in enumerate(spans) if not span)]
        self._loose_storages = _addresses_of(found.storages, self._loose)
        self._tied_storages = _identities_of(found.storages, self._tied)

    def compare(self, tensors: Sequence[torch.Tensor]) -> Alike | None:
        """Look at other tensors. None if they are not alike, or one object is there twice, or it takes a closer look.

        If there is an answer, `lay_out` would find the same extents, at the given addresses.
        """
        seen = self._look(tensors) if len(tensors) == self._num_tensors else None
        if seen is None:
            return None
        storages, moved = seen
        if (
            not self._are_distinct(tensors)
            or _addresses_of(storages, self._loose) != self._loose_storages
            or _identities_of(storages, self._tied) != self._tied_storages
        ):
            return None
        if not moved:
            return Alike(storages, moved, self)
        is_alone = moved.keys().isdisjoint((*self._loose, *self._tied)) and all(
            address and storages[i].data_ptr() == address for i, address in moved.items()
        )  # each had, and has, a storage that is just its own bytes
        likeness = self._moved(moved) if is_alone else None
        return None if likeness is None else Alike(storages, moved, likeness)

    def _look(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], dict[int, int]] | None:
        """Return storages, and where moved tensors are; None if kinds or storages are others, or one is twice near."""
        storages: list[torch.UntypedStorage] = []
        moved: dict[int, int] = {}
        for block, before in zip(self._blocks, self._addresses, strict=True):
            here = tensors[block.place]
            if not block.are_alike(*here):
                return None
            found = list(map(torch.Tensor.untyped_storage, here))
            if list(map(len, found)) != block.storage_bytes:
                return None
            storages += found
            addresses = list(map(torch.Tensor.data_ptr, here))
            if addresses != before:
                rows = enumerate(zip(addresses, before, strict=True), block.place.start)
                moved |= {i: address for i, (address, was) in rows if address != was}
        return storages, moved

    def _are_distinct(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether none is there twice, of those for which addresses would not show it.

        An object that stands in two places has one address. Where that is none that had moved, tensors have had it in
        both places before: they were tied, or have no bytes. Where it is one, bytes overlap that did not before, which
        `_moved` sees.
        """
        indices = self._alike_in_address
        return len({id(tensors[i]) for i in indices}) == len(indices)

    def _moved(self, moved: Mapping[int, int]) -> Likeness | None:
        """Return a likeness with other addresses of some tensors; None where they lie in bytes of others."""
        now = copy.copy(self)
        now._addresses = list(self._addresses)
        for number in {i // _BLOCK_TENSORS for i in moved}:
            block = now._addresses[number] = list(now._addresses[number])
            first = number * _BLOCK_TENSORS
            block[:] = [moved.get(i, address) for i, address in enumerate(block, first)]
        indices, places = list(moved), np.array(list(moved.values()), dtype=np.int64)
        now._starts, now._ends = self._starts.copy(), self._ends.copy()
        now._ends[indices] += places - now._starts[indices]
        now._starts[indices] = places
        return None if now._have_company(indices) else now

    def _have_company(self, indices: Sequence[int]) -> bool:
        """Whether some tensors, each of at least a byte, share bytes with another."""
        if len(indices) > _NUM_FEW:
            return not set(indices).isdisjoint(_overlapping(self._starts, self._ends))
        for i in indices:
            start, end = self._starts[i], self._ends[i]
            shares = (self._starts < end) & (self._ends > start) & (self._ends > self._starts)
            if np.count_nonzero(shares) > 1:
                return True
        return False


def _places(num_tensors: int) -> list[slice]:
    return [slice(first, first + _BLOCK_TENSORS) for first in range(0, num_tensors, _BLOCK_TENSORS)]


def _addresses_of(storages: Sequence[torch.UntypedStorage], indices: Sequence[int]) -> list[int]:
    return [storages[i].data_ptr() for i in indices]


def _identities_of(storages: Sequence[torch.UntypedStorage], indices: Sequence[int]) -> list[int]:
    return [storages[i]._cdata for i in indices]


def _overlapping(starts: np.ndarray, ends: np.ndarray) -> list[int]:
    """Return the indices of the spans that share a byte with another."""
    order = np.flatnonzero(ends > starts)
    order = order[np.argsort(starts[order], kind="stable")]
    if len(order) < 2:
        return []
    reach = np.maximum.accumulate(ends[order])
    is_tied = np.zeros(len(order), dtype=bool)
    is_tied[1:] |= starts[order][1:] < reach[:-1]
    is_tied[:-1] |= ends[order][:-1] > starts[order][1:]
    return sorted(order[is_tied].tolist())


def _checker(tensors: Sequence[torch.Tensor]) -> _Check:
    """Return what tells whether its arguments are distinct tensors of the same kinds as these, one by one."""
    return _native(tensors) if _native_is_exact() else _InPython(tensors).check


def _native(tensors: Sequence[torch.Tensor]) -> _Check:
    """Return the check with which torch.compile guards its inputs: a tenth of a microsecond a tensor."""
    from torch._C._dynamo.guards import TensorGuards

    check: _Check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@functools.cache
def _native_is_exact() -> bool:
    """Tell whether this torch has that check, which is none of its public API, and it sees all that matters here."""
    try:
        with torch.inference_mode(False):
            return _is_exact(_native)
    except Exception:  # noqa: BLE001 - whatever it is, then we do without
        return False


def _is_exact(checker: Callable[[Sequence[torch.Tensor]], _Check]) -> bool:
    x = torch.ones(2, 3, dtype=torch.float32, device="cpu")
    z = torch.ones(2, 3, dtype=torch.complex64, device="cpu")
    others: list[object] = [
        x.double(), x.int(), x.t(), x[:1], x.view(-1), x.view(1, 2, 3), x.to("meta"), x.to_sparse(), torch._neg_view(x),
        torch.empty_strided((2, 3), (1, 2), dtype=torch.float32, device="cpu"), x.detach().requires_grad_(),
        torch.nn.Parameter(x), torch.nn.Parameter(x, requires_grad=False), None,
    ]  # fmt: skip
    of_x, of_z, of_both = checker([x]), checker([z]), checker([x, x.detach()])
    return (
        of_x(x.detach())
        and of_x(x.clone())
        and not any(map(of_x, others))
        and of_z(z.clone())
        and not of_z(z.conj())
        and of_both(x, x.clone())
        and not of_both(x, x)
    )


class _InPython:
    """The same check in Python; it takes ten times as long."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._types = list(map(type, tensors))
        self._kinds = list(map(kind_key, tensors))

    def check(self, *tensors: torch.Tensor) -> bool:
        if list(map(type, tensors)) != self._types or len(set(map(id, tensors))) != len(tensors):
            return False
        try:
            return list(map(kind_key, tensors)) == self._kinds
        except (RuntimeError, NotImplementedError):  # from tensors without strides
            return False
