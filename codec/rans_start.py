"""Reads the start of a rans body, which is everything before its raw region. RANS.md gives the bytes and the checks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import FrameHeader
from .errors import CorruptionError, TruncatedError
from .rans_check import check_entries, read_entries
from .rans_directory import Directory
from .rans_format import PREAMBLE_BYTES, BodyLayout, unpack_preamble
from .rans_tables import unpack_tables, with_wide
from .rans_units import SHAPES


@dataclass(frozen=True, slots=True, eq=False)
class BodyStart:
    """What the start of a body says, checked: no segment reaches outside its own bytes.

    Attributes:
        segment_tiles: T.
        tiles: int64[S], tiles of each segment.
        log2_sum: n.
        frequencies: uint32[num_tables, 256], the stored tables.
        entries: int64[S], the directory.
        raw_offsets: int64[S], where each raw area starts, from the start of the body.
        stream_offsets: int64[S], likewise the streams.
        raw_end: Where the raw region ends.
    """

    segment_tiles: int
    tiles: NDArray[np.int64]
    log2_sum: int
    frequencies: NDArray[np.uint32]
    entries: NDArray[np.int64]
    raw_offsets: NDArray[np.int64]
    stream_offsets: NDArray[np.int64]
    raw_end: int

    @property
    def num_segments(self) -> int:
        """How many segments there are."""
        return self.entries.size


def unpack_start(header: FrameHeader, start: NDArray[np.uint8]) -> BodyStart:
    """Read and check everything before the raw region.

    Args:
        header: The frame's header; its raw_bytes must have been checked against what the caller expects.
        start: uint8[at least the preamble's start_bytes], the start of the body or all of it.

    Raises:
        TruncatedError: If `start` is too short.
        UnknownCodecError: If the body is of another version, or has a context rule that this build does not know.
        CorruptionError: If a field is not what header and body call for.
    """
    preamble = unpack_preamble(header, start)
    if start.size < preamble.start_bytes:
        raise TruncatedError(f"the body ends after {start.size} bytes, before its {preamble.start_bytes}-byte start")
    tables_end = PREAMBLE_BYTES + preamble.tables_bytes
    frequencies = unpack_tables(start[PREAMBLE_BYTES:tables_end], preamble.num_tables, preamble.log2_sum)
    entries = read_entries(start[tables_end : preamble.start_bytes], preamble.tiles.size)
    raw_areas = check_entries(entries, preamble.tiles, preamble.num_tables, SHAPES[header.word])
    streams = ((entries & 0xFFFFF) + 15) & ~15
    raw_ends = preamble.start_bytes + np.cumsum(raw_areas)
    raw_end = preamble.start_bytes + preamble.raw_bytes
    stream_ends = raw_end + np.cumsum(streams)
    if raw_ends[-1] != raw_end or stream_ends[-1] != header.body_bytes:
        raise CorruptionError(
            f"the segments end at bytes {raw_ends[-1]} and {stream_ends[-1]} of the body; it gives {raw_end} and "
            f"{header.body_bytes}"
        )
    return BodyStart(
        segment_tiles=preamble.segment_tiles,
        tiles=preamble.tiles,
        log2_sum=preamble.log2_sum,
        frequencies=frequencies,
        entries=entries,
        raw_offsets=raw_ends - raw_areas,
        stream_offsets=stream_ends - streams,
        raw_end=raw_end,
    )


def unpack_layout(header: FrameHeader, start: NDArray[np.uint8]) -> BodyLayout:
    """Do what `unpack_start` does, and take the directory apart."""
    found = unpack_start(header, start)
    return BodyLayout(
        shape=SHAPES[header.word],
        segment_tiles=found.segment_tiles,
        tiles=found.tiles,
        tables=with_wide(found.frequencies, found.log2_sum),
        directory=Directory.of_entries(found.entries),
        raw_offsets=found.raw_offsets,
        raw_end=found.raw_end,
    )
