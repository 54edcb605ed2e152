"""What the rans encoder finds out about a chunk before it codes: rules 2 to 4 of the writer in RANS.md.

One 32-byte sector of every tile is enough to see that a segment has nothing special; only what may be special is read
whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .rans_directory import Directory, SegmentKind, tiles_of_segments
from .rans_groups import num_tables_of, segments_per_group, tables_of_groups
from .rans_tables import NUM_SYMBOLS
from .rans_units import CARRIED_BYTES, EMPTY_SYMBOL, TILE_BYTES, UnitShape, high_bits_of, symbols_of

SAMPLED_ABOVE_TILES = 4096
"""A chunk of more tiles is sampled."""

Count = Callable[[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]], None]
"""Adds up symbols, uint8[rows, n], by the group of each row, int64[rows], none below the one before; into
int64[groups, 256]."""

_SECTOR_BYTES = 32
_SECTORS = TILE_BYTES // _SECTOR_BYTES
_MULTIPLIER = 0x9E3779B1
_TILES_AT_A_TIME = 4096

ZERO_SHARE = 128
"""One unit of so many in the sectors must be 0, or a segment is not looked at for the flag E."""


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What a chunk is made of.

    Attributes:
        tiles: int64[S], tiles of each segment.
        directory: Kinds (CODED stands for coded or plain), flags, number of coded tiles and of the table.
        coded: bool[S, T], the tile map of each segment; False for tiles that there are not.
        counts: int64[num_tables, 256], the histograms.
        sampled: Whether they are of a sample.
    """

    tiles: NDArray[np.int64]
    directory: Directory
    coded: NDArray[np.bool_]
    counts: NDArray[np.int64]
    sampled: bool


def survey(raw: NDArray[np.uint8], shape: UnitShape, count: Count) -> Survey:
    """Look at a chunk. Blocks; NumPy gives up the GIL in the longer steps.

    Args:
        raw: uint8[at least 1], at an address that is a multiple of 8.
        shape: How units are cut.
        count: Counts symbols.
    """
    tiles = tiles_of_segments(raw.size, shape.segment_tiles)
    num_tiles = int(tiles.sum())
    probes = _probes(raw)
    directory = Directory.empty(tiles.size)
    coded = np.zeros((tiles.size, shape.segment_tiles), dtype=bool)
    coded.reshape(-1)[:num_tiles] = ~_zero_tiles(raw, probes, num_tiles)
    num_coded = np.count_nonzero(coded, axis=1)
    directory.kind[:] = np.where(num_coded == 0, SegmentKind.ZERO, SegmentKind.CODED)
    _find_special(raw, probes, coded, shape, directory)
    coded[directory.kind != SegmentKind.CODED] = False
    directory.num_coded[:] = np.where(directory.kind == SegmentKind.CODED, num_coded, 0)
    directory.mapped[:] = (directory.num_coded > 0) & (directory.num_coded < tiles)
    group_segments = segments_per_group(tiles.size)
    counts = np.zeros((-(-tiles.size // group_segments), NUM_SYMBOLS), dtype=np.int64)
    sampled = num_tiles > SAMPLED_ABOVE_TILES
    sparse = np.repeat(directory.sparse, shape.segment_tiles).astype(bool)
    for begin in range(0, num_tiles, _TILES_AT_A_TIME):
        some = slice(begin, min(begin + _TILES_AT_A_TIME, num_tiles))
        groups = np.arange(some.start, some.stop) // (group_segments * shape.segment_tiles)
        _count(raw, probes, coded.reshape(-1), sparse, some, groups, shape, sampled, count, counts)
    num_tables = num_tables_of(tiles.size)
    tables = tables_of_groups(counts, num_tables)
    of_segments = np.repeat(tables, group_segments)[: tiles.size]
    directory.table[:] = np.where(directory.kind == SegmentKind.CODED, of_segments, 0)
    sums = np.stack([counts[tables == table].sum(axis=0) for table in range(num_tables)])
    return Survey(tiles, directory, coded, sums, sampled)


def _sectors(first_tile: int, num_tiles: int) -> NDArray[np.int64]:
    """Return which sector of each tile is looked at: int64[num_tiles]."""
    tiles = np.arange(first_tile, first_tile + num_tiles, dtype=np.int64)
    return ((tiles * _MULTIPLIER) & 0xFFFF_FFFF) >> 28


def _probes(raw: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the looked-at sector of each whole tile: uint64[whole tiles, 4]."""
    num_whole = raw.size // TILE_BYTES
    sectors = raw[: num_whole * TILE_BYTES].view(np.uint64).reshape(num_whole * _SECTORS, _SECTOR_BYTES // 8)
    places = np.arange(0, num_whole * _SECTORS, _SECTORS) + _sectors(0, num_whole)
    probes: NDArray[np.uint64] = np.take(sectors, places, axis=0)
    return probes


def _zero_tiles(raw: NDArray[np.uint8], probes: NDArray[np.uint64], num_tiles: int) -> NDArray[np.bool_]:
    """Return which tiles are all zero: bool[num_tiles]."""
    zero = np.zeros(num_tiles, dtype=bool)
    num_whole = len(probes)
    whole = raw[: num_whole * TILE_BYTES].view(np.uint64).reshape(num_whole, TILE_BYTES // 8)
    candidates = np.flatnonzero(~probes.any(axis=1))
    for begin in range(0, candidates.size, _TILES_AT_A_TIME):
        some = candidates[begin : begin + _TILES_AT_A_TIME]
        zero[some] = ~whole[some].any(axis=1)
    if num_tiles > num_whole:
        zero[-1] = not raw[num_whole * TILE_BYTES :].any()
    return zero


def _find_special(
    raw: NDArray[np.uint8],
    probes: NDArray[np.uint64],
    coded: NDArray[np.bool_],
    shape: UnitShape,
    directory: Directory,
) -> None:
    """Find constant segments and the flags N, H, L and E of the others."""
    has_zeros = _have_zeros(probes, shape, directory.num_segments)
    segment_bytes = shape.segment_tiles * TILE_BYTES
    for index in np.flatnonzero(
        _may_be_special(probes, shape, directory) | (has_zeros & (directory.kind != SegmentKind.ZERO))
    ):
        segment = raw[index * segment_bytes : (index + 1) * segment_bytes]
        if np.array_equal(segment[8:], segment[:-8]):
            directory.kind[index] = SegmentKind.CONSTANT
        elif shape.has_sign:
            _set_flags(segment.view(shape.dtype), shape, directory, int(index))
            if has_zeros[index]:
                _make_sparse(segment, coded[index], shape, directory, int(index))


def _may_be_special(probes: NDArray[np.uint64], shape: UnitShape, directory: Directory) -> NDArray[np.bool_]:
    """Return which segments that are not zero must be read whole: bool[S]."""
    special = np.ones(directory.num_segments, dtype=bool)
    num_whole = len(probes) // shape.segment_tiles
    per_segment = probes[: num_whole * shape.segment_tiles].reshape(num_whole, shape.segment_tiles * _SECTOR_BYTES // 8)
    found = (per_segment == per_segment[:, :1]).all(axis=1)
    if shape.has_sign:
        units = per_segment.view(shape.dtype)
        ones, both = np.bitwise_or.reduce(units, axis=1), np.bitwise_and.reduce(units, axis=1)
        found |= (ones ^ both) >> shape.dtype.type(8 * shape.unit_bytes - 1) == 0
        if shape.short_bits:
            found |= ones & shape.dtype.type((1 << shape.short_bits) - 1) == 0
        if shape.high_bits:
            found |= ~high_bits_of(units, shape).any(axis=1)
    special[:num_whole] = found
    special &= directory.kind != SegmentKind.ZERO
    return special


def _have_zeros(probes: NDArray[np.uint64], shape: UnitShape, num_segments: int) -> NDArray[np.bool_]:
    """Return which segments have enough units of 0 in the sectors of their whole tiles: bool[S]."""
    if not shape.has_sign:
        return np.zeros(num_segments, dtype=bool)
    units = probes.view(shape.dtype)
    zeros = np.count_nonzero(units == 0, axis=1)
    starts = np.arange(0, num_segments * shape.segment_tiles, shape.segment_tiles)
    totals = np.diff(np.append(np.concatenate([[0], np.cumsum(zeros)])[np.minimum(starts, len(zeros))], zeros.sum()))
    tiles = np.minimum(np.maximum(len(zeros) - starts, 0), shape.segment_tiles)
    enough: NDArray[np.bool_] = totals * ZERO_SHARE >= tiles * units.shape[1]
    return enough


def _make_sparse(
    segment: NDArray[np.uint8], coded: NDArray[np.bool_], shape: UnitShape, directory: Directory, index: int
) -> None:
    """Set the flag E where it makes the raw area shorter."""
    units = segment.view(shape.dtype)
    lacking = -units.size % shape.units_per_tile
    num_tiles = -(-units.size // shape.units_per_tile)
    num_units = int(np.count_nonzero(coded[:num_tiles])) * shape.units_per_tile - lacking * int(coded[num_tiles - 1])
    num_fields = int(np.count_nonzero(units))
    plain_bits = int(directory.field_bits(shape)[index])
    short = directory.short[index] and shape.unit_bytes < 8
    bits = 8 * shape.unit_bytes - 8 - (shape.short_bits if short else 0)
    if num_fields * bits + 8 * CARRIED_BYTES >= num_units * plain_bits or num_fields == num_units:
        return
    if (symbols_of(units, shape) == EMPTY_SYMBOL).any():
        return
    directory.sparse[index], directory.num_fields[index] = 1, num_fields
    directory.one_sign[index] = directory.sign[index] = directory.no_high[index] = 0
    directory.short[index] = int(short)


def _set_flags(units: NDArray[np.unsignedinteger], shape: UnitShape, directory: Directory, index: int) -> None:
    unit = shape.dtype.type
    sign_place = unit(8 * shape.unit_bytes - 1)
    ones = np.bitwise_or.reduce(units)
    any_negative, all_negative = int(ones >> sign_place), int(np.bitwise_and.reduce(units) >> sign_place)
    directory.one_sign[index] = any_negative == all_negative
    directory.sign[index] = all_negative
    if shape.short_bits:
        directory.short[index] = int(ones) & ((1 << shape.short_bits) - 1) == 0
    if shape.high_bits:
        directory.no_high[index] = not high_bits_of(units, shape).any()


def _count(
    raw: NDArray[np.uint8],
    probes: NDArray[np.uint64],
    coded: NDArray[np.bool_],
    sparse: NDArray[np.bool_],
    tiles: slice,
    groups: NDArray[np.int64],
    shape: UnitShape,
    sampled: bool,
    count: Count,
    counts: NDArray[np.int64],
) -> None:
    """Count the symbols of some tiles, of those that are coded: all of them or those of the sectors."""

    def add(units: NDArray[np.unsignedinteger], is_sparse: NDArray[np.bool_], own: NDArray[np.int64]) -> None:
        symbols = symbols_of(units, shape)
        if is_sparse.any():
            symbols = np.where((units == 0) & is_sparse[:, None], np.uint8(EMPTY_SYMBOL), symbols)
        count(symbols, own, counts)

    num_whole = len(probes)
    rows = slice(tiles.start, min(tiles.stop, num_whole))
    chosen_sparse, chosen_groups = sparse[rows], groups[: rows.stop - rows.start]
    if sampled:
        chosen = probes[rows].view(np.uint8)
    else:
        chosen = raw[rows.start * TILE_BYTES : rows.stop * TILE_BYTES].reshape(-1, TILE_BYTES)
    if not coded[rows].all():
        kept = coded[rows]
        chosen, chosen_sparse, chosen_groups = chosen[kept], chosen_sparse[kept], chosen_groups[kept]
    add(chosen.view(shape.dtype), chosen_sparse, chosen_groups)
    if tiles.stop > num_whole and coded[num_whole]:
        last = raw[num_whole * TILE_BYTES :]
        if sampled:
            place = int(_sectors(num_whole, 1)[0]) * _SECTOR_BYTES
            last = last[place : place + _SECTOR_BYTES]
        add(last.view(shape.dtype)[None], sparse[num_whole : num_whole + 1], groups[-1:])
