"""Values between DCP's planners and our skeletons: what is no tensor is stored as typed JSON, never as a pickle."""

from __future__ import annotations

import io
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from .errors import UnsupportedStateError


@runtime_checkable
class LooksUp(Protocol):
    """A planner that gives the objects themselves, as DCP's DefaultSavePlanner does."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object of that name."""
        ...


def value_of(item: WriteItem, planner: SavePlanner) -> object:
    """Return what an item stands for.

    Raises:
        UnsupportedStateError: The planner gives it as bytes that it has pickled.
    """
    if item.type is not WriteItemType.BYTE_IO:
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedStateError(f"cannot save {item.index.fqn}: the planner gave a {type(tensor).__name__}")
        return tensor.detach()
    if not isinstance(planner, LooksUp):
        raise UnsupportedStateError(
            f"cannot save {item.index.fqn}: {type(planner).__name__} hands out pickled bytes, and a checkpoint holds "
            "none. Derive it from DefaultSavePlanner, and leave values that are no tensors to that",
            path=item.index.fqn,
        )
    return planner.lookup_object(item.index)


def as_dcp_bytes(value: object) -> io.BytesIO:
    """Write a value as DCP's load planners expect it: in memory, for the `torch.load` that they do at once."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
