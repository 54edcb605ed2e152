"""The rans codec on a CUDA device: the kernels of rans_look.cu, rans_tables.cu, rans_encode.cu and rans_decode.cu."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .base import FrameHeader
from .device_report import FAILED_WORD, WORD_BYTES
from .host_rooms import HostRooms
from .kernels import Kernels
from .rans import RansCodec
from .rans_format import LOG2_SUM
from .rans_plan import MIN_RAW_BYTES, SEGMENTS_PER_BLOCK, RansBuffers, RansPlan, max_segments
from .rans_start import BodyStart, unpack_start
from .rans_tables import wide_beside
from .rans_units import SHAPES
from .words import WordType

_MAX_PLANS = 256
# Kept: a save has chunks of few lengths, and comes back to them.


class RansEncoder:
    """Makes the bodies of the rans codec. Allocates nothing.

    Args:
        chunk_bytes: The longest chunk.
        kernels: Those of the device.
        slots: Address of `rans_encoder_memory(chunk_bytes).slots` bytes, which other codecs may use in between.
        temp: Address of `rans_encoder_memory(chunk_bytes).temp` bytes, likewise.

    Raises:
        CodecUnavailableError: If CuPy cannot compile the kernels for this device.
    """

    def __init__(self, chunk_bytes: int, kernels: Kernels, slots: int, temp: int) -> None:
        kernels.load_rans()
        self._kernels = kernels
        self._slots = slots
        self._buffers = RansBuffers.at(temp, max_segments(chunk_bytes))
        self._launches: dict[tuple[WordType, int], Launches] = {}

    def enqueue(self, raw: int, raw_bytes: int, word: WordType, body: int, report: int, stream: int) -> bool:
        """Enqueue all that makes a body, inside `Kernels.on(stream)`.

        Args:
            raw: Address of the chunk, a multiple of 16.
            raw_bytes: Its length.
            word: What one value is.
            body: Address of raw_bytes, rounded up to 16, for the body; a multiple of 16.
            report: Address of the report, whose first words tell how long the body became.
            stream: Where it runs, as `Kernels.on` has been told; the parameter is there for the other encoders.

        Returns:
            False where no body could be shorter than the chunk; nothing is enqueued then.
        """
        if raw_bytes < MIN_RAW_BYTES:
            return False
        launches = self._launches_of(word, raw_bytes)
        for name, grid, arguments in launches.steps(raw, body, report):
            self._kernels.launch(name, grid, *arguments)
        return True

    def _launches_of(self, word: WordType, raw_bytes: int) -> Launches:
        key = (word, raw_bytes)
        launches = self._launches.get(key)
        if launches is None:
            if len(self._launches) == _MAX_PLANS:
                self._launches.clear()
            launches = self._launches[key] = Launches(RansPlan(word, raw_bytes), self._buffers, self._slots)
        return launches


class Launches:
    """Grids and arguments for all chunks of one word type and length, so that the next of them costs little time.

    Args:
        plan: How such a chunk is cut.
        buffers: What the kernels hand on.
        slots: Address of the slots.
    """

    __slots__ = ("_code", "_cut", "_gather", "_look", "_tables")

    def __init__(self, plan: RansPlan, buffers: RansBuffers, slots: int) -> None:
        b, num_segments, num_tables = buffers, plan.num_segments, plan.num_tables
        unit_bytes, tiles = plan.shape.unit_bytes, plan.shape.segment_tiles
        grid = plan.num_blocks
        self._cut = (plan.raw_bytes, tiles, num_segments)
        found = (b.infos, b.maps, b.counts, b.block_sums)
        self._look = (f"look_at_segments_{unit_bytes}", grid, (*found, b.raw_offsets, b.block_areas))
        counted = (b.counts, b.block_sums, num_segments, plan.group_shift, plan.spread)
        tables = (b.entries, b.packed, b.packed_bytes, b.block_tables, b.block_areas, b.raw_offsets)
        self._tables = ("make_rans_tables", num_tables, (*counted, *tables))
        inputs = (b.infos, b.maps, b.entries, b.block_tables, num_tables, b.packed_bytes, b.raw_offsets)
        outputs = (slots, plan.slot_bytes, b.directory, b.stream_bytes, b.block_streams)
        self._code = (f"code_segments_{unit_bytes}", grid, inputs, outputs)
        packed = (int(plan.word), b.packed, b.packed_bytes, num_tables)
        streams = (b.directory, b.stream_bytes, b.block_streams, b.raw_offsets, slots, plan.slot_bytes)
        self._gather = ("gather_streams", grid, (*self._cut, *packed, *streams))

    def steps(self, raw: int, body: int, report: int) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """Return kernel, grid and arguments of each launch, in order, for one chunk's addresses."""
        look, grid, found = self._look
        code, _, inputs, outputs = self._code
        gather, gather_grid, arguments = self._gather
        return (
            (look, grid, (raw, *self._cut, *found)),
            self._tables,
            (code, grid, (raw, *self._cut, *inputs, body, *outputs)),
            (gather, gather_grid, (report, body, *arguments)),
        )


def decode_rans(
    kernels: Kernels,
    rooms: HostRooms,
    header: FrameHeader,
    start: NDArray[np.uint8],
    body: torch.Tensor,
    out: torch.Tensor,
    report: int,
) -> None:
    """Enqueue the decoding of a body, inside `Kernels.on`, with the same stream current in PyTorch.

    Args:
        kernels: Those of the device.
        rooms: Those of the stream.
        header: The frame's header.
        start: uint8[at least the body's start], on the host.
        body: uint8[body_bytes] on the device, its address a multiple of 16.
        out: uint8[raw_bytes] on the device, its address a multiple of 16.
        report: Address of a report, one of whose words counts the segments that did not decode.

    Raises:
        CodecUnavailableError: If CuPy cannot compile the kernels for this device.
        CorruptionError: If the start of the body does not hold.
    """
    told = unpack_start(header, start)
    if told.log2_sum != LOG2_SUM:
        _decode_on_cpu(header, body, out)
        return
    kernels.load_rans()
    found = rooms.send(pack_for_device(told))
    launch_decoder(kernels, header, told, found.data_ptr(), body.data_ptr(), out.data_ptr(), report)


def pack_for_device(told: BodyStart) -> NDArray[np.int64]:
    """Put what the decoder's kernel is told in one array, for one copy to the device.

    Returns:
        int64[3 * S + 128 * tables]: entries, offsets of raw areas and of streams, then all frequencies as uint16.
    """
    frequencies = wide_beside(told.frequencies, told.log2_sum).astype("<u2").view(np.int64).reshape(-1)
    return np.concatenate([told.entries, told.raw_offsets, told.stream_offsets, frequencies])


def launch_decoder(
    kernels: Kernels, header: FrameHeader, told: BodyStart, found: int, body: int, out: int, report: int
) -> None:
    """Enqueue the decoder's kernel: `found` is the address of `pack_for_device` on the device."""
    num_segments = told.num_segments
    stride = WORD_BYTES * num_segments
    kernels.launch(
        f"decode_segments_{SHAPES[header.word].unit_bytes}",
        -(-num_segments // SEGMENTS_PER_BLOCK),
        body,
        out,
        header.raw_bytes,
        told.segment_tiles,
        num_segments,
        found,
        found + stride,
        found + 2 * stride,
        found + 3 * stride,
        report + FAILED_WORD * WORD_BYTES,
    )


def _decode_on_cpu(header: FrameHeader, body: torch.Tensor, out: torch.Tensor) -> None:
    """Decode a frame whose tables have another sum than any that this build writes; waits for the device."""
    chunk = torch.empty(header.raw_bytes, dtype=torch.uint8)
    RansCodec().decode_body(header, body.cpu().numpy(), chunk.numpy())
    out.copy_(chunk)
