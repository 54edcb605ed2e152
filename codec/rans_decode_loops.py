"""The outer loops of the compiled rans decoder: all segments of a chunk. Needs numba. RANS.md gives the bytes."""

from __future__ import annotations

import numpy as np

from .rans_compile import entry, inner
from .rans_directory import STATES_BYTES, TILE_MAP_BYTES
from .rans_field_loops import join_2, join_4, join_tile, load_plane
from .rans_loops import decode_tile
from .rans_units import CARRIED_BYTES, EMPTY_SYMBOL, NUM_LANES, TILE_BYTES

GOOD = -1
"""What `decode_loop` returns where nothing is wrong."""

_CONSTANT, _CODED = 1, 3
_LOWEST_STATE = 1 << 16


@entry
def decode_loop(
    body,
    entries,
    raw_offsets,
    stream_offsets,
    stream_bytes,
    cuts,
    widths,
    slots,
    log2_sum,
    per_lane,
    tiles_per_segment,
    raw,
):
    """Restore a chunk.

    Args:
        body: View of the body.
        entries: int64[6, S]: kind, table (wide ones counted), coded tiles, whether there is a tile map, tiles, raw
            fields (flag E).
        raw_offsets: int64[S].
        stream_offsets: int64[S].
        stream_bytes: int64[S].
        cuts: uint64[S, 9].
        widths: int64[S, 6].
        slots: uint64[2 * tables, 2**n], of `decode_tile`.
        log2_sum: uint64, n.
        per_lane: k.
        tiles_per_segment: T.
        raw: View of the chunk, written.

    Returns:
        GOOD, or the number of a segment that no writer makes.
    """
    segment_bytes = tiles_per_segment * TILE_BYTES
    octets, out = body[0], raw[0]
    for segment in range(entries.shape[1]):
        place = stream_offsets[segment]
        begin = segment * segment_bytes
        end = min(begin + segment_bytes, out.size)
        if entries[0, segment] == 0:
            out[begin:end] = 0
        elif entries[0, segment] == _CONSTANT:
            for index in range(end - begin):
                out[begin + index] = octets[place + (index & 7)]
        elif not _decode_segment(
            body,
            entries[:, segment],
            raw_offsets[segment],
            place,
            stream_bytes[segment],
            cuts[segment],
            widths[segment],
            slots,
            log2_sum,
            per_lane,
            raw,
            segment * tiles_per_segment,
        ):
            return segment
    return GOOD


@inner
def _decode_segment(
    body, entry, raw_offset, place, stream_bytes, cut, widths, slots, log2_sum, per_lane, raw, first_tile
):
    per_tile, unit_bytes = per_lane * NUM_LANES, 16 // per_lane
    num_values = raw[0].size // unit_bytes
    octets, halves, words = body[0], body[1], body[2]
    kind, table, num_coded, mapped, num_tiles = entry[0], entry[1], entry[2], entry[3], entry[4]
    num_fields = entry[5]
    end = place + stream_bytes
    # One more, because the search below writes a tile before it knows that there is one.
    which = np.empty(num_tiles + 1, dtype=np.int64)
    if not _find_tiles(octets, place, mapped, num_tiles, num_coded, which):
        return False
    if mapped:
        _clear_tiles(raw[0], first_tile, num_tiles, which, num_coded)
        place += TILE_MAP_BYTES
    has_fields = widths[0] > 0 and num_fields == 0
    carried = np.zeros(CARRIED_BYTES, dtype=np.uint8)
    states = np.empty(NUM_LANES, dtype=np.uint64)
    left = 0
    if kind == _CODED:
        if not _first_states(states, words, place >> 2):
            return False
        place += STATES_BYTES
        left = (end - place) >> 1
    else:
        if has_fields:
            carried[:] = octets[place : place + CARRIED_BYTES]
            place += CARRIED_BYTES
    plane_start = raw_offset - CARRIED_BYTES
    second_start = plane_start + 2 * num_coded * per_tile
    fields = np.zeros(per_tile, dtype=np.uint64)
    symbols = np.empty(per_tile, dtype=np.uint8)
    kept, left_fields = _load_sparse(body, raw_offset, num_fields, widths), num_fields
    for back in range(num_coded):
        row = num_coded - 1 - back
        begin = (first_tile + which[row]) * per_tile
        num_units = min(per_tile, num_values - begin)
        if kind == _CODED:
            left = decode_tile(symbols, num_units, per_lane, states, slots[table], log2_sum, halves, place >> 1, left)
            if left < 0:
                return False
            if row == 0 and not _last_states(states, left, has_fields, carried):
                return False
        else:
            symbols[:] = octets[place + row * per_tile : place + (row + 1) * per_tile]
        if num_fields > 0:
            left_fields = _expand(symbols, num_units, kept, left_fields, cut, fields)
            if left_fields < 0 or (row == 0 and left_fields > 0):
                return False
            join_tile(symbols, fields, num_units, cut, raw, unit_bytes, begin)
        elif row > 0 and unit_bytes == 2 and widths[0] == 8:
            join_2(symbols, octets, plane_start + row * per_tile, num_units, raw[1], begin)
        elif row > 0 and unit_bytes == 4 and widths[0] == 16 and widths[1] == 8:
            half_place = (plane_start >> 1) + row * per_tile
            join_4(symbols, halves, half_place, octets, second_start + row * per_tile, num_units, raw[2], begin)
        else:
            _load_fields(body, raw_offset, row, num_coded, widths, per_tile, carried, fields)
            join_tile(symbols, fields, num_units, cut, raw, unit_bytes, begin)
    return True


@inner
def _first_states(states, words, first):
    """Read what decoding starts with; return False if no coder leaves such states."""
    for lane in range(NUM_LANES):
        states[lane] = np.uint64(words[first + lane])
        if states[lane] < np.uint64(_LOWEST_STATE):
            return False
    return True


@inner
def _find_tiles(octets, place, mapped, num_tiles, num_coded, which):
    """List the coded tiles; return False if the tile map is not one of so many."""
    found = 0
    for tile in range(TILE_MAP_BYTES * 8 if mapped else num_tiles):
        if mapped and not (octets[place + (tile >> 3)] >> (tile & 7)) & 1:
            continue
        if tile >= num_tiles or found == num_coded:
            return False
        which[found] = tile
        found += 1
    return found == num_coded


@inner
def _clear_tiles(out, first_tile, num_tiles, which, num_coded):
    row = 0
    for tile in range(num_tiles):
        if row < num_coded and which[row] == tile:
            row += 1
        else:
            out[(first_tile + tile) * TILE_BYTES : (first_tile + tile + 1) * TILE_BYTES] = 0


@inner
def _last_states(states, left, has_fields, carried):
    """Check what decoding ends with, and read the carried bytes."""
    good = left == 0
    limit = np.uint64(2 * _LOWEST_STATE if has_fields else _LOWEST_STATE + 1)
    for lane in range(NUM_LANES):
        x = states[lane]
        good = good and np.uint64(_LOWEST_STATE) <= x and x < limit
        carried[2 * lane] = np.uint8(x & np.uint64(255))
        carried[2 * lane + 1] = np.uint8((x >> np.uint64(8)) & np.uint64(255))
    return good


@inner
def _load_sparse(body, raw_offset, num_fields, widths):
    """Read all raw fields of a segment with the flag E; none without it."""
    kept = np.zeros(num_fields, dtype=np.uint64)
    lowest = 0
    for plane in range(widths.size):
        width = widths[plane]
        if width == 0 or num_fields == 0:
            break
        load_plane(kept, num_fields, width, np.uint64(lowest), body, raw_offset)
        lowest += width
        raw_offset = (raw_offset + num_fields * width // 8 + 15) & ~15
    return kept


@inner
def _expand(symbols, num_units, kept, left, cut, fields):
    """Give the units of a tile their fields, the last unit first; return how many are left, -1 if too few were."""
    zero_symbol, zero_field = np.uint8(cut[1] & np.uint64(255)), ((cut[1] >> np.uint64(8)) & cut[5]) << cut[4]
    for back in range(num_units):
        index = num_units - 1 - back
        if symbols[index] == EMPTY_SYMBOL:
            symbols[index], fields[index] = zero_symbol, zero_field
        else:
            left -= 1
            if left < 0:
                return -1
            fields[index] = kept[left]
    return left


@inner
def _load_fields(body, raw_offset, row, num_coded, widths, per_tile, carried, fields):
    plane_start = raw_offset - CARRIED_BYTES
    lowest = 0
    for plane in range(widths.size):
        width = widths[plane]
        if width == 0:
            break
        tile_bytes = per_tile * width // 8
        if row == 0 and plane == 0:
            first = np.empty(4 * per_tile, dtype=np.uint8)
            first[:CARRIED_BYTES] = carried
            first[CARRIED_BYTES:tile_bytes] = body[0][raw_offset : plane_start + tile_bytes]
            view = (first, first.view(np.uint16), first.view(np.uint32), first.view(np.uint64))
            load_plane(fields, per_tile, width, np.uint64(0), view, 0)
        else:
            load_plane(fields, per_tile, width, np.uint64(lowest), body, plane_start + row * tile_bytes)
        lowest += width
        plane_start = (plane_start + num_coded * tile_bytes + 15) & ~15
