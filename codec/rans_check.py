"""Checks the directory of a rans body: which entries a writer may make, and what they take. RANS.md gives the rules.

A GPU's decoder waits for this, so entries are checked by all that have the same kind and flags at once: nearly all do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptionError
from .rans_directory import (
    CONSTANT_BYTES,
    ENTRY_BYTES,
    STATES_BYTES,
    TILE_MAP_BYTES,
    EntryFields,
    SegmentKind,
)
from .rans_units import CARRIED_BYTES, PLANE_WIDTHS, UnitShape, field_cut

_MAX_TABLES = 64


def read_entries(octets: NDArray[np.uint8], num_segments: int) -> NDArray[np.int64]:
    """Return the entries of a directory: int64[S].

    Args:
        octets: uint8[at least 8 * num_segments, padding included].
        num_segments: How many entries there are.

    Raises:
        CorruptionError: If a reserved bit or the padding is not zero.
    """
    end = ENTRY_BYTES * num_segments
    entries = np.frombuffer(octets[:end].tobytes(), dtype="<i8")
    if (entries >> EntryFields.END_BIT).any() or octets[end : end + -end % 16].any():
        raise CorruptionError("the directory has bits set where this version has zeros")
    return entries


def check_entries(
    entries: NDArray[np.int64], tiles: NDArray[np.int64], num_tables: int, shape: UnitShape
) -> NDArray[np.int64]:
    """Check every entry, and return how many bytes the raw area of each segment has: int64[S].

    Args:
        entries: int64[S], reserved bits zero.
        tiles: int64[S], tiles of each segment.
        num_tables: Tables of the body.
        shape: How units are cut.

    Raises:
        CorruptionError: If an entry is not one that a writer may make.
    """
    keys = (entries >> EntryFields.KIND[0]) & 0xFF
    keys |= (entries >> (EntryFields.FLAGS["sparse"] - 8)) & 0x100
    present = np.flatnonzero(np.bincount(keys)).tolist()
    areas = np.empty(entries.size, dtype=np.int64)
    for key in present:
        which = slice(None) if len(present) == 1 else np.flatnonzero(keys == key)
        own, own_tiles = entries[which], tiles[which]
        good, areas[which] = _check_alike(key, own, own_tiles, num_tables, shape)
        if not good.all():
            _refuse(int(np.arange(entries.size)[which][np.argmin(good)]), entries, tiles)
    return areas


def _check_alike(
    key: int, entries: NDArray[np.int64], tiles: NDArray[np.int64], num_tables: int, shape: UnitShape
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Do `check_entries` for entries of the same kind and flags, bits 20 to 27 of them and bit 60 on top of those.

    Returns:
        bool[n], whether each is good; and the bytes of each raw area, int64[n].
    """
    none = np.zeros(entries.size, dtype=np.int64)
    kind = key & 3
    if kind in (SegmentKind.ZERO, SegmentKind.CONSTANT):
        expected = CONSTANT_BYTES | kind << EntryFields.KIND[0] if kind else 0
        return entries == expected, none
    first_flag = EntryFields.KIND[0]
    flags = {name: bool(key >> (bit - first_flag) & 1) for name, bit in EntryFields.FLAGS.items() if name != "sparse"}
    sparse = key > 0xFF
    num_bits = field_cut(shape, flags["one_sign"], flags["no_high"], flags["short"]).num_bits
    if not _may_be(kind, flags, sparse, num_bits, shape):
        return none.astype(bool), none
    # Without the flag E the number of raw fields, whose bits are above those of the coded tiles, is to be 0.
    num_coded = (entries >> EntryFields.CODED[0]) & (511 if sparse else (1 << 27) - 1)
    good = (num_coded >= 1) & (num_coded < tiles) if flags["mapped"] else num_coded == tiles
    num_units = num_coded * shape.units_per_tile
    map_bytes = TILE_MAP_BYTES if flags["mapped"] else 0
    plain_bytes = num_units + (map_bytes + (CARRIED_BYTES if num_bits and not sparse else 0))
    stream_bytes = entries & ((1 << EntryFields.STREAM[1]) - 1)
    if kind == SegmentKind.PLAIN:
        good &= stream_bytes == plain_bytes
        good &= (entries >> EntryFields.TABLE[0]) & (_MAX_TABLES - 1) == 0
    else:
        good &= (stream_bytes >= map_bytes + STATES_BYTES) & (stream_bytes < plain_bytes) & (entries & 1 == 0)
        if num_tables < _MAX_TABLES:
            good &= (entries >> EntryFields.TABLE[0]) & (_MAX_TABLES - 1) < num_tables
    if not num_bits:
        return good, none
    if not sparse:
        # Only the narrowest plane may need padding, and a sum is as far from a multiple of 16 as that one.
        return good, ((num_units // 8 * num_bits + 15) & ~15) - CARRIED_BYTES
    num_fields = (entries >> EntryFields.FIELDS[0]) & ((1 << EntryFields.FIELDS[1]) - 1)
    good &= (num_fields >= 1) & (num_fields < num_units)
    for width in PLANE_WIDTHS:
        if num_bits & width:
            none += (num_fields * (width // 8) + 15) & ~15
    return good, none


def _may_be(kind: int, flags: dict[str, bool], sparse: bool, num_bits: int, shape: UnitShape) -> bool:
    """Return whether a plain or coded segment of units of this shape may have these flags."""
    if (flags["wide"] and kind != SegmentKind.CODED) or (flags["sign"] and not flags["one_sign"]):
        return False
    if (flags["no_high"] and not shape.high_bits) or (flags["short"] and not shape.short_bits):
        return False
    if sparse and (flags["one_sign"] or flags["no_high"] or num_bits % 8):
        return False
    return shape.has_sign or not (flags["one_sign"] or sparse)


def _refuse(index: int, entries: NDArray[np.int64], tiles: NDArray[np.int64]) -> None:
    entry = int(entries[index])
    kind, num_coded, stream_bytes = (
        entry >> bit & ((1 << width) - 1) for bit, width in (EntryFields.KIND, EntryFields.CODED, EntryFields.STREAM)
    )
    raise CorruptionError(
        f"segment {index} of {entries.size} has kind {kind}, {num_coded} coded of {tiles[index]} tiles and "
        f"{stream_bytes} stream bytes, which no writer makes"
    )
