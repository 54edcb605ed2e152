"""Tell whether tensors are, over all ranks, what those of an earlier save were: types, dtypes, shapes, cuts."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

_dtype = operator.attrgetter("dtype")
_shape = operator.attrgetter("shape")
_requires_grad = operator.attrgetter("requires_grad")
_mesh = operator.attrgetter("device_mesh")
_placements = operator.attrgetter("placements")


class TensorKinds:
    """What some tensors were. It keeps none of them alive.

    Args:
        tensors: Tensors and DTensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._types = list(map(type, tensors))
        self._dtypes = list(map(_dtype, tensors))
        self._shapes = list(map(_shape, tensors))
        self._grads = list(map(_requires_grad, tensors))
        wrappers = wrappers_of(tensors)
        self._meshes = list(map(_mesh, wrappers))
        self._placements = list(map(_placements, wrappers))

    def are_those_of(self, found: Sequence[object]) -> bool:
        """Look at what may be other tensors, or none."""
        return list(map(type, found)) == self._types and self._are_alike(found)  # type: ignore[arg-type]

    def _are_alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        if (
            list(map(_dtype, tensors)) != self._dtypes
            or list(map(_shape, tensors)) != self._shapes
            or list(map(_requires_grad, tensors)) != self._grads
        ):
            return False
        wrappers = wrappers_of(tensors)
        return _same(list(map(_mesh, wrappers)), self._meshes) and _same(
            list(map(_placements, wrappers)), self._placements
        )


def wrappers_of(tensors: Sequence[torch.Tensor]) -> list[DTensor]:
    """Return those that are DTensors."""
    return [tensor for tensor in tensors if isinstance(tensor, DTensor)]


def _same(found: list[object], known: list[object]) -> bool:
    """Compare as keys of a dict are compared, as some placements are equal to others whose hash differs; but for the
    usual case, in which they are the very same objects."""
    if all(map(operator.is_, found, known)):
        return True
    return found == known and list(map(hash, found)) == list(map(hash, known))
