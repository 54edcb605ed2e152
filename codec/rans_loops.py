"""The inner loops of the compiled rans coder: one tile at a time. Needs numba. RANS.md gives the steps and the bits.

Everything that can reach 2**63 is uint64; numba makes a float of a sum of uint64 and int64, so the two are kept apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile a function at its first call, without the GIL, and keep the machine code where that is possible."""
    try:
        made: _Function = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        # No folder can be written: it is compiled again in every process.
        made = numba.njit(nogil=True)(function)
    return made


@compiled
def count_loop(symbols, counts):  # type: ignore[no-untyped-def]
    """Add up symbols: counts is int64[4, 256], so that equal neighbours do not wait for each other."""
    quarter = symbols.size // 4
    for index in range(quarter):
        place = 4 * index
        counts[0, symbols[place]] += 1
        counts[1, symbols[place + 1]] += 1
        counts[2, symbols[place + 2]] += 1
        counts[3, symbols[place + 3]] += 1
    for place in range(4 * quarter, symbols.size):
        counts[0, symbols[place]] += 1


@compiled
def split_tile(values, begin, num_units, cut, symbols, fields):  # type: ignore[no-untyped-def]
    """Cut units into symbols (uint8[num_units]) and fields (uint64[num_units]); `cut` is that of `cut_numbers`."""
    mantissa, shift, exponent = cut[0], cut[1], cut[2]
    dropped, high_place, high_mask, sign_place, sign_mask = cut[3], cut[4], cut[5], cut[6], cut[7]
    low_mask = (np.uint64(1) << mantissa) - np.uint64(1)
    for index in range(num_units):
        value = np.uint64(values[begin + index])
        top = value >> mantissa
        moved = top + shift
        symbols[index] = np.uint8(moved & np.uint64(255))
        field = (value & low_mask) >> dropped
        field |= ((moved >> np.uint64(8)) & high_mask) << high_place
        field |= ((top >> exponent) & sign_mask) << sign_place
        fields[index] = field


@compiled
def join_tile(symbols, fields, num_units, cut, values, begin):  # type: ignore[no-untyped-def]
    """Undo `split_tile`; the last number of `cut` is the sign bit that all units have where fields have none."""
    mantissa, shift, exponent = cut[0], cut[1], cut[2]
    dropped, high_place, high_mask, sign_place, sign_mask, sign = cut[3], cut[4], cut[5], cut[6], cut[7], cut[8]
    one = np.uint64(1)
    low_mask = (one << high_place) - one
    exponent_mask = (one << exponent) - one
    for index in range(num_units):
        field = fields[index]
        moved = np.uint64(symbols[index]) | (((field >> high_place) & high_mask) << np.uint64(8))
        value = ((moved - shift) & exponent_mask) << mantissa
        value |= (field & low_mask) << dropped
        value |= (((field >> sign_place) & sign_mask) | sign) << (mantissa + exponent)
        values[begin + index] = value


@compiled
def store_plane(fields, num_units, width, lowest, octets, halves, words, place):  # type: ignore[no-untyped-def]
    """Write one plane of a tile at byte `place` of memory seen as bytes, 2-byte and 4-byte words."""
    if width == 32:
        for index in range(num_units):
            words[(place >> 2) + index] = np.uint32((fields[index] >> lowest) & np.uint64(0xFFFFFFFF))
    elif width == 16:
        for index in range(num_units):
            halves[(place >> 1) + index] = np.uint16((fields[index] >> lowest) & np.uint64(0xFFFF))
    elif width == 8:
        for index in range(num_units):
            octets[place + index] = np.uint8((fields[index] >> lowest) & np.uint64(0xFF))
    else:
        each = 8 // width
        mask = np.uint64((1 << width) - 1)
        for index in range(num_units // each):
            octet = np.uint64(0)
            for part in range(each):
                octet |= ((fields[each * index + part] >> lowest) & mask) << np.uint64(width * part)
            octets[place + index] = np.uint8(octet)


@compiled
def load_plane(fields, num_units, width, lowest, octets, halves, words, place):  # type: ignore[no-untyped-def]
    """Put one plane of a tile into the fields; the plane with the lowest bits comes first."""
    if width >= 8:
        if lowest == 0:
            for index in range(num_units):
                fields[index] = np.uint64(0)
        if width == 32:
            for index in range(num_units):
                fields[index] |= np.uint64(words[(place >> 2) + index]) << lowest
        elif width == 16:
            for index in range(num_units):
                fields[index] |= np.uint64(halves[(place >> 1) + index]) << lowest
        else:
            for index in range(num_units):
                fields[index] |= np.uint64(octets[place + index]) << lowest
    else:
        each = 8 // width
        mask = np.uint64((1 << width) - 1)
        keep = (np.uint64(1) << lowest) - np.uint64(1)
        for index in range(num_units // each):
            octet = np.uint64(octets[place + index])
            for part in range(each):
                own = (octet >> np.uint64(width * part)) & mask
                fields[each * index + part] = (fields[each * index + part] & keep) | (own << lowest)


@compiled
def encode_tile(symbols, num_units, per_lane, states, table, log2_sum, words, num_words):  # type: ignore[no-untyped-def]
    """Code the units of a tile and return how many words there are then.

    Args:
        symbols: uint8[num_units].
        num_units: Units that exist.
        per_lane: k.
        states: uint64[32], changed.
        table: uint64[3, 256]: frequency, start, and 2**(32 + n) / frequency rounded up.
        log2_sum: uint64, n.
        words: uint16[at least num_words + num_units], changed.
        num_words: Words so far.
    """
    threshold_shift = np.uint64(32) - log2_sum
    quotient_shift = np.uint64(32) + log2_sum
    total_sum = np.uint64(1) << log2_sum
    for step in range(per_lane):
        num_lanes = min(32, (num_units - step + per_lane - 1) // per_lane)
        for lane in range(num_lanes):
            symbol = symbols[lane * per_lane + step]
            frequency = table[0, symbol]
            x = states[lane]
            full = np.uint64((x >> threshold_shift) >= frequency)
            words[num_words] = np.uint16(x & np.uint64(0xFFFF))
            num_words += np.int64(full)
            x >>= full << np.uint64(4)
            quotient = (x * table[2, symbol]) >> quotient_shift
            states[lane] = x + quotient * (total_sum - frequency) + table[1, symbol]
    return num_words


@compiled
def decode_tile(  # type: ignore[no-untyped-def]
    symbols, num_units, per_lane, states, slots, table, log2_sum, words, first, left
):
    """Decode the units of a tile and return how many words are left: -1 if there were too few.

    Args:
        symbols: uint8[512], written.
        num_units: Units that exist.
        per_lane: k.
        states: uint64[32], changed.
        slots: uint8[2**n], the symbol of each slot.
        table: uint64[3, 256], of which the first two rows: frequency and start.
        log2_sum: uint64, n.
        words: uint16, the body.
        first: Where the segment's words start in it.
        left: Words that were not yet taken.
    """
    mask = (np.uint64(1) << log2_sum) - np.uint64(1)
    for back in range(per_lane):
        step = per_lane - 1 - back
        num_lanes = min(32, (num_units - step + per_lane - 1) // per_lane)
        if left < 32:
            left = _decode_careful(symbols, step, num_lanes, per_lane, states, slots, table, log2_sum, words, first, left)
            if left < 0:
                return left
            continue
        place = first + left - 1
        for lane_back in range(num_lanes):
            lane = num_lanes - 1 - lane_back
            x = states[lane]
            slot = x & mask
            symbol = slots[slot]
            symbols[lane * per_lane + step] = symbol
            x = (table[0, symbol] * (x >> log2_sum) + slot - table[1, symbol]) & np.uint64(0xFFFFFFFF)
            need = np.uint64(x < np.uint64(65536))
            x = (x << (need << np.uint64(4))) | (np.uint64(words[place]) & (np.uint64(0) - need))
            place -= np.int64(need)
            states[lane] = x
        left = place + 1 - first
    return left


@compiled
def _decode_careful(  # type: ignore[no-untyped-def]
    symbols, step, num_lanes, per_lane, states, slots, table, log2_sum, words, first, left
):
    """Decode one step where the words may not be enough for it."""
    mask = (np.uint64(1) << log2_sum) - np.uint64(1)
    for lane_back in range(num_lanes):
        lane = num_lanes - 1 - lane_back
        x = states[lane]
        slot = x & mask
        symbol = slots[slot]
        symbols[lane * per_lane + step] = symbol
        x = (table[0, symbol] * (x >> log2_sum) + slot - table[1, symbol]) & np.uint64(0xFFFFFFFF)
        if x < np.uint64(65536):
            left -= 1
            if left < 0:
                return -1
            x = (x << np.uint64(16)) | np.uint64(words[first + left])
        states[lane] = x
    return left
