"""What the rans codec makes of one value: a symbol of one byte and a raw field. RANS.md gives the bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from .words import WordType

TILE_BYTES = 512
NUM_LANES = 32
CARRIED_BYTES = 64
"""Bytes of a segment's first plane that its stream carries: 16 bits in the first state of each lane."""

EMPTY_SYMBOL = 255
"""What a unit of 0 has instead of its own symbol in a segment with the flag E; it has no raw field then."""

PLANE_WIDTHS = (32, 16, 8, 4, 2, 1)

_EXPONENT_AND_MANTISSA_BITS = {
    # Three bits of an F16's mantissa belong to its symbol, so that it is cut where a BF16 is.
    WordType.F16: (8, 7),
    WordType.BF16: (8, 7),
    WordType.F32: (8, 23),
    WordType.F64: (11, 52),
}
_SHORT_BITS = {WordType.F32: 16, WordType.F64: 29}
_F64_EXPONENT_SHIFT = 1153
"""Added to an F64's exponent modulo 2048, so that the range of an F32 has 0 in the three bits above the symbol."""


@dataclass(frozen=True, slots=True)
class UnitShape:
    """How the units of a word type are cut.

    Attributes:
        unit_bytes: Bytes of a unit.
        exponent_bits: Bits between mantissa and sign; 8 where a unit is a byte.
        mantissa_bits: Bits below them.
        exponent_shift: Added to the exponent, modulo its range, before it is cut into symbol and high bits.
        has_sign: Whether there is a raw field at all, with a sign at its top.
        short_bits: How many low bits a segment with the flag L leaves out; 0 where the word has no such flag.
        segment_tiles: Tiles of a segment that the writer makes.
        spread: How many symbols make an octave; 0 where neighbouring symbols have nothing in common.
    """

    unit_bytes: int
    exponent_bits: int
    mantissa_bits: int
    exponent_shift: int
    has_sign: bool
    short_bits: int
    segment_tiles: int
    spread: int

    @property
    def units_per_lane(self) -> int:
        """Units of a tile that one lane codes."""
        return TILE_BYTES // NUM_LANES // self.unit_bytes

    @property
    def units_per_tile(self) -> int:
        """Units of a whole tile."""
        return TILE_BYTES // self.unit_bytes

    @property
    def high_bits(self) -> int:
        """Bits of the exponent above the symbol."""
        return self.exponent_bits - 8

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Unsigned type of a unit."""
        return np.dtype(f"<u{self.unit_bytes}")


def _shape_of(word: WordType) -> UnitShape:
    if word not in _EXPONENT_AND_MANTISSA_BITS:
        return UnitShape(1, 8, 0, 0, False, 0, 32, 0)
    exponent_bits, mantissa_bits = _EXPONENT_AND_MANTISSA_BITS[word]
    return UnitShape(
        unit_bytes=word.itemsize,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        exponent_shift=_F64_EXPONENT_SHIFT if word is WordType.F64 else 0,
        has_sign=True,
        short_bits=_SHORT_BITS.get(word, 0),
        segment_tiles=32 if word.itemsize == 2 else 64,
        spread=8 if word is WordType.F16 else 1,
    )


SHAPES: Mapping[WordType, UnitShape] = MappingProxyType({word: _shape_of(word) for word in WordType})


@dataclass(frozen=True, slots=True)
class FieldCut:
    """Where the parts of a raw field lie in a segment with certain flags.

    Attributes:
        num_bits: Bits of the field, R; 0 where units are bytes.
        low_bits: Bits of it that come from the mantissa.
        dropped_bits: Low bits of the mantissa that are not in it.
        high_bits: Bits of the exponent above them.
        sign_bits: 1 if the sign is at the top, else 0.
    """

    num_bits: int
    low_bits: int
    dropped_bits: int
    high_bits: int
    sign_bits: int


def field_cut(shape: UnitShape, one_sign: bool, no_high: bool, short: bool) -> FieldCut:
    """Return the cut of segments with the flags N, H and L."""
    if not shape.has_sign:
        return FieldCut(0, 0, 0, 0, 0)
    dropped = shape.short_bits if short else 0
    low, high, sign = shape.mantissa_bits - dropped, 0 if no_high else shape.high_bits, int(not one_sign)
    return FieldCut(low + high + sign, low, dropped, high, sign)


def symbols_of(values: NDArray[np.unsignedinteger], shape: UnitShape) -> NDArray[np.uint8]:
    """Return the symbols of units: uint8, of the shape of `values`."""
    if shape.unit_bytes == 1:
        return values.astype(np.uint8, copy=False)
    exponents = values >> shape.dtype.type(shape.mantissa_bits)
    if shape.exponent_shift:
        exponents += shape.dtype.type(shape.exponent_shift)
    # Casting keeps the low byte: that cuts off the sign and the high bits.
    symbols: NDArray[np.uint8] = exponents.astype(np.uint8)
    return symbols


def high_bits_of(values: NDArray[np.unsignedinteger], shape: UnitShape) -> NDArray[np.unsignedinteger]:
    """Return the exponent's bits above the symbol, at the bottom of a word of the unit's type."""
    unit = shape.dtype.type
    exponents = (values >> unit(shape.mantissa_bits)) + unit(shape.exponent_shift)
    high: NDArray[np.unsignedinteger] = (exponents >> unit(8)) & unit((1 << shape.high_bits) - 1)
    return high


def fields_of(values: NDArray[np.unsignedinteger], shape: UnitShape, cut: FieldCut) -> NDArray[np.unsignedinteger]:
    """Return the raw fields of units, each at the bottom of a word of the unit's type."""
    unit = shape.dtype.type
    low = unit((1 << shape.mantissa_bits) - 1)
    fields: NDArray[np.unsignedinteger] = (values & low) >> unit(cut.dropped_bits)
    if cut.high_bits:
        fields |= high_bits_of(values, shape) << unit(cut.low_bits)
    if cut.sign_bits:
        fields |= (values >> unit(8 * shape.unit_bytes - 1)) << unit(cut.num_bits - 1)
    return fields


def values_of(
    symbols: NDArray[np.uint8], fields: NDArray[np.unsignedinteger], shape: UnitShape, cut: FieldCut, sign: int
) -> NDArray[np.unsignedinteger]:
    """Undo `symbols_of` and `fields_of`.

    Args:
        symbols: uint8[n].
        fields: shape.dtype[n]; not looked at where units are bytes.
        shape: How units are cut.
        cut: How raw fields are.
        sign: The sign of all units where the fields have none.

    Returns:
        shape.dtype[n].
    """
    if shape.unit_bytes == 1:
        return symbols
    unit = shape.dtype.type
    exponents = symbols.astype(shape.dtype)
    if cut.high_bits:
        high = (fields >> unit(cut.low_bits)) & unit((1 << cut.high_bits) - 1)
        exponents |= high << unit(8)
    if shape.exponent_shift:
        exponents -= unit(shape.exponent_shift)
        exponents &= unit((1 << shape.exponent_bits) - 1)
    values: NDArray[np.unsignedinteger] = exponents << unit(shape.mantissa_bits)
    values |= (fields & unit((1 << cut.low_bits) - 1)) << unit(cut.dropped_bits)
    top = fields >> unit(cut.num_bits - 1) if cut.sign_bits else unit(sign)
    values |= top << unit(8 * shape.unit_bytes - 1)
    return values


def planes_of(num_bits: int) -> Iterator[tuple[int, int]]:
    """Yield width and lowest bit of each plane of fields of `num_bits`."""
    lowest = 0
    for width in PLANE_WIDTHS:
        if num_bits & width:
            yield width, lowest
            lowest += width


def pack_plane(fields: NDArray[np.unsignedinteger], width: int, lowest: int) -> NDArray[np.uint8]:
    """Return one plane of raw fields: uint8[fields.size * width / 8]; the size is a multiple of 8."""
    parts = fields >> fields.dtype.type(lowest)
    if width >= 8:
        return parts.astype(f"<u{width // 8}").view(np.uint8)
    octets = parts.astype(np.uint8) & np.uint8((1 << width) - 1)
    while width < 8:
        octets = octets[0::2] | (octets[1::2] << np.uint8(width))
        width *= 2
    return octets


def unpack_plane(plane: NDArray[np.uint8], width: int, lowest: int, fields: NDArray[np.unsignedinteger]) -> None:
    """Put one plane into the raw fields, whose bits there are 0."""
    if width >= 8:
        parts = plane.view(f"<u{width // 8}")
    else:
        shifts = np.arange(0, 8, width, dtype=np.uint8)
        parts = ((plane[:, None] >> shifts) & np.uint8((1 << width) - 1)).reshape(-1)
    fields |= parts.astype(fields.dtype) << fields.dtype.type(lowest)
