"""Tell, in a few calls that each look at all of them, whether tensors are what those of an earlier save were."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch

from .measure import Measured, kind_key

_Check = Callable[..., bool]


@dataclass(frozen=True, slots=True)
class Alike:
    """Tensors that are what those before were.

    Attributes:
        storages: The storage of each.
        addresses: The address of each.
        moved: Indices of those that lie elsewhere; no other tensor has bytes there.
        likeness: What they are now.
    """

    storages: list[torch.UntypedStorage]
    addresses: list[int]
    moved: list[int]
    likeness: Likeness


class Likeness:
    """What some tensors were, in numbers alone: class, dtype, device, geometry, flags, address, ties. Never changed.

    Args:
        tensors: Distinct tensor objects. They are not kept.
        found: The same, measured.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], found: Measured) -> None:
        self._num_tensors = len(tensors)
        self._are_of_these_kinds = _checker(tensors)
        self._addresses = found.addresses
        self._storage_bytes = list(map(len, found.storages))
        spans = [kind.span_bytes for kind in found.kinds]
        self._starts = np.array(found.addresses, dtype=np.int64)
        self._ends = self._starts + np.array(spans, dtype=np.int64)
        rows = enumerate(zip(spans, found.starts, self._storage_bytes, strict=True))
        self._loose = [i for i, (span, start, size) in rows if span and (start or span != size)]
        self._tied = _overlapping(self._starts, self._ends)
        self._loose_storages = _addresses_of(found.storages, self._loose)
        self._tied_storages = _identities_of(found.storages, self._tied)

    def compare(self, tensors: Sequence[torch.Tensor]) -> Alike | None:
        """Look at other tensors. None if they are not alike, or one object is there twice, or it takes a closer look.

        If there is an answer, `lay_out` would find the same extents, at the given addresses.
        """
        if len(tensors) != self._num_tensors or not self._are_of_these_kinds(*tensors):
            return None
        storages = list(map(torch.Tensor.untyped_storage, tensors))
        if (
            list(map(len, storages)) != self._storage_bytes
            or _addresses_of(storages, self._loose) != self._loose_storages
            or _identities_of(storages, self._tied) != self._tied_storages
        ):
            return None
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses == self._addresses:
            return Alike(storages, addresses, [], self)
        moved = list(compress(range(len(addresses)), map(operator.ne, addresses, self._addresses)))
        is_alone = set(moved).isdisjoint((*self._loose, *self._tied)) and all(
            addresses[i] and storages[i].data_ptr() == addresses[i] for i in moved
        )  # each had, and has, a storage that is just its own bytes
        likeness = self._moved(moved, addresses) if is_alone else None
        return None if likeness is None else Alike(storages, addresses, moved, likeness)

    def _moved(self, moved: Sequence[int], addresses: list[int]) -> Likeness | None:
        """Return a likeness with other addresses of some tensors; None where they lie in bytes of others."""
        now = copy.copy(self)
        now._addresses = addresses
        places = np.array([addresses[i] for i in moved], dtype=np.int64)
        now._starts, now._ends = self._starts.copy(), self._ends.copy()
        now._ends[moved] += places - now._starts[moved]
        now._starts[moved] = places
        return now if _overlapping(now._starts, now._ends) == self._tied else None


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
