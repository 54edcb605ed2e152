"""The outer form of a rans body: preamble, tables, directory, where the two regions lie. RANS.md gives the bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import FrameHeader
from .errors import CorruptionError, TruncatedError, UnknownCodecError
from .rans_directory import ENTRY_BYTES, Directory, tiles_of_segments
from .rans_tables import MAX_TABLE_BYTES, CodeTables, pack_tables, with_wide
from .rans_units import UnitShape
from .words import WordType

LOG2_SUM = 12
"""n of the bodies that this build writes: more bits gain 0.02 % and make the GPU's tables larger."""

_BODY_VERSION = 1
_NO_CONTEXT = 0
_SUMS = (12, 13, 14)
_SEGMENT_TILES = (16, 32, 64, 128, 256)
_MAX_TABLES = 64
_PREAMBLE = struct.Struct("<BBBBHHIIQQ")
PREAMBLE_BYTES = _PREAMBLE.size


@dataclass(frozen=True, slots=True, eq=False)
class Preamble:
    """A checked preamble: its parts add up to the body.

    Attributes:
        log2_sum: n.
        segment_tiles: T.
        num_tables: Stored tables.
        tiles: int64[S], tiles of each segment.
        tables_bytes: Bytes of the tables.
        raw_bytes: Bytes of the raw region.
        stream_bytes: Bytes of the stream region.
    """

    log2_sum: int
    segment_tiles: int
    num_tables: int
    tiles: NDArray[np.int64]
    tables_bytes: int
    raw_bytes: int
    stream_bytes: int

    @property
    def start_bytes(self) -> int:
        """Bytes of preamble, tables and directory."""
        return PREAMBLE_BYTES + self.tables_bytes + _directory_bytes(self.tiles.size)


@dataclass(frozen=True, slots=True, eq=False)
class BodyLayout:
    """A body whose start has been checked, or is about to be written.

    Attributes:
        shape: How units are cut.
        segment_tiles: T.
        tiles: int64[S], tiles of each segment.
        tables: The frequencies.
        directory: What each segment is.
        raw_offsets: int64[S], where each raw area starts, from the start of the body.
        raw_end: Where the raw region ends and the stream region starts.
    """

    shape: UnitShape
    segment_tiles: int
    tiles: NDArray[np.int64]
    tables: CodeTables
    directory: Directory
    raw_offsets: NDArray[np.int64]
    raw_end: int

    def stream_offsets(self) -> NDArray[np.int64]:
        """Return where each stream starts, from the start of the body: int64[S]."""
        padded = _padded(self.directory.stream_bytes)
        return self.raw_end + np.cumsum(padded) - padded

    @property
    def body_bytes(self) -> int:
        """Length of the body."""
        return self.raw_end + int(_padded(self.directory.stream_bytes).sum())


def plan_layout(
    shape: UnitShape,
    tiles: NDArray[np.int64],
    frequencies: NDArray[np.uint32],
    log2_sum: int,
    directory: Directory,
) -> BodyLayout:
    """Lay out a body whose streams are still to be written; their lengths go into the directory then.

    Args:
        shape: How units are cut; its segment_tiles are T.
        tiles: int64[S], tiles of each segment.
        frequencies: uint32[num_tables, 256].
        log2_sum: n, to whose power of two each table sums.
        directory: Complete but for streams, tables and the kind where that depends on the stream.
    """
    start = PREAMBLE_BYTES + len(pack_tables(frequencies)) + _directory_bytes(directory.num_segments)
    raw_bytes = directory.raw_bytes(shape)
    ends = start + np.cumsum(raw_bytes)
    return BodyLayout(
        shape=shape,
        segment_tiles=shape.segment_tiles,
        tiles=tiles,
        tables=with_wide(frequencies, log2_sum),
        directory=directory,
        raw_offsets=ends - raw_bytes,
        raw_end=start + int(raw_bytes.sum()),
    )


def pack_start(word: WordType, frequencies: NDArray[np.uint32], layout: BodyLayout) -> NDArray[np.uint8]:
    """Return the start of a body, up to its raw region; all streams must be written."""
    tables = pack_tables(frequencies)
    directory = layout.directory
    preamble = _PREAMBLE.pack(
        _BODY_VERSION,
        layout.tables.log2_sum,
        word,
        _NO_CONTEXT,
        layout.segment_tiles,
        len(frequencies),
        directory.num_segments,
        len(tables),
        int(directory.raw_bytes(layout.shape).sum()),
        layout.body_bytes - layout.raw_end,
    )
    return np.frombuffer(preamble + tables + directory.pack(), dtype=np.uint8)


def start_bound_bytes(raw_bytes: int) -> int:
    """Return the most bytes that the start of a body, up to its raw region, can take for a chunk of `raw_bytes`."""
    num_segments = tiles_of_segments(raw_bytes, min(_SEGMENT_TILES)).size
    return PREAMBLE_BYTES + _MAX_TABLES * MAX_TABLE_BYTES + _directory_bytes(num_segments)


def unpack_preamble(header: FrameHeader, start: NDArray[np.uint8]) -> Preamble:
    """Read and check the preamble of a body, before anything behind it is read.

    Args:
        header: The frame's header; its raw_bytes must have been checked against what the caller expects.
        start: uint8[at least 32], the start of the body.

    Raises:
        TruncatedError: If the body ends inside its preamble.
        UnknownCodecError: If it is of another version, or has a context rule that this build does not know.
        CorruptionError: If a field is not what the header calls for.
    """
    if min(start.size, header.body_bytes) < PREAMBLE_BYTES:
        raise TruncatedError(f"the body ends after {start.size} bytes, inside its {PREAMBLE_BYTES}-byte preamble")
    version, log2_sum, word, rule, segment_tiles, num_tables, num_segments, *sizes = _PREAMBLE.unpack_from(start.data)
    if version != _BODY_VERSION or rule != _NO_CONTEXT:
        raise UnknownCodecError(
            f"the rans body has version {version} and context rule {rule}, and this build reads version "
            f"{_BODY_VERSION} and rule {_NO_CONTEXT}; upgrade tidegate"
        )
    if word != header.word or log2_sum not in _SUMS or segment_tiles not in _SEGMENT_TILES:
        raise CorruptionError(
            f"the body gives word type {word}, {log2_sum} bits of probability and {segment_tiles} tiles a segment, "
            f"which no writer makes for a chunk of {header.word.name}"
        )
    tiles = tiles_of_segments(header.raw_bytes, segment_tiles)
    if not 1 <= num_tables <= _MAX_TABLES or num_segments != tiles.size or not num_segments:
        raise CorruptionError(
            f"the body gives {num_tables} tables and {num_segments} segments; a chunk of {header.raw_bytes} bytes has "
            f"1 to {_MAX_TABLES} and {tiles.size}"
        )
    preamble = Preamble(log2_sum, segment_tiles, num_tables, tiles, *sizes)
    parts = preamble.start_bytes, preamble.raw_bytes, preamble.stream_bytes
    if any(size % 16 for size in sizes) or sum(parts) != header.body_bytes:
        raise CorruptionError(f"the parts of the body take {parts} bytes and it has {header.body_bytes}")
    if preamble.tables_bytes > num_tables * MAX_TABLE_BYTES:
        raise CorruptionError(f"the body gives {num_tables} tables {preamble.tables_bytes} bytes, which no writer does")
    return preamble


def _directory_bytes(num_segments: int) -> int:
    return -(-ENTRY_BYTES * num_segments // 16) * 16


def _padded(stream_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    return (stream_bytes + 15) & ~15
