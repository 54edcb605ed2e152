"""One segment of the rans codec in NumPy: its units, its raw area, its place in the body. RANS.md gives the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptionError
from .rans_directory import TILE_MAP_BYTES
from .rans_format import BodyLayout
from .rans_units import (
    CARRIED_BYTES,
    EMPTY_SYMBOL,
    NUM_LANES,
    TILE_BYTES,
    FieldCut,
    UnitShape,
    fields_of,
    pack_plane,
    planes_of,
    unpack_plane,
    values_of,
)

Octets = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A plain or coded segment.

    Attributes:
        index: Its number.
        shape: How units are cut.
        cut: How its raw fields are.
        begin: Its first byte in the chunk.
        end: The byte behind its last.
        raw_area: Where its raw area is in the body.
        num_coded: Coded tiles.
        num_missing: Units that the last of them lacks, because the chunk ends inside it.
        num_fields: Raw fields, where only units that are not 0 have one; else 0.
    """

    index: int
    shape: UnitShape
    cut: FieldCut
    begin: int
    end: int
    raw_area: slice
    num_coded: int
    num_missing: int
    num_fields: int

    @property
    def num_steps(self) -> int:
        """Steps of coding."""
        return self.num_coded * self.shape.units_per_lane

    @property
    def carried_bytes(self) -> int:
        """Bytes of its first plane that are in its stream."""
        return CARRIED_BYTES if self.cut.num_bits and not self.num_fields else 0


def segments_of(layout: BodyLayout, num_bytes: int, ends_coded: bool) -> Iterator[Segment]:
    """Yield the plain and coded segments of a chunk, in order.

    Args:
        layout: The body's.
        num_bytes: Bytes of the chunk.
        ends_coded: Whether the chunk's last tile is a coded one.
    """
    directory, shape = layout.directory, layout.shape
    missing_bytes = -num_bytes % TILE_BYTES if ends_coded else 0
    segment_bytes = layout.segment_tiles * TILE_BYTES
    raw_bytes = directory.raw_bytes(shape)
    for index in np.flatnonzero(directory.num_coded).tolist():
        begin, place = index * segment_bytes, int(layout.raw_offsets[index])
        yield Segment(
            index=index,
            shape=shape,
            cut=directory.cut_of(index, shape),
            begin=begin,
            end=min(begin + segment_bytes, num_bytes),
            raw_area=slice(place, place + int(raw_bytes[index])),
            num_coded=int(directory.num_coded[index]),
            num_missing=missing_bytes // shape.unit_bytes if begin + segment_bytes >= num_bytes else 0,
            num_fields=int(directory.num_fields[index]),
        )


def coded_units(raw: Octets, segment: Segment, coded: NDArray[np.bool_]) -> NDArray[np.unsignedinteger]:
    """Return the units of the coded tiles of a segment; those that its last tile lacks are 0.

    Args:
        raw: uint8[raw_bytes], the chunk.
        segment: Which one.
        coded: bool[at least the tiles of the segment], its tile map.

    Returns:
        dtype[num_coded * units_per_tile].
    """
    octets = raw[segment.begin : segment.end]
    if octets.size % TILE_BYTES:
        octets = np.concatenate([octets, np.zeros(-octets.size % TILE_BYTES, dtype=np.uint8)])
    tiles = octets.reshape(-1, TILE_BYTES)
    if segment.num_coded < len(tiles):
        tiles = tiles[coded[: len(tiles)]]
    return tiles.reshape(-1).view(segment.shape.dtype)


def write_raw_area(values: NDArray[np.unsignedinteger], segment: Segment, body: Octets) -> Octets:
    """Write the raw area of a segment and return its carried bytes: uint8[64], or none."""
    if not segment.cut.num_bits:
        return np.empty(0, dtype=np.uint8)
    if segment.num_fields:
        values = values[values != 0]
    fields = fields_of(values, segment.shape, segment.cut)
    if not segment.num_fields:
        # A unit that does not exist has the field 0, which is not what a value of 0 has.
        fields[fields.size - segment.num_missing :] = 0
    area = body[segment.raw_area]
    carried = np.empty(0, dtype=np.uint8)
    place = -segment.carried_bytes
    for width, lowest in planes_of(segment.cut.num_bits):
        plane = pack_plane(fields, width, lowest)
        if place < 0:
            carried = plane[:CARRIED_BYTES]
        area[max(place, 0) : place + plane.size] = plane[max(-place, 0) :]
        place += plane.size
        padding = -plane.size % 16
        area[place : place + padding] = 0
        place += padding
    return carried


def read_raw_area(segment: Segment, body: Octets, carried: Octets) -> NDArray[np.unsignedinteger]:
    """Return the raw fields of a segment: dtype[num_fields], or dtype[num_coded * units_per_tile]."""
    shape = segment.shape
    fields = np.zeros(segment.num_fields or segment.num_coded * shape.units_per_tile, dtype=shape.dtype)
    area = body[segment.raw_area]
    place = -segment.carried_bytes
    for width, lowest in planes_of(segment.cut.num_bits):
        num_bytes = fields.size * width // 8
        plane = area[max(place, 0) : place + num_bytes]
        unpack_plane(np.concatenate([carried, plane]) if place < 0 else plane, width, lowest, fields)
        place += num_bytes + -num_bytes % 16
    return fields


def write_units(
    symbols: Octets, carried: Octets, segment: Segment, layout: BodyLayout, body: Octets, tile_map: Octets, out: Octets
) -> None:
    """Restore the bytes of a segment.

    Args:
        symbols: uint8[num_coded * units_per_tile], in the order of the units.
        carried: The carried bytes.
        segment: Which one.
        layout: The body's.
        body: uint8[body_bytes].
        tile_map: uint8[32] where the segment has one, else empty.
        out: uint8[raw_bytes], the chunk.
    """
    fields = read_raw_area(segment, body, carried)
    sign = int(layout.directory.sign[segment.index])
    if segment.num_fields:
        octets = _sparse_values(symbols, fields, segment).view(np.uint8)
    else:
        octets = values_of(symbols, fields, segment.shape, segment.cut, sign).view(np.uint8)
    place = out[segment.begin : segment.end]
    if tile_map.size:
        num_tiles = int(layout.tiles[segment.index])
        tiles = np.zeros((num_tiles, TILE_BYTES), dtype=np.uint8)
        tiles[checked_map(tile_map, segment, num_tiles)] = octets.reshape(-1, TILE_BYTES)
        octets = tiles.reshape(-1)
    place[:] = octets[: place.size]


def _sparse_values(
    symbols: Octets, fields: NDArray[np.unsignedinteger], segment: Segment
) -> NDArray[np.unsignedinteger]:
    """Return the units of a segment with the flag E: dtype[num_coded * units_per_tile]."""
    num_existing = symbols.size - segment.num_missing
    places = np.flatnonzero(symbols[:num_existing] != EMPTY_SYMBOL)
    if places.size != segment.num_fields:
        raise CorruptionError(
            f"segment {segment.index} has {places.size} units that are not empty, and {segment.num_fields} raw fields"
        )
    values = np.zeros(symbols.size, dtype=segment.shape.dtype)
    values[places] = values_of(symbols[places], fields, segment.shape, segment.cut, 0)
    return values


def checked_map(tile_map: Octets, segment: Segment, num_tiles: int) -> NDArray[np.bool_]:
    """Return a tile map as bool[num_tiles].

    Raises:
        CorruptionError: If it does not have one bit for each coded tile, or bits for tiles that there are not.
    """
    bits = np.unpackbits(tile_map, bitorder="little").astype(bool)
    if np.count_nonzero(bits[:num_tiles]) != segment.num_coded or bits[num_tiles:].any():
        raise CorruptionError(f"the tile map of segment {segment.index} is not that of {segment.num_coded} coded tiles")
    return bits[:num_tiles]


def pack_map(coded: NDArray[np.bool_]) -> Octets:
    """Return a tile map as a stream holds it: uint8[32]."""
    octets = np.zeros(TILE_MAP_BYTES, dtype=np.uint8)
    octets[: -(-coded.size // 8)] = np.packbits(coded, bitorder="little")
    return octets


def missing_steps(segment: Segment) -> NDArray[np.bool_]:
    """Return which lanes have no unit at which of the steps of the last coded tile: bool[k, 32], or bool[0, 32]."""
    shape = segment.shape
    if not segment.num_missing:
        return np.empty((0, NUM_LANES), dtype=bool)
    missing = np.arange(shape.units_per_tile) >= shape.units_per_tile - segment.num_missing
    return missing.reshape(NUM_LANES, shape.units_per_lane).T
