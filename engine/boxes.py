"""Where a load puts the bytes of shards: into boxes of the caller's tensors. Nothing is read that none needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .bits import as_integers, copy_bits
from .box_spans import Box, BoxSpans, is_stored_by_rows
from .load_plan import ReadItem
from .plan import Chunk
from .table import StateTable, make_tensors
from .tensors import TensorSpec, quiet_complex32


@dataclass(frozen=True, slots=True, eq=False)
class BoxRequest:
    """A part of a stored tensor that is wanted.

    Attributes:
        tensor: Number of the stored tensor.
        box: The part of it.
        target: Where it goes; of the box's shape, any strides and device. If it is of another dtype, values are
            converted.
    """

    tensor: int
    box: Box
    target: torch.Tensor


class Boxes:
    """The destination of one object's frames.

    A tensor that is stored row by row goes from the decoded chunk straight into its targets. Any other is put together
    whole first.

    Args:
        table: What is stored.
        requests: What is wanted of it.
    """

    def __init__(self, table: StateTable, requests: Sequence[BoxRequest]) -> None:
        self._table = table
        self._rows: dict[int, list[BoxRequest]] = {}
        self._whole: dict[int, list[BoxRequest]] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._spans = BoxSpans(table)
        for request in requests:
            if math.prod(request.box[1]):
                is_row = _is_row(table.spec(request.tensor), request.target)
                self._spans.add(request.tensor, request.box, is_row=is_row)
                by_extent = self._rows if is_row else self._whole
                by_extent.setdefault(table.tensor_extent[request.tensor], []).append(request)
        for extent in self._whole:
            self._memory[extent] = torch.empty(table.extent_bytes[extent], dtype=torch.uint8)
        # Decoders do not go through PyTorch, and who watches `_version` shall see that the tensor changes.
        torch.autograd.graph.increment_version([r.target for r in requests if not r.target.is_inference()])

    def needed(self, items: Iterable[ReadItem]) -> list[ReadItem]:
        """Return the frames that hold a byte of a requested box, in their order."""
        return self._spans.needed(items)

    def device(self, chunk: Chunk) -> torch.device:
        """Return where the chunk's first box goes."""
        for extent in chunk.extents:
            if extent in self._whole:
                return torch.device("cpu")
            if extent in self._rows:
                return self._rows[extent][0].target.device
        return torch.device("cpu")

    def prepare(self, chunk: Chunk) -> None:
        """Do nothing: targets are there, and what is put together whole lies in host memory."""

    def direct(self, chunk: Chunk) -> torch.Tensor | None:
        """Return the part of a target that the chunk is, where its bytes are just the target's in a row."""
        if not chunk.is_piece:
            return None
        extent = chunk.first_extent
        if extent in self._whole:
            return self._memory[extent][chunk.offset : chunk.offset + chunk.num_bytes]
        rows = self._rows.get(extent, [])
        if len(rows) != 1:
            return None
        request, spec = rows[0], self._table.spec(rows[0].tensor)
        target = request.target.detach()
        is_all = request.box[1] == spec.shape and spec.num_bytes == self._table.extent_bytes[extent]
        if not is_all or not target.is_contiguous() or target.dtype != spec.torch_dtype:
            return None
        return target.reshape(-1).view(torch.uint8)[chunk.offset : chunk.offset + chunk.num_bytes]

    def place(self, chunk: Chunk, packed: torch.Tensor) -> None:
        """Copy what is wanted of a decoded chunk to where it goes."""
        at = 0
        for extent in chunk.extents:
            start, num_bytes = chunk.span(extent, self._table.extent_bytes)
            piece = packed[at : at + num_bytes]
            at += num_bytes
            if extent in self._memory:
                self._memory[extent][start : start + num_bytes].copy_(piece)
            for request in self._rows.get(extent, ()):
                self._fill(request, piece, start)

    def finish(self) -> None:
        """Fill the targets of tensors that were put together whole. Blocks."""
        for extent, requests in self._whole.items():
            for request in requests:
                tensor = _make(self._table, request.tensor, self._memory[extent])
                part = tensor[slices(request.box)] if request.box[0] else tensor
                with quiet_complex32():
                    if part.dtype == request.target.dtype:
                        copy_bits(request.target, part)
                    else:
                        request.target.detach().copy_(part)
        self._memory.clear()

    def _fill(self, request: BoxRequest, piece: torch.Tensor, start: int) -> None:
        """Copy from bytes [start, start + len(piece)) of an extent what lies in the requested box."""
        spec = self._table.spec(request.tensor)
        offset = self._table.tensor_offset[request.tensor]
        low, high = max(start, offset), min(start + piece.numel(), offset + spec.num_bytes)
        if low >= high:
            return
        size = spec.itemsize
        values = _typed(piece[low - start : high - start], spec.torch_dtype)
        target = request.target.detach()
        if target.dtype == spec.torch_dtype:
            values, target = as_integers(values), as_integers(target)
        first = (low - offset) // size
        for at, box in range_boxes(spec.shape, first, (high - offset) // size):
            common = intersection(box, request.box)
            if common is None:
                continue
            block = values[at - first : at - first + math.prod(box[1])].unflatten(0, (*box[1], 1)).squeeze(len(box[1]))
            source, goal = block[slices(relative(common, box))], target[slices(relative(common, request.box))]
            goal.copy_(source)


def range_boxes(shape: Sequence[int], first: int, end: int) -> Iterator[tuple[int, Box]]:
    """Cut elements [first, end) of a row-major array into boxes: the rest of a row, whole rows, the start of a row.

    Yields:
        The number of the box's first element, and the box; at most 2 × len(shape) + 1 of them.
    """
    if first >= end:
        return
    if not shape:
        yield 0, ((), ())
        return
    row = math.prod(shape[1:])
    top, head = divmod(first, row)
    bottom, tail = divmod(end, row)
    inner = shape[1:]

    def inside(index: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        for at, (origin, sizes) in range_boxes(inner, start, stop):
            yield index * row + at, ((index, *origin), (1, *sizes))

    if top == bottom:
        yield from inside(top, head, tail)
        return
    if head:
        yield from inside(top, head, row)
        top += 1
    if top < bottom:
        yield top * row, ((top, *(0 for _ in inner)), (bottom - top, *inner))
    if tail:
        yield from inside(bottom, 0, tail)


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes share; None if they share nothing."""
    rows = list(zip(*one, *other, strict=True))
    starts = tuple(max(a, b) for a, _, b, _ in rows)
    sizes = tuple(min(a + n, b + m) - max(a, b) for a, n, b, m in rows)
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def relative(box: Box, outer: Box) -> Box:
    """Return a box as seen from where another begins."""
    return tuple(start - base for start, base in zip(box[0], outer[0], strict=True)), box[1]


def slices(box: Box) -> tuple[slice, ...]:
    """Return what cuts a box out of a tensor."""
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


def _is_row(spec: TensorSpec, target: torch.Tensor) -> bool:
    return is_stored_by_rows(spec) and not target.is_conj() and not target.is_neg()


def _typed(row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as values; copied first where they do not lie as values must."""
    if row.storage_offset() % dtype.itemsize or row.data_ptr() % dtype.itemsize:
        row = row.clone()
    return row.view(dtype)


def _make(table: StateTable, tensor: int, memory: torch.Tensor) -> torch.Tensor:
    extent = table.tensor_extent[tensor]
    part = StateTable(
        skeleton=None,
        specs=table.specs,
        tensor_spec=[table.tensor_spec[tensor]],
        tensor_extent=[0],
        tensor_offset=[table.tensor_offset[tensor]],
        extent_bytes=[table.extent_bytes[extent]],
        extent_words=[table.extent_words[extent]],
    )
    return make_tensors(part, [memory])[0]
