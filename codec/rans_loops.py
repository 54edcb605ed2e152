"""The inner loops of the compiled rans coder: the symbols of one tile at a time. Needs numba. RANS.md gives the steps.

Everything that can reach 2**63 is uint64; numba makes a float of a sum of uint64 and int64, so the two are kept apart.
"""

from __future__ import annotations

import numpy as np

from .rans_compile import entry, inner
from .rans_units import NUM_LANES


@entry
def count_loop(symbols, groups, counts):
    """Add up the rows of symbols, uint8[rows, n], of each group: int64[rows], into int64[groups, 256]."""
    # Four counters of a symbol, so that equal neighbours do not wait for each other.
    parts = np.zeros((4, counts.shape[1]), dtype=np.int64)
    num_rows, width = symbols.shape
    quarter = width // 4
    for row in range(num_rows):
        for index in range(quarter):
            place = 4 * index
            parts[0, symbols[row, place]] += 1
            parts[1, symbols[row, place + 1]] += 1
            parts[2, symbols[row, place + 2]] += 1
            parts[3, symbols[row, place + 3]] += 1
        for place in range(4 * quarter, width):
            parts[0, symbols[row, place]] += 1
        if row + 1 == num_rows or groups[row + 1] != groups[row]:
            own = counts[groups[row]]
            for symbol in range(own.size):
                own[symbol] += parts[0, symbol] + parts[1, symbol] + parts[2, symbol] + parts[3, symbol]
            parts[:] = 0


@inner
def encode_tile(symbols, num_units, per_lane, states, ranges, reciprocals, log2_sum, words, num_words):
    """Code the units of a tile and return how many words there are then.

    Args:
        symbols: uint8[32 * per_lane].
        num_units: Units that exist.
        per_lane: k.
        states: uint64[32], changed.
        ranges: uint64[256], of each symbol: start << 32 | frequency.
        reciprocals: uint64[256], 2**(32 + n) / frequency rounded up. A state is below frequency * 2**(32 - n) when it
            is divided, so that the upper 32 - n bits of this product are the quotient, exactly.
        log2_sum: uint64, n.
        words: uint16[at least num_words + num_units], changed.
        num_words: Words so far.
    """
    for step in range(per_lane):
        if num_units == NUM_LANES * per_lane:
            # A number that the compiler knows makes this loop a fifth faster.
            for lane in range(NUM_LANES):
                num_words = _push(
                    symbols[np.uint64(lane * per_lane + step)],
                    np.uint64(lane),
                    states,
                    ranges,
                    reciprocals,
                    log2_sum,
                    words,
                    num_words,
                )
        else:
            for lane in range((num_units - step + per_lane - 1) // per_lane):
                num_words = _push(
                    symbols[np.uint64(lane * per_lane + step)],
                    np.uint64(lane),
                    states,
                    ranges,
                    reciprocals,
                    log2_sum,
                    words,
                    num_words,
                )
    return num_words


@inner
def _push(symbol, lane, states, ranges, reciprocals, log2_sum, words, num_words):
    x, both = states[lane], ranges[symbol]
    frequency = both & np.uint64(0xFFFFFFFF)
    full = np.uint64((x >> (np.uint64(32) - log2_sum)) >= frequency)
    # Written always and counted if it was due: a branch would be mispredicted every few symbols.
    words[np.uint64(num_words)] = np.uint16(x & np.uint64(0xFFFF))
    x >>= full << np.uint64(4)
    quotient = (x * reciprocals[symbol]) >> (np.uint64(32) + log2_sum)
    states[lane] = x + quotient * ((np.uint64(1) << log2_sum) - frequency) + (both >> np.uint64(32))
    return num_words + np.int64(full)


@inner
def decode_tile(symbols, num_units, per_lane, states, slots, log2_sum, words, first, left):
    """Decode the units of a tile and return how many words are left: -1 if there were too few.

    Args:
        symbols: uint8[32 * per_lane], written.
        num_units: Units that exist.
        per_lane: k.
        states: uint64[32], changed.
        slots: uint64[2**n], of each slot: frequency << 32 | (slot - start) << 8 | symbol.
        log2_sum: uint64, n.
        words: uint16, the body.
        first: Where the segment's words start in it.
        left: Words that were not yet taken.
    """
    for back in range(per_lane):
        step = per_lane - 1 - back
        if num_units == NUM_LANES * per_lane and left >= NUM_LANES:
            last = first + left - 1
            for lane_back in range(NUM_LANES):
                lane = NUM_LANES - 1 - lane_back
                x = _pop(symbols, lane * per_lane + step, states[np.uint64(lane)], slots, log2_sum)
                need = np.uint64(x < np.uint64(65536))
                # Read always and taken if it is due, as above; there are enough for all lanes.
                word = np.uint64(words[np.uint64(last)])
                states[np.uint64(lane)] = (x << (need << np.uint64(4))) | (word & (np.uint64(0) - need))
                last -= np.int64(need)
            left = last + 1 - first
        else:
            num_lanes = min(NUM_LANES, (num_units - step + per_lane - 1) // per_lane)
            for lane_back in range(num_lanes):
                lane = num_lanes - 1 - lane_back
                x = _pop(symbols, lane * per_lane + step, states[lane], slots, log2_sum)
                if x < np.uint64(65536):
                    left -= 1
                    if left < 0:
                        return -1
                    x = (x << np.uint64(16)) | np.uint64(words[first + left])
                states[lane] = x
    return left


@inner
def _pop(symbols, place, x, slots, log2_sum):
    entry = slots[x & ((np.uint64(1) << log2_sum) - np.uint64(1))]
    symbols[np.uint64(place)] = np.uint8(entry & np.uint64(0xFF))
    # The cut matters for damaged states only: a state has 32 bits, whatever the words were.
    grown = (entry >> np.uint64(32)) * (x >> log2_sum) + ((entry >> np.uint64(8)) & np.uint64(0xFFFF))
    return grown & np.uint64(0xFFFFFFFF)
