"""The raw side of the compiled rans coder: units to symbols and fields, fields to planes, and back. Needs numba.

A *view* is one piece of memory as a tuple of arrays of its 1-, 2-, 4- and 8-byte words. Two cuts, which nearly all
values have, are done straight from unit to plane: 8 bits beside a 2-byte unit's symbol, 16 and 8 beside a 4-byte one's.
"""

from __future__ import annotations

import numpy as np

from .rans_compile import inner


@inner
def split_tile(view, unit_bytes, begin, num_units, cut, symbols, fields):
    """Do `split_units` on units of any width: `view` is the chunk's."""
    if unit_bytes == 1:
        symbols[:num_units] = view[0][begin : begin + num_units]
    elif unit_bytes == 2:
        split_units(view[1], begin, num_units, cut, symbols, fields)
    elif unit_bytes == 4:
        split_units(view[2], begin, num_units, cut, symbols, fields)
    else:
        split_units(view[3], begin, num_units, cut, symbols, fields)


@inner
def join_tile(symbols, fields, num_units, cut, view, unit_bytes, begin):
    """Do `join_units` on units of any width: `view` is the chunk's."""
    if unit_bytes == 1:
        view[0][begin : begin + num_units] = symbols[:num_units]
    elif unit_bytes == 2:
        join_units(symbols, fields, num_units, cut, view[1], begin)
    elif unit_bytes == 4:
        join_units(symbols, fields, num_units, cut, view[2], begin)
    else:
        join_units(symbols, fields, num_units, cut, view[3], begin)


# Slices, because the compiler makes vector instructions of a loop only where no index can be negative.


@inner
def split_2(values, begin, num_units, symbols, octets, place):
    """Cut 2-byte units into symbols and their plane of 8 bits at byte `place`."""
    own, plane = values[begin : begin + num_units], octets[place : place + num_units]
    for index in range(num_units):
        symbols[index] = np.uint8(own[index] >> 7)
    for index in range(num_units):
        plane[index] = np.uint8((own[index] & 127) | ((own[index] >> 8) & 128))


@inner
def join_2(symbols, octets, place, num_units, values, begin):
    """Undo `split_2`."""
    own, plane = values[begin : begin + num_units], octets[place : place + num_units]
    for index in range(num_units):
        octet = np.uint32(plane[index])
        own[index] = np.uint16((np.uint32(symbols[index]) << 7) | (octet & 127) | ((octet & 128) << 8))


@inner
def split_4(values, begin, num_units, symbols, halves, half_place, octets, place):
    """Cut 4-byte units into symbols, their plane of 16 bits at 2-byte word `half_place`, and that of 8 at `place`."""
    own, plane = values[begin : begin + num_units], octets[place : place + num_units]
    half_plane = halves[half_place : half_place + num_units]
    for index in range(num_units):
        value = own[index]
        symbols[index] = np.uint8(value >> 23)
        half_plane[index] = np.uint16(value & 0xFFFF)
        plane[index] = np.uint8(((value >> 16) & 127) | ((value >> 24) & 128))


@inner
def join_4(symbols, halves, half_place, octets, place, num_units, values, begin):
    """Undo `split_4`."""
    own, plane = values[begin : begin + num_units], octets[place : place + num_units]
    half_plane = halves[half_place : half_place + num_units]
    for index in range(num_units):
        octet = np.uint32(plane[index])
        high = ((octet & 128) << 24) | ((octet & 127) << 16)
        own[index] = np.uint32((np.uint32(symbols[index]) << 23) | high | np.uint32(half_plane[index]))


@inner
def split_units(values, begin, num_units, cut, symbols, fields):
    """Cut units into symbols (uint8[num_units]) and fields (uint64[num_units]).

    Args:
        values: The chunk as units.
        begin: The first unit of the tile.
        num_units: Units that exist.
        cut: uint64[9], the numbers of `rans_numba`.
        symbols: Written.
        fields: Written.
    """
    mantissa, shift, exponent = cut[0], cut[1], cut[2]
    dropped, high_place, high_mask, sign_place, sign_mask = cut[3], cut[4], cut[5], cut[6], cut[7]
    low_mask = (np.uint64(1) << mantissa) - np.uint64(1)
    own = values[begin : begin + num_units]
    for index in range(num_units):
        value = np.uint64(own[index])
        top = value >> mantissa
        moved = top + shift
        symbols[index] = np.uint8(moved & np.uint64(255))
        field = (value & low_mask) >> dropped
        field |= ((moved >> np.uint64(8)) & high_mask) << high_place
        field |= ((top >> exponent) & sign_mask) << sign_place
        fields[index] = field


@inner
def join_units(symbols, fields, num_units, cut, values, begin):
    """Undo `split_units`; the last number of `cut` is the sign bit that all units have where fields have none."""
    mantissa, shift, exponent = cut[0], cut[1], cut[2]
    dropped, high_place, high_mask, sign_place, sign_mask, sign = cut[3], cut[4], cut[5], cut[6], cut[7], cut[8]
    one = np.uint64(1)
    low_mask = (one << high_place) - one
    exponent_mask = (one << exponent) - one
    own = values[begin : begin + num_units]
    for index in range(num_units):
        field = fields[index]
        moved = np.uint64(symbols[index]) | (((field >> high_place) & high_mask) << np.uint64(8))
        value = ((moved - shift) & exponent_mask) << mantissa
        value |= (field & low_mask) << dropped
        value |= (((field >> sign_place) & sign_mask) | sign) << (mantissa + exponent)
        own[index] = value


@inner
def store_plane(fields, num_units, width, lowest, view, place):
    """Write one plane of a tile at byte `place` of a view."""
    if width == 32:
        _store_whole(fields, lowest, view[2][place >> 2 : (place >> 2) + num_units])
    elif width == 16:
        _store_whole(fields, lowest, view[1][place >> 1 : (place >> 1) + num_units])
    elif width == 8:
        _store_whole(fields, lowest, view[0][place : place + num_units])
    elif width == 4:
        _store_parts(fields, 4, lowest, view[0][place : place + num_units // 2])
    elif width == 2:
        _store_parts(fields, 2, lowest, view[0][place : place + num_units // 4])
    else:
        _store_parts(fields, 1, lowest, view[0][place : place + num_units // 8])


@inner
def _store_whole(fields, lowest, plane):
    for index in range(plane.size):
        plane[index] = fields[index] >> lowest


@inner
def _store_parts(fields, width, lowest, plane):
    # Called with a number for `width`, so that the compiler unrolls the inner loop.
    each = np.uint64(8 // width)
    mask = np.uint64((1 << width) - 1)
    for index in range(plane.size):
        octet = np.uint64(0)
        for part in range(8 // width):
            field = fields[np.uint64(index) * each + np.uint64(part)]
            octet |= ((field >> lowest) & mask) << np.uint64(width * part)
        plane[index] = np.uint8(octet)


@inner
def load_plane(fields, num_units, width, lowest, view, place):
    """Put one plane of a tile into the fields; the plane with the lowest bits comes first."""
    if width == 32:
        _load_whole(fields, lowest, view[2][place >> 2 : (place >> 2) + num_units])
    elif width == 16:
        _load_whole(fields, lowest, view[1][place >> 1 : (place >> 1) + num_units])
    elif width == 8:
        _load_whole(fields, lowest, view[0][place : place + num_units])
    elif width == 4:
        _load_parts(fields, 4, lowest, view[0][place : place + num_units // 2])
    elif width == 2:
        _load_parts(fields, 2, lowest, view[0][place : place + num_units // 4])
    else:
        _load_parts(fields, 1, lowest, view[0][place : place + num_units // 8])


@inner
def _load_whole(fields, lowest, plane):
    keep = (np.uint64(1) << lowest) - np.uint64(1)
    for index in range(plane.size):
        fields[index] = (fields[index] & keep) | (np.uint64(plane[index]) << lowest)


@inner
def _load_parts(fields, width, lowest, plane):
    each = np.uint64(8 // width)
    mask = np.uint64((1 << width) - 1)
    keep = (np.uint64(1) << lowest) - np.uint64(1)
    for index in range(plane.size):
        octet = np.uint64(plane[index])
        for part in range(8 // width):
            place = np.uint64(index) * each + np.uint64(part)
            own = (octet >> np.uint64(width * part)) & mask
            fields[place] = (fields[place] & keep) | (own << lowest)
