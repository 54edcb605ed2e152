"""Which bytes of what is stored the boxes of a load lie in, and so which frames it reads. Pure data."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .load_plan import ReadItem
from .plan import Chunk
from .table import StateTable
from .tensors import TensorSpec

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins, and how long it is, along each dimension."""


class BoxSpans:
    """For each extent, the bytes from the first that is wanted to the last.

    Args:
        table: What is stored.
    """

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._spans: dict[int, tuple[int, int]] = {}

    def add(self, tensor: int, box: Box, *, is_row: bool) -> None:
        """Want a box of a stored tensor: where it lies if the tensor `is_row`, else the whole extent."""
        if not math.prod(box[1]):
            return
        extent = self._table.tensor_extent[tensor]
        low, high = self._row_span(tensor, box) if is_row else (0, self._table.extent_bytes[extent])
        before = self._spans.get(extent, (low, high))
        self._spans[extent] = min(low, before[0]), max(high, before[1])

    def needed(self, items: Iterable[ReadItem]) -> list[ReadItem]:
        """Return the frames that hold a byte of what is wanted, in their order."""
        return [item for item in items if any(self._meets(item.chunk, extent) for extent in item.chunk.extents)]

    def _row_span(self, tensor: int, box: Box) -> tuple[int, int]:
        spec, offset = self._table.spec(tensor), self._table.tensor_offset[tensor]
        first = last = 0
        for start, length, whole in zip(*box, spec.shape, strict=True):
            first = first * whole + start
            last = last * whole + start + length - 1
        return offset + first * spec.itemsize, offset + (last + 1) * spec.itemsize

    def _meets(self, chunk: Chunk, extent: int) -> bool:
        span = self._spans.get(extent)
        if span is None:
            return False
        start, num_bytes = chunk.span(extent, self._table.extent_bytes)
        return span[0] < start + num_bytes and start < span[1]


def is_stored_by_rows(spec: TensorSpec) -> bool:
    """Tell whether a tensor is stored row by row, value for value."""
    return spec.strides is None and not spec.conj and not spec.neg
