"""The inner loops of the compiled rans coder: the symbols of one tile at a time. Needs numba. RANS.md gives the steps.

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
