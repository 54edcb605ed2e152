"""The directory of a rans body: what each segment is and where its parts lie. RANS.md gives the bits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptionError
from .rans_units import CARRIED_BYTES, NUM_LANES, PLANE_WIDTHS, TILE_BYTES, FieldCut, UnitShape, field_cut

STATES_BYTES = 4 * NUM_LANES
TILE_MAP_BYTES = 32
CONSTANT_BYTES = 8
ENTRY_BYTES = 8

# Where the fields of an entry lie, and how many bits they have.
_KIND = (20, 2)
_FLAGS = {"one_sign": 22, "sign": 23, "no_high": 24, "short": 25, "mapped": 26, "wide": 27, "sparse": 60}
_TABLE = (28, 6)
_CODED = (34, 9)
_STREAM = (0, 20)
_FIELDS = (43, 17)
_END_BIT = 61


class SegmentKind(IntEnum):
    """How a segment is stored. The number is part of the format; never renumber."""

    ZERO = 0
    CONSTANT = 1
    PLAIN = 2
    CODED = 3


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """What the segments of a body are: every attribute has one number a segment, and the encoder fills them in.

    Attributes:
        kind: int64[S], SegmentKind.
        stream_bytes: int64[S], without padding.
        one_sign: int64[S], flag N.
        sign: int64[S], the sign of all units where there is only one.
        no_high: int64[S], flag H.
        short: int64[S], flag L.
        mapped: int64[S], flag Z.
        wide: int64[S], flag W.
        table: int64[S], number of the stored table.
        num_coded: int64[S], coded tiles.
        sparse: int64[S], flag E.
        num_fields: int64[S], raw fields of a segment with that flag, else 0.
    """

    kind: NDArray[np.int64]
    stream_bytes: NDArray[np.int64]
    one_sign: NDArray[np.int64]
    sign: NDArray[np.int64]
    no_high: NDArray[np.int64]
    short: NDArray[np.int64]
    mapped: NDArray[np.int64]
    wide: NDArray[np.int64]
    table: NDArray[np.int64]
    num_coded: NDArray[np.int64]
    sparse: NDArray[np.int64]
    num_fields: NDArray[np.int64]

    @property
    def num_segments(self) -> int:
        """How many segments there are."""
        return self.kind.size

    def cut_of(self, index: int, shape: UnitShape) -> FieldCut:
        """Return how the raw fields of a segment are cut."""
        return field_cut(shape, bool(self.one_sign[index]), bool(self.no_high[index]), bool(self.short[index]))

    def field_bits(self, shape: UnitShape) -> NDArray[np.int64]:
        """Return R of each segment: int64[S]."""
        if not shape.has_sign:
            return np.zeros(self.num_segments, dtype=np.int64)
        whole = 1 + shape.high_bits + shape.mantissa_bits
        return whole - self.one_sign - shape.high_bits * self.no_high - shape.short_bits * self.short

    def raw_bytes(self, shape: UnitShape) -> NDArray[np.int64]:
        """Return the bytes of each raw area: int64[S], multiples of 16."""
        if not shape.has_sign:
            return np.zeros(self.num_segments, dtype=np.int64)
        bits = self.field_bits(shape)
        # Only the narrowest plane may need padding, and a sum is as far from a multiple of 16 as that one.
        areas = ((bits * self.num_coded * (shape.units_per_tile // 8) + 15) & ~15) - CARRIED_BYTES
        if self.sparse.any():
            planes = [np.where(bits & width, (self.num_fields * width // 8 + 15) & ~15, 0) for width in PLANE_WIDTHS]
            areas = np.where(self.sparse, sum(planes), areas)
        return np.where(self.num_coded > 0, areas, 0)

    def plain_bytes(self, shape: UnitShape) -> NDArray[np.int64]:
        """Return the bytes of each stream if it were plain: int64[S]."""
        carried = np.where(self.field_bits(shape) > 0, CARRIED_BYTES * (1 - self.sparse), 0)
        return TILE_MAP_BYTES * self.mapped + carried + shape.units_per_tile * self.num_coded

    @classmethod
    def empty(cls, num_segments: int) -> Directory:
        """Return a directory of zero segments, to be filled in."""
        return cls(*(np.zeros(num_segments, dtype=np.int64) for _ in cls.__slots__))

    def entries(self) -> NDArray[np.int64]:
        """Return the entries as a body holds them: int64[S]."""
        entries = self.stream_bytes | self.kind << _KIND[0] | self.table << _TABLE[0] | self.num_coded << _CODED[0]
        entries |= self.num_fields << _FIELDS[0]
        for name, bit in _FLAGS.items():
            entries |= getattr(self, name) << bit
        return entries

    def pack(self) -> bytes:
        """Return the directory as a body holds it, padding included."""
        packed = self.entries().astype("<i8").tobytes()
        return packed + bytes(-len(packed) % 16)

    @classmethod
    def unpack(cls, octets: NDArray[np.uint8], num_segments: int) -> Directory:
        """Read a directory; only that bits without a meaning are zero is checked.

        Args:
            octets: uint8[at least 8 * num_segments].
            num_segments: How many entries there are.

        Raises:
            CorruptionError: If a reserved bit or the padding is not zero.
        """
        end = ENTRY_BYTES * num_segments
        entries = np.frombuffer(octets[:end].tobytes(), dtype="<i8").astype(np.int64)
        if (entries >> _END_BIT).any() or octets[end : end + -end % 16].any():
            raise CorruptionError("the directory has bits set where this version has zeros")
        flags = {name: (entries >> bit) & 1 for name, bit in _FLAGS.items()}
        kind, stream_bytes, table, num_coded, num_fields = (
            (entries >> bit) & ((1 << width) - 1) for bit, width in (_KIND, _STREAM, _TABLE, _CODED, _FIELDS)
        )
        numbers = {"kind": kind, "stream_bytes": stream_bytes, "table": table}
        return cls(**numbers, num_coded=num_coded, num_fields=num_fields, **flags)


def tiles_of_segments(raw_bytes: int, tiles_per_segment: int) -> NDArray[np.int64]:
    """Return how many tiles each segment of a chunk has: int64[S]; a shorter last tile counts."""
    num_tiles = -(-raw_bytes // TILE_BYTES)
    tiles = np.full(-(-num_tiles // tiles_per_segment), tiles_per_segment, dtype=np.int64)
    if tiles.size:
        tiles[-1] = num_tiles - (tiles.size - 1) * tiles_per_segment
    return tiles


def check_directory(directory: Directory, tiles: NDArray[np.int64], num_tables: int, shape: UnitShape) -> None:
    """Raise CorruptionError unless every entry is one that a writer may make.

    Args:
        directory: What was read.
        tiles: int64[S], tiles of each segment.
        num_tables: Tables of the body.
        shape: How units are cut.
    """
    d = directory
    zero, constant, coded = (d.kind == kind for kind in (SegmentKind.ZERO, SegmentKind.CONSTANT, SegmentKind.CODED))
    flat = zero | constant
    plain_bytes = d.plain_bytes(shape)
    least = TILE_MAP_BYTES * d.mapped + STATES_BYTES
    fits = (least <= d.stream_bytes) & (d.stream_bytes < plain_bytes) & (d.stream_bytes & 1 == 0)
    good = np.where(coded, fits, d.stream_bytes == np.where(flat, CONSTANT_BYTES * constant, plain_bytes))
    flags = d.one_sign | d.sign | d.no_high | d.short | d.mapped | d.sparse
    some = np.where(d.mapped, (d.num_coded >= 1) & (d.num_coded < tiles), d.num_coded == tiles)
    good &= np.where(flat, flags | d.num_coded == 0, some)
    good &= np.where(coded, d.table < num_tables, d.table | d.wide == 0)
    good &= d.sign <= d.one_sign
    bits = d.field_bits(shape)
    some = (d.num_fields >= 1) & (d.num_fields < shape.units_per_tile * d.num_coded)
    good &= np.where(d.sparse, (d.one_sign | d.no_high) == 0, True)
    good &= np.where(d.sparse, some & (bits > 0) & (bits % 8 == 0), d.num_fields == 0)
    if not shape.has_sign:
        good &= d.one_sign == 0
    if not shape.high_bits:
        good &= d.no_high == 0
    if not shape.short_bits:
        good &= d.short == 0
    if not good.all():
        bad = int(np.argmin(good))
        raise CorruptionError(
            f"segment {bad} of {good.size} has kind {d.kind[bad]}, {d.num_coded[bad]} coded of {tiles[bad]} tiles and "
            f"{d.stream_bytes[bad]} stream bytes, which no writer makes"
        )
