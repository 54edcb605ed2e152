"""Where the elements of strided tensors lie in memory, and whether tensors share any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MAX_CHECKED_UNITS = 1 << 24


@dataclass(frozen=True, slots=True)
class Geometry:
    """A strided tensor in memory: address or offset of its first element in bytes, and strides in elements."""

    start: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def share_an_element(groups: Sequence[Sequence[Geometry]]) -> bool:
    """Tell whether a byte belongs to tensors of two groups. Says yes, without a look, where that would take long."""
    members = [member for group in groups for member in group]
    base = min(member.start for member in members)
    unit = math.gcd(*(member.itemsize for member in members), *(member.start - base for member in members))
    if sum(math.prod(member.shape) * member.itemsize // unit for member in members) > _MAX_CHECKED_UNITS:
        return True
    units = [np.unique(np.concatenate([_units(member, base, unit) for member in group])) for group in groups]
    return len(np.unique(np.concatenate(units))) < sum(map(len, units))


def _units(tensor: Geometry, base: int, unit: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return where each `unit` bytes of each element lie, counted in units from `base`."""
    per_item = tensor.itemsize // unit
    units = np.arange(per_item, dtype=np.int64) + (tensor.start - base) // unit
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        if stride:
            units = np.add.outer(np.arange(size, dtype=np.int64) * (stride * per_item), units).reshape(-1)
    return units
