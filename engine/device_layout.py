"""Where the CUDA chunks of a state lie in a device snapshot, and the copies that bring them there.

Made once, and used as long as the state's memory stays where it is: a save then queues one kernel for all extents.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.errors import CodecUnavailableError
from tidegate.codec.kernels import Kernels, indexed, kernels_of

from .plan import Chunk
from .sources import gather, gather_runs
from .table import StateTable

CHUNK_ALIGNMENT_BYTES = 512
_PIECE_BYTES = 1 << 20
_SMALL_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What one kernel copies: int64[num, 3] on the device (source, offset in the snapshot, bytes), by chunk.

    Attributes:
        items: The pieces, in the order of the chunks.
        first: Index of the first piece of each chunk, and the number of pieces.
        max_bytes: The longest piece.
    """

    items: torch.Tensor
    first: dict[int, tuple[int, int]]
    max_bytes: int


class DeviceLayout:
    """The CUDA chunks of one device, laid one after another.

    Args:
        table: The state. It is not kept.
        chunks: The chunks, in the order in which they will be staged.
        device: Their device.
    """

    def __init__(self, table: StateTable, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.device = device
        self.chunks = tuple(chunks)
        self._starts: dict[int, int] = {}
        self._strided: dict[int, list[tuple[int, int, int, int]]] = {}
        self._viewed: tuple[torch.Tensor, dict[int, torch.Tensor]] | None = None
        self.num_bytes = 0
        for chunk in self.chunks:
            self._starts[chunk.index] = self.num_bytes
            self.num_bytes += -(-chunk.num_bytes // CHUNK_ALIGNMENT_BYTES) * CHUNK_ALIGNMENT_BYTES
        self._kernels = _kernels(device)
        self._pieces = self._cut(table) if self._kernels is not None else None

    def view(self, flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The part of a snapshot that holds a chunk: shape (chunk.num_bytes,), uint8. Remembered: slicing is slow.

        Any thread may ask: snapshot and views are replaced together.
        """
        viewed = self._viewed
        if viewed is None or viewed[0] is not flat:
            views = {c.index: flat[self._starts[c.index] :][: c.num_bytes] for c in self.chunks}
            viewed = self._viewed = (flat, views)
        return viewed[1][chunk.index]

    def copy(self, table: StateTable, chunks: Sequence[Chunk], flat: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue the copy of chunks that follow each other here. Does not wait for the device.

        Args:
            table: The state: the one of the constructor, or one with the same extents_id.
            chunks: A run of `self.chunks`.
            flat: Shape (num_bytes or more,), uint8: the snapshot.
            stream: Where to queue it; it must be current.
        """
        if not chunks:
            return
        self._copy(table, chunks, flat.data_ptr(), stream, lambda chunk: self.view(flat, chunk))

    def copy_one(self, table: StateTable, chunk: Chunk, out: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue the copy of one chunk to `out`, shape (chunk.num_bytes,), uint8; as `copy` otherwise."""
        base = out.data_ptr() - self._starts[chunk.index]
        self._copy(table, [chunk], base, stream, lambda _: out)

    def _copy(
        self,
        table: StateTable,
        chunks: Sequence[Chunk],
        base: int,
        stream: torch.cuda.Stream,
        place: Callable[[Chunk], torch.Tensor],
    ) -> None:
        if self._kernels is None or self._pieces is None:
            for chunk in chunks:
                copy_chunk(table, chunk, place(chunk))
            return
        pieces = self._pieces
        first, end = pieces.first[chunks[0].index][0], pieces.first[chunks[-1].index][1]
        if end > first:
            self._kernels.copy_pieces(
                pieces.items[first].data_ptr(), end - first, pieces.max_bytes, stream, target_base=base
            )
        if not self._strided:
            return
        for chunk in chunks:
            for extent, skip_bytes, offset, num_bytes in self._strided.get(chunk.index, ()):
                table.sources[extent].copy_to(place(chunk)[offset : offset + num_bytes], skip_bytes)

    def _cut(self, table: StateTable) -> _Pieces | None:
        rows: list[tuple[int, int, int]] = []
        ends: list[int] = []
        for chunk in self.chunks:
            offset = 0
            for extent in chunk.extents:
                skip_bytes, num_bytes = chunk.span(extent, table.extent_bytes)
                if table.extent_packings[extent] is not None:
                    self._strided.setdefault(chunk.index, []).append((extent, skip_bytes, offset, num_bytes))
                elif num_bytes:
                    source = table.extent_addresses[extent] + skip_bytes
                    rows.append((source, self._starts[chunk.index] + offset, num_bytes))
                offset += num_bytes
            ends.append(len(rows))
        items, counts = _split(np.array(rows, dtype=np.int64).reshape(-1, 3))
        piece_ends = np.concatenate([[0], np.cumsum(counts)])[ends]
        firsts = np.concatenate([[0], piece_ends[:-1]]) if ends else piece_ends
        spans = zip(self.chunks, firsts.tolist(), piece_ends.tolist(), strict=True)
        max_bytes = int(items[:, 2].max()) if len(items) else 0
        on_device = torch.from_numpy(items).to(self.device) if len(items) else torch.empty(0, 3, dtype=torch.int64)
        return _Pieces(on_device, {chunk.index: (first, end) for chunk, first, end in spans}, max_bytes)


@dataclass(slots=True)
class LayoutCache:
    """The layouts of the state that was saved last. Used by the training thread alone."""

    _extents_id: int = -1
    _layouts: dict[tuple[torch.device, tuple[int, ...]], DeviceLayout] = field(default_factory=dict)

    def of(self, table: StateTable, chunks: Sequence[Chunk], device: torch.device) -> DeviceLayout:
        """Return the layout of some chunks of a device. Makes it where the state's memory has changed; that blocks."""
        if table.extents_id != self._extents_id:
            self._layouts.clear()
            self._extents_id = table.extents_id
        key = (device, tuple(chunk.index for chunk in chunks))
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = DeviceLayout(table, chunks, device)
        return found

    def clear(self) -> None:
        """Forget all, and free their memory."""
        self._layouts.clear()
        self._extents_id = -1


def copy_chunk(table: StateTable, chunk: Chunk, out: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy one chunk by PyTorch alone, on the current stream.

    Args:
        table: The state.
        chunk: What to copy.
        out: Shape (chunk.num_bytes,), uint8, any device.
        non_blocking: As for `Tensor.copy_`.
    """
    if chunk.is_piece and not (out.device.type == "cpu" and _is_small_on_cpu(table, chunk)):
        table.sources[chunk.first_extent].copy_to(out, chunk.offset, non_blocking=non_blocking)
    elif not chunk.is_piece and out.device.type == "cpu" and _is_plain(table, chunk):
        _move(table, chunk, out)
    else:
        sources = [table.sources[i] for i in chunk.extents]
        gather(sources, out, non_blocking=non_blocking)


def copy_live_chunk(table: StateTable, chunk: Chunk, out: torch.Tensor) -> bool:
    """Copy a chunk of many small runs of host memory where they lie now. Blocks.

    Returns:
        False, and nothing is copied, if it is no such chunk, or `out` is not on the CPU.

    Raises:
        TornSnapshotError: Some of that memory is not there any more.
    """
    if chunk.is_piece or out.device.type != "cpu" or not _is_plain(table, chunk):
        return False
    with torch.no_grad():
        gather_runs(
            table.sources.runs(chunk.extents),
            out,
            lambda number, piece: table.sources[chunk.first_extent + number].copy_to(piece),
        )
    return True


def _is_small_on_cpu(table: StateTable, chunk: Chunk) -> bool:
    """Whether a chunk is one small extent of host memory, such as the state of a random number generator.

    `gather` checks that it is still there, and takes less time than a view and a copy by torch.
    """
    extent = chunk.first_extent
    return table.extent_bytes[extent] <= _SMALL_BYTES and table.extent_devices[extent].type == "cpu"


def _is_plain(table: StateTable, chunk: Chunk) -> bool:
    """Whether a chunk is many small runs of host memory."""
    extents = slice(chunk.first_extent, chunk.end_extent)
    return (
        table.extent_devices[chunk.first_extent].type == "cpu"
        and not any(table.extent_packings[extents])
        and max(table.extent_bytes[extents]) <= _SMALL_BYTES
    )


def _move(table: StateTable, chunk: Chunk, out: torch.Tensor) -> None:
    # The table holds the storages, so the addresses are good. Sources, or copies by torch, take ten times as long.
    target, memmove = out.data_ptr(), ctypes.memmove
    extents = slice(chunk.first_extent, chunk.end_extent)
    for source, num_bytes in zip(table.extent_addresses[extents], table.extent_bytes[extents], strict=True):
        memmove(target, source, num_bytes)
        target += num_bytes


def _split(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut rows of (source, target, bytes) into pieces of at most _PIECE_BYTES.

    Returns:
        The pieces, and how many each row became.
    """
    counts = -(-rows[:, 2] // _PIECE_BYTES)
    owner = np.repeat(np.arange(len(rows)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    skip = number * _PIECE_BYTES
    items = rows[owner]
    items[:, 0] += skip
    items[:, 1] += skip
    items[:, 2] = np.minimum(_PIECE_BYTES, items[:, 2] - skip)
    return np.ascontiguousarray(items), counts


def _kernels(device: torch.device) -> Kernels | None:
    try:
        return kernels_of(indexed(device))
    except CodecUnavailableError:
        return None
