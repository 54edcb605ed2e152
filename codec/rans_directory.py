"""The directory of a rans body: what each segment is and where its parts lie. RANS.md gives the bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from .rans_units import CARRIED_BYTES, NUM_LANES, PLANE_WIDTHS, TILE_BYTES, FieldCut, UnitShape, field_cut

STATES_BYTES = 4 * NUM_LANES
TILE_MAP_BYTES = 32
CONSTANT_BYTES = 8
ENTRY_BYTES = 8


class EntryFields:
    """Where the fields of an entry lie: lowest bit, and how many bits."""

    STREAM = (0, 20)
    KIND = (20, 2)
    TABLE = (28, 6)
    CODED = (34, 9)
    FIELDS = (43, 17)
    FLAGS: Mapping[str, int] = MappingProxyType(
        {"one_sign": 22, "sign": 23, "no_high": 24, "short": 25, "mapped": 26, "wide": 27, "sparse": 60}
    )
    END_BIT = 61


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
        entries = self.stream_bytes | self.kind << EntryFields.KIND[0] | self.table << EntryFields.TABLE[0]
        entries |= self.num_coded << EntryFields.CODED[0] | self.num_fields << EntryFields.FIELDS[0]
        for name, bit in EntryFields.FLAGS.items():
            entries |= getattr(self, name) << bit
        return entries

    def pack(self) -> bytes:
        """Return the directory as a body holds it, padding included."""
        packed = self.entries().astype("<i8").tobytes()
        return packed + bytes(-len(packed) % 16)

    @classmethod
    def of_entries(cls, entries: NDArray[np.int64]) -> Directory:
        """Take entries apart: int64[S]. Nothing is checked."""
        flags = {name: (entries >> bit) & 1 for name, bit in EntryFields.FLAGS.items()}
        places = EntryFields.KIND, EntryFields.STREAM, EntryFields.TABLE, EntryFields.CODED, EntryFields.FIELDS
        kind, stream_bytes, table, num_coded, num_fields = (
            (entries >> bit) & ((1 << width) - 1) for bit, width in places
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
