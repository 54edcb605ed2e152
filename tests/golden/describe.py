"""A state as plain JSON and plain bytes, by rules of its own: what golden checkpoints are compared with.

A tensor with gaps may come back without them, so its strides are told as if it had none.

Nothing here comes from tidegate, so that a change there cannot change both sides.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import types

import numpy as np
import torch

from tests.kit.bits import has_gaps, physical_bytes


class Describer:
    """Walks a state once.

    Attributes:
        contents: The bytes of each tensor and array, by its place.
    """

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self._storages: dict[int, tuple[int, int]] = {}
        self._objects: dict[int, str] = {}

    def describe(self, x: object, at: str = "state") -> object:
        """Return JSON that tells a value's types, forms and plain values; tensors' and arrays' bytes go aside."""
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        if isinstance(x, torch.Tensor):
            return [kind, self._tensor(x, at)]
        if isinstance(x, np.ndarray | np.generic):
            self.contents[at] = x.tobytes()
            order = "F" if isinstance(x, np.ndarray) and x.flags.f_contiguous and not x.flags.c_contiguous else "C"
            return [kind, str(x.dtype.descr if x.dtype.names else x.dtype.str), list(x.shape), order]
        if isinstance(x, enum.Enum):
            return [kind, x.name, repr(x.value)]
        if isinstance(x, dict):
            return [kind, repr(getattr(x, "default_factory", None)), self._pairs(x, at), self._extras(x, at)]
        if isinstance(x, argparse.Namespace | types.SimpleNamespace) or dataclasses.is_dataclass(x):
            return [kind, self._pairs(vars(x), at)]
        if isinstance(x, set | frozenset):
            return [kind, sorted(repr(item) for item in x)]
        if isinstance(x, list | tuple | collections.deque):
            items = [self.describe(item, f"{at}.{i}") for i, item in enumerate(x)]
            return [kind, getattr(x, "maxlen", None), items]
        if isinstance(x, bytes | bytearray):
            return [kind, x.hex()]
        if isinstance(x, float):
            return [kind, x.hex()]
        if isinstance(x, complex):
            return [kind, x.real.hex(), x.imag.hex()]
        if isinstance(x, str):
            return [kind, x.encode("utf-8", "surrogatepass").hex()]
        return [kind, repr(x)]

    def _pairs(self, x: dict[object, object], at: str) -> list[object]:
        return [[repr(key), self.describe(value, f"{at}.{i}")] for i, (key, value) in enumerate(x.items())]

    def _extras(self, x: dict[object, object], at: str) -> object:
        metadata = getattr(x, "_metadata", None)
        return None if metadata is None else self.describe(metadata, f"{at}._metadata")

    def _tensor(self, x: torch.Tensor, at: str) -> dict[str, object]:
        first = self._objects.setdefault(id(x), at)
        if first != at:
            return {"same": first}
        self.contents[at] = physical_bytes(x)
        key = x.untyped_storage()._cdata
        place = x.storage_offset() * x.itemsize
        group, origin = self._storages.setdefault(key, (len(self._storages), place))
        return {
            "dtype": str(x.dtype),
            "shape": list(x.shape),
            "strides": list(torch.empty(x.shape, device="meta").stride() if has_gaps(x) else x.stride()),
            "device": str(x.device),
            "requires_grad": x.requires_grad,
            "conj": x.is_conj(),
            "neg": x.is_neg(),
            "storage": group if x.numel() else None,
            "from_the_first_of_its_storage": place - origin if x.numel() else None,
        }
