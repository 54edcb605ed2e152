"""How a GPU encodes a chunk by rans: grids, and what it keeps between its kernels. Plain numbers: needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from .base import frame_bound_bytes
from .device_plan import BUFFER_ALIGNMENT_BYTES, EncoderMemory, round_up
from .device_report import report_words
from .rans_directory import STATES_BYTES, TILE_MAP_BYTES
from .rans_groups import GROUP_SEGMENTS, MAX_TABLES, num_tables_of, segments_per_group
from .rans_survey import SAMPLED_ABOVE_TILES
from .rans_tables import MAP_BYTES, NUM_SYMBOLS
from .rans_units import CARRIED_BYTES, NUM_LANES, SHAPES, TILE_BYTES, UnitShape
from .words import WordType

SEGMENTS_PER_BLOCK = GROUP_SEGMENTS
"""Warps of a thread block of the kernels: all of them have one table."""

MIN_RAW_BYTES = 97
"""No shorter chunk shrinks: preamble, one table and one entry take 96 bytes."""

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
    def num_tables(self) -> int:
        """Tables of the body."""
        return num_tables_of(self.num_segments)

    @property
    def num_blocks(self) -> int:
        """Thread blocks of the kernels that have a warp a segment."""
        return -(-self.num_segments // SEGMENTS_PER_BLOCK)

    @property
    def group_shift(self) -> int:
        """A group of RANS.md is the segments of two to the power of so many of these blocks."""
        return (segments_per_group(self.num_segments) // SEGMENTS_PER_BLOCK).bit_length() - 1

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
        block_sums: uint32[thread blocks, 2], what was counted and the sum of its symbols.
        block_tables: uint32[thread blocks], the table of their segments.
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
    block_sums: int
    block_tables: int
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
        num_blocks = -(-num_segments // SEGMENTS_PER_BLOCK)
        sizes = (
            4 * num_segments,
            32 * num_segments,
            4 * NUM_SYMBOLS * num_blocks,
            8 * num_blocks,
            4 * num_blocks,
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
