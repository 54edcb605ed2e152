"""Sign, exponent and mantissa of every value, each packed to a run of bytes. FRAME.md gives the bits.

An integer has no sign here; its top byte takes the place of the exponent. Little-endian hosts only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .words import WordType

_TILE_VALUES = 1 << 16
"""Values that are split at a time, a multiple of 8: the temporaries stay in a core's cache."""

_Octets = NDArray[np.uint8]
_Values = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class Fields:
    """How the bits of a word are parted, from the top: sign, exponent, mantissa.

    Attributes:
        sign_bits: 1 or 0.
        exponent_bits: How many.
        exponent_bytes: Bytes that one exponent is stored in.
        mantissa_bits: How many.
    """

    sign_bits: int
    exponent_bits: int
    exponent_bytes: int
    mantissa_bits: int

    @property
    def widths(self) -> list[int]:
        """Bits of each plane of the mantissa, from its lowest: whole bytes, then what of 4, 2 and 1 is left."""
        rest = self.mantissa_bits % 8
        return [8] * (self.mantissa_bits // 8) + [width for width in (4, 2, 1) if rest & width]

    def stream_bytes(self, num_values: int) -> tuple[int, int, int]:
        """Return the bytes of the packed signs, exponents and mantissas of so many values."""
        mantissa = sum(-(-num_values * width // 8) for width in self.widths)
        return -(-num_values * self.sign_bits // 8), num_values * self.exponent_bytes, mantissa


FIELDS = {
    WordType.U8: Fields(0, 8, 1, 0),
    WordType.U16: Fields(0, 8, 1, 8),
    WordType.U32: Fields(0, 8, 1, 24),
    WordType.U64: Fields(0, 8, 1, 56),
    WordType.F8: Fields(1, 4, 1, 3),
    WordType.F16: Fields(1, 5, 1, 10),
    WordType.BF16: Fields(1, 8, 1, 7),
    WordType.F32: Fields(1, 8, 1, 23),
    WordType.F64: Fields(1, 11, 2, 52),
}


def split_fields(raw: _Octets, word: WordType, streams: tuple[_Octets, _Octets, _Octets]) -> None:
    """Pack the fields of some values. Blocks; the GIL is free meanwhile.

    Args:
        raw: uint8[num_values * itemsize], at a multiple of the itemsize.
        word: What one value is.
        streams: uint8 of the lengths that `stream_bytes` gives, to be filled.
    """
    fields = FIELDS[word]
    for begin, values in _tiles(raw, word):
        signs, exponents, planes = _places(fields, streams, raw.size // word.itemsize, begin, values.size)
        if fields.sign_bits:
            _pack(_octets(values, 8 * word.itemsize - 1), 1, signs)
        dtype = exponents.dtype
        np.copyto(exponents, (values >> values.dtype.type(fields.mantissa_bits)).astype(dtype))
        exponents &= dtype.type((1 << fields.exponent_bits) - 1)
        at = 0
        for width, plane in zip(fields.widths, planes, strict=True):
            _pack(_octets(values, at), width, plane)
            at += width


def join_fields(streams: tuple[_Octets, _Octets, _Octets], word: WordType, out: _Octets) -> bool:
    """Undo the split. Blocks; the GIL is free meanwhile.

    Args:
        streams: As above.
        word: What one value is.
        out: uint8[num_values * itemsize], at a multiple of the itemsize.

    Returns:
        Whether the streams have no bit that a split would not have set.
    """
    fields = FIELDS[word]
    num_values = out.size // word.itemsize
    is_clean = not any(stream[-1:].any() and extra for stream, extra in _loose_ends(fields, streams, num_values))
    for begin, values in _tiles(out, word):
        signs, exponents, planes = _places(fields, streams, num_values, begin, values.size)
        dtype = values.dtype.type
        if (exponents >> exponents.dtype.type(fields.exponent_bits - 1) > 1).any():
            is_clean = False
        np.copyto(values, exponents)
        values <<= dtype(fields.mantissa_bits)
        if fields.sign_bits:
            values |= _unpacked(signs, 1, values.size).astype(values.dtype) << dtype(8 * word.itemsize - 1)
        at = 0
        for width, plane in zip(fields.widths, planes, strict=True):
            values |= _unpacked(plane, width, values.size).astype(values.dtype) << dtype(at)
            at += width
    return is_clean


def _tiles(octets: _Octets, word: WordType) -> Iterator[tuple[int, _Values]]:
    values = octets.view(f"<u{word.itemsize}")
    for begin in range(0, values.size, _TILE_VALUES):
        yield begin, values[begin : begin + _TILE_VALUES]


def _places(
    fields: Fields, streams: tuple[_Octets, _Octets, _Octets], num_values: int, begin: int, count: int
) -> tuple[_Octets, _Values, list[_Octets]]:
    """Return where in the streams the fields of values begin … begin + count - 1 are."""
    signs, exponents, mantissas = streams
    end = begin + count
    planes, start = [], 0
    for width in fields.widths:
        planes.append(mantissas[start + begin * width // 8 : start + -(-end * width // 8)])
        start += -(-num_values * width // 8)
    here = exponents[begin * fields.exponent_bytes : end * fields.exponent_bytes].view(f"<u{fields.exponent_bytes}")
    return signs[begin // 8 : -(-end // 8)], here, planes


def _loose_ends(
    fields: Fields, streams: tuple[_Octets, _Octets, _Octets], num_values: int
) -> Iterator[tuple[_Octets, bool]]:
    """Yield the last byte of every packed plane, without the bits of values, and whether there can be others."""
    signs, _, mantissas = streams
    start = 0
    for width, stream in ((fields.sign_bits, signs), *((width, mantissas) for width in fields.widths)):
        num_bytes = -(-num_values * width // 8)
        first = 0 if stream is signs else start
        used = num_values * width % 8
        yield stream[first : first + num_bytes][-1:] >> np.uint8(used), used > 0
        start += 0 if stream is signs else num_bytes


def _octets(values: _Values, lowest_bit: int) -> _Octets:
    """Return the byte of every value that begins at a bit."""
    return (values >> values.dtype.type(lowest_bit)).astype(np.uint8)


def _pack(octets: _Octets, width: int, out: _Octets) -> None:
    """Pack the low bits of every byte: value i has bits width × i … of the run."""
    if width == 8:
        np.copyto(out, octets)
        return
    if width == 1:
        np.copyto(out, np.packbits(octets & np.uint8(1), bitorder="little"))
        return
    low = octets & np.uint8((1 << width) - 1)
    out[:] = 0
    for k in range(8 // width):
        row = low[k :: 8 // width]
        out[: row.size] |= row << np.uint8(k * width)


def _unpacked(packed: _Octets, width: int, count: int) -> _Octets:
    """Undo `_pack`: uint8[count]."""
    if width == 8:
        return packed
    if width == 1:
        return np.unpackbits(packed, count=count, bitorder="little")
    out = np.empty(packed.size * (8 // width), dtype=np.uint8)
    for k in range(8 // width):
        np.bitwise_and(packed >> np.uint8(k * width), np.uint8((1 << width) - 1), out=out[k :: 8 // width])
    return out[:count]
