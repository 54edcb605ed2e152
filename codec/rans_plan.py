"""How a GPU encodes a chunk by rans: grids, and what it keeps between its kernels. Plain numbers: needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from .base import frame_bound_bytes
from .device_plan import BUFFER_ALIGNMENT_BYTES, EncoderMemory, round_up
from .device_report import report_words
from .rans_directory import STATES_BYTES, TILE_MAP_BYTES
from .rans_survey import MAX_TABLES, MIN_SEGMENTS_PER_TABLE, SAMPLED_ABOVE_TILES
from .rans_tables import MAP_BYTES, NUM_SYMBOLS
from .rans_units import CARRIED_BYTES, NUM_LANES, SHAPES, TILE_BYTES, UnitShape
from .words import WordType

SEGMENTS_PER_BLOCK = 8
"""Warps of a thread block of the kernels."""

MIN_RAW_BYTES = 97
"""No shorter chunk shrinks: preamble, one table and one entry take 96 bytes."""

_MORE_BLOCKS = MAX_TABLES + MAX_TABLES // SEGMENTS_PER_BLOCK + 1
# Than segments by the eight: the last thread block of each table may have fewer, and G is rounded up.

_PACKED_TABLE_BYTES = MAP_BYTES + 2 * NUM_SYMBOLS
_CODE_ENTRY_BYTES = 16


@dataclass(frozen=True, slots=True)
class RansPlan:
    """How one chunk is cut.

    Attributes:
        word: What one value is.
        raw_bytes: Length of the chunk, at least 1.
    """

    word: WordType
    raw_bytes: int

    @property
    def shape(self) -> UnitShape:
        """How its units are cut."""
        return SHAPES[self.word]

    @property
    def num_segments(self) -> int:
        """S of RANS.md."""
        return -(-self.raw_bytes // (TILE_BYTES * self.shape.segment_tiles))

    @property
    def segments_per_table(self) -> int:
        """G of RANS.md."""
        return max(MIN_SEGMENTS_PER_TABLE, -(-self.num_segments // MAX_TABLES))

    @property
    def num_tables(self) -> int:
        """Tables of the body."""
        return -(-self.num_segments // self.segments_per_table)

    @property
    def blocks_per_table(self) -> int:
        """Thread blocks for the segments of one table."""
        return -(-self.segments_per_table // SEGMENTS_PER_BLOCK)

    @property
    def num_blocks(self) -> int:
        """Thread blocks of the kernels that have a warp a segment of a table."""
        return self.num_tables * self.blocks_per_table

    @property
    def spread(self) -> int:
        """How many symbols make an octave, 0 where no symbols are added to a table."""
        return self.shape.spread if -(-self.raw_bytes // TILE_BYTES) > SAMPLED_ABOVE_TILES else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slot of one segment: map, longest plain stream, and what one more tile may overshoot that by."""
        units = self.shape.units_per_lane * NUM_LANES
        plain = TILE_MAP_BYTES + CARRIED_BYTES + units * self.shape.segment_tiles
        return round_up(plain + STATES_BYTES + 2 * units, 16)


@dataclass(frozen=True, slots=True)
class RansBuffers:
    """What the kernels hand on, in one buffer: addresses, or bytes where the address is 0.

    Attributes:
        infos: uint32[S], what the first kernel found out about each segment.
        maps: uint32[S, 8], tile maps.
        counts: uint32[thread blocks, 256], histograms.
        block_areas: uint32[thread blocks], bytes of the raw areas of their segments.
        block_streams: uint32[thread blocks], bytes of their streams with padding.
        entries: uint32[tables, 2, 256, 4], what the coder looks up.
        packed: uint8[tables, 544], tables as a body holds them.
        packed_bytes: uint32[tables], their lengths.
        raw_offsets: uint64[S + 1], where raw areas start in the raw region, and where it ends; at first their bytes.
        directory: uint64[S], entries.
        stream_bytes: uint32[S], without padding.
        end: Behind them.
    """

    infos: int
    maps: int
    counts: int
    block_areas: int
    block_streams: int
    entries: int
    packed: int
    packed_bytes: int
    raw_offsets: int
    directory: int
    stream_bytes: int
    end: int

    @classmethod
    def at(cls, start: int, num_segments: int) -> RansBuffers:
        """Lay them out from an address on, a multiple of BUFFER_ALIGNMENT_BYTES, for up to `num_segments`."""
        num_blocks = num_segments // SEGMENTS_PER_BLOCK + _MORE_BLOCKS
        sizes = (
            4 * num_segments,
            32 * num_segments,
            4 * NUM_SYMBOLS * num_blocks,
            4 * num_blocks,
            4 * num_blocks,
            2 * _CODE_ENTRY_BYTES * NUM_SYMBOLS * MAX_TABLES,
            _PACKED_TABLE_BYTES * MAX_TABLES,
            4 * MAX_TABLES,
            8 * (num_segments + 1),
            8 * num_segments,
            4 * num_segments,
        )
        places = [start]
        for size in sizes:
            places.append(places[-1] + round_up(size, BUFFER_ALIGNMENT_BYTES))
        return cls(*places)


def rans_encoder_memory(chunk_bytes: int) -> EncoderMemory:
    """Return what an encoder of chunks of up to `chunk_bytes`, of any word type, needs."""
    plans = [RansPlan(word, max(chunk_bytes, 1)) for word in WordType]
    return EncoderMemory(
        planes=0,
        slots=max(plan.num_segments * plan.slot_bytes for plan in plans),
        temp=RansBuffers.at(0, max_segments(chunk_bytes)).end,
        arrays=0,
        offsets=0,
        constant=0,
        report=report_words(chunk_bytes, num_digests=2) * 8,
        frame=frame_bound_bytes(chunk_bytes),
    )


def max_segments(chunk_bytes: int) -> int:
    """Return the most segments of a chunk of up to `chunk_bytes`."""
    return max(RansPlan(word, max(chunk_bytes, 1)).num_segments for word in WordType)
