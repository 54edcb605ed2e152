"""The tensor table: which tensors a state has, which bytes they view, and the skeleton that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.words import WordType

from .errors import CorruptCheckpointError, InternalError
from .live_sources import LiveSources
from .rebuild import tensor_paths
from .sources import Packing
from .tensors import TensorMaker, TensorSpec, quiet_complex32
from .types import JSON


@dataclass(slots=True)
class StateTable:
    """A state as columns: one row a tensor, one row an extent.

    An *extent* is a run of bytes that one or more tensors view; it is stored once. Extents of one device, word type and
    role follow each other, those of devices before those of the CPU. Tables of one describer may share their columns:
    nobody changes them. Those after `extent_words` are empty where the table was read from a checkpoint.

    Attributes:
        skeleton: JSON in which `["t", i]` stands for tensor i.
        specs: The distinct kinds of tensors.
        tensor_spec: Index into `specs`, by tensor.
        tensor_extent: The extent that each tensor views.
        tensor_offset: Bytes from the start of its extent to its first element, by tensor.
        extent_bytes: Length, by extent.
        extent_words: Word type, by extent.
        extent_roles: What its first tensor is to an optimizer, such as "exp_avg", by extent; "" for anything else.
        extent_devices: Device, by extent.
        extent_addresses: Address of its first byte, by extent; for a packed extent of its first element, 0 if empty.
        extent_packings: How to gather it without its gaps, by extent; None where it has none.
        sources: Where the live bytes are, by extent.
        tensors: The live tensors.
        signature: Digest of names, roles, specs and aliasing, for this process: what a plan depends on.
        layout_id: The same number as in another table of this process if, and only if, all but the tensor objects and
            the values at the leaves is the same: names, kinds of tensors, extents, addresses. 0 if never described.
        extents_id: The same number only if the extents are: their columns, and the addresses of those that are not on
            the CPU. Names do not count, nor where in host memory a tensor is: an RNG state is a new one at each save.
    """

    skeleton: JSON
    specs: list[TensorSpec]
    tensor_spec: list[int]
    tensor_extent: list[int]
    tensor_offset: list[int]
    extent_bytes: list[int]
    extent_words: list[WordType]
    extent_roles: list[str] = field(default_factory=list)
    extent_devices: list[torch.device] = field(default_factory=list)
    extent_addresses: list[int] = field(default_factory=list)
    extent_packings: list[Packing | None] = field(default_factory=list)
    sources: LiveSources = field(default_factory=LiveSources)
    tensors: list[torch.Tensor] = field(default_factory=list)
    signature: bytes = b""
    layout_id: int = 0
    extents_id: int = 0
    _paths: list[str] | None = None

    def fqn(self, index: int) -> str:
        """Return the path of a tensor, such as `model.layers.0.weight`; the first one if it stands in several."""
        if self._paths is None:
            self._paths = tensor_paths(self.skeleton, len(self.tensor_spec))
        return self._paths[index]

    def spec(self, index: int) -> TensorSpec:
        """Return what tensor `index` is."""
        return self.specs[self.tensor_spec[index]]


def validate_table(table: StateTable) -> None:
    """Check that every tensor lies inside its extent. Numbers may be as large as JSON has them.

    Raises:
        CorruptCheckpointError: They do not fit together.
    """
    num_tensors, num_extents = len(table.tensor_spec), len(table.extent_bytes)
    if len(table.tensor_extent) != num_tensors or len(table.tensor_offset) != num_tensors:
        raise _damaged("its columns of tensors are not equally long")
    if len(table.extent_words) != num_extents:
        raise _damaged("its columns of extents are not equally long")
    extent_bytes = _column("extent_bytes", table.extent_bytes)
    itemsizes = np.array([word.itemsize for word in WordType], dtype=np.int64)
    odd = np.flatnonzero(extent_bytes % itemsizes[np.array(table.extent_words, dtype=np.int64)])
    if odd.size:
        raise _damaged(f"extent {odd[0]} is not a whole number of its words")
    spec, extent = _column("tensor_spec", table.tensor_spec), _column("tensor_extent", table.tensor_extent)
    absent = np.flatnonzero((spec >= len(table.specs)) | (extent >= num_extents))
    if absent.size:
        raise _damaged(f"tensor {absent[0]} names a spec or an extent that is not there")
    if not num_tensors:
        return
    offset = _column("tensor_offset", table.tensor_offset)
    reach_bytes = np.array([spec.reach_bytes for spec in table.specs], dtype=np.int64)[spec]
    itemsize = np.array([spec.itemsize for spec in table.specs], dtype=np.int64)[spec]
    # a difference, not a sum, which could overflow
    outside = np.flatnonzero((offset % itemsize != 0) | (reach_bytes > extent_bytes[extent] - offset))
    if outside.size:
        raise _damaged(f"tensor {outside[0]} leaves extent {extent[outside[0]]}")


def _column(name: str, values: Sequence[int]) -> NDArray[np.int64]:
    """Return a column of whole numbers below 2**63 as an array."""
    if set(map(type, values)) - {int} or (values and not 0 <= min(values) <= max(values) < 1 << 63):
        raise _damaged(f"{name} holds something that is no whole number")
    return np.array(values, dtype=np.int64)


def _damaged(why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the tensor table is damaged: {why}", stage="open")


def make_tensors(table: StateTable, extents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make the tensors of a table that `validate_table` has passed.

    Args:
        table: What to make.
        extents: Shape (extent_bytes[i],), uint8, each with a storage of its own, on the device that its tensors are to
            be on. The tensors share their memory; one that does not start its storage is copied first.

    Returns:
        By index. Tensors of one extent share its storage, so ties and views come back as they were. None is an
        inference tensor, whatever mode the call is made in.
    """
    if [extent.numel() for extent in extents] != table.extent_bytes:
        raise InternalError("the extents are not as long as the table says")
    with torch.inference_mode(False), quiet_complex32():
        makers = [TensorMaker(spec) for spec in table.specs]
        starting = [extent if extent.storage_offset() == 0 else extent.clone() for extent in extents]
        rows = zip(table.tensor_spec, table.tensor_extent, table.tensor_offset, strict=True)
        return [
            makers[spec].make(starting[extent], starting[extent].device, offset) for spec, extent, offset in rows
        ]
