"""The outer loops of the compiled rans encoder: all segments of a chunk. Needs numba. RANS.md gives the bytes."""

from __future__ import annotations

import numpy as np

from .rans_compile import entry, inner
from .rans_directory import CONSTANT_BYTES, STATES_BYTES, TILE_MAP_BYTES
from .rans_field_loops import split_2, split_4, split_tile, store_plane
from .rans_loops import encode_tile
from .rans_units import CARRIED_BYTES, EMPTY_SYMBOL, NUM_LANES, TILE_BYTES

_CONSTANT, _PLAIN = 1, 2
_LOWEST_STATE = 1 << 16


@entry
def encode_loop(raw, coded, entries, raw_offsets, cuts, widths, ranges, reciprocals, log2_sum, per_lane, place, body):
    """Write raw region and stream region.

    Args:
        raw: View of the chunk.
        coded: bool[S, T], the tile maps.
        entries: int64[6, S]: kind, table, wide, coded tiles, stream bytes, raw fields (flag E); changed.
        raw_offsets: int64[S].
        cuts: uint64[S, 9].
        widths: int64[S, 6].
        ranges: uint64[2 * tables, 256], of `encode_tile`.
        reciprocals: uint64[2 * tables, 256], of `encode_tile`.
        log2_sum: uint64, n.
        per_lane: k.
        place: Where the stream region starts.
        body: View of the body.

    Returns:
        The end of the body, or -1 if it does not fit.
    """
    tiles_per_segment = coded.shape[1]
    per_tile = per_lane * NUM_LANES
    # A tile that starts below what plain takes is coded to its end, so there is room for one more.
    octets = body[0]
    scratch = np.empty(tiles_per_segment * per_tile // 2 + per_tile + 64, dtype=np.uint16)
    for segment in range(entries.shape[1]):
        kind = entries[0, segment]
        first_byte = segment * tiles_per_segment * TILE_BYTES
        if kind == 0:
            continue
        if place + CONSTANT_BYTES > octets.size:
            return -1
        if kind == _CONSTANT:
            for index in range(16):
                if place + index < octets.size:
                    octets[place + index] = 0
            for index in range(min(CONSTANT_BYTES, raw[0].size - first_byte)):
                octets[place + index] = raw[0][first_byte + index]
            entries[4, segment] = CONSTANT_BYTES
            place += 16
            continue
        num_bytes = _encode_segment(
            raw,
            coded[segment],
            segment,
            entries,
            raw_offsets[segment],
            cuts[segment],
            widths[segment],
            ranges,
            reciprocals,
            log2_sum,
            per_lane,
            place,
            body,
            scratch,
        )
        if num_bytes < 0:
            return -1
        entries[4, segment] = num_bytes
        place += num_bytes
        while place & 15:
            if place < octets.size:
                octets[place] = 0
            place += 1
    return place if place <= octets.size else -1


@inner
def _encode_segment(
    raw,
    coded,
    segment,
    entries,
    raw_offset,
    cut,
    widths,
    ranges,
    reciprocals,
    log2_sum,
    per_lane,
    place,
    body,
    scratch,
):
    octets, halves, words = body[0], body[1], body[2]
    num_values = raw[0].size * per_lane // 16
    per_tile = per_lane * NUM_LANES
    first_unit = segment * coded.size * per_tile
    num_coded = entries[3, segment]
    table = 2 * entries[1, segment]
    num_fields = entries[5, segment]
    has_carried = widths[0] > 0 and num_fields == 0
    begin = place
    num_tiles = min(coded.size, -((first_unit - num_values) // per_tile))
    if num_coded < num_tiles:
        if place + TILE_MAP_BYTES > octets.size:
            return -1
        _write_map(coded[:num_tiles], octets[place : place + TILE_MAP_BYTES])
        place += TILE_MAP_BYTES
    plain_bytes = num_coded * per_tile + (CARRIED_BYTES if has_carried else 0)
    carried = np.zeros(CARRIED_BYTES, dtype=np.uint8)
    words_limit = (plain_bytes - STATES_BYTES + 1) // 2
    symbols = np.empty(num_coded * per_tile, dtype=np.uint8)
    if num_fields > 0:
        _split_sparse(raw, first_unit, coded, num_tiles, num_fields, raw_offset, cut, widths, per_lane, body, symbols)
    else:
        _split_segment(
            raw, first_unit, coded, num_tiles, num_coded, raw_offset, cut, widths, per_lane, body, symbols, carried
        )
    missing = max(0, first_unit + num_tiles * per_tile - num_values) if coded[num_tiles - 1] else 0
    num_existing = symbols.size - missing
    wide = _lacks_one(symbols[:num_existing], ranges[table])
    own_ranges, own_reciprocals = ranges[table + wide], reciprocals[table + wide]
    states = np.empty(NUM_LANES, dtype=np.uint64)
    for lane in range(NUM_LANES):
        states[lane] = np.uint64(_LOWEST_STATE + carried[2 * lane] + 256 * np.int64(carried[2 * lane + 1]))
    num_words = 0
    for tile in range(num_coded):
        if num_words >= words_limit:
            break
        own = symbols[tile * per_tile : (tile + 1) * per_tile]
        num_units = min(per_tile, num_existing - tile * per_tile)
        num_words = encode_tile(
            own, num_units, per_lane, states, own_ranges, own_reciprocals, log2_sum, scratch, num_words
        )
    if num_words < words_limit:
        entries[2, segment] = wide
        num_bytes = STATES_BYTES + 2 * num_words
        if place + num_bytes > octets.size:
            return -1
        for lane in range(NUM_LANES):
            words[(place >> 2) + lane] = np.uint32(states[lane])
        halves[(place + STATES_BYTES) >> 1 : (place + num_bytes) >> 1] = scratch[:num_words]
        return place + num_bytes - begin
    entries[0, segment], entries[1, segment] = _PLAIN, 0
    if place + plain_bytes > octets.size:
        return -1
    octets[place : place + plain_bytes - symbols.size] = carried[: plain_bytes - symbols.size]
    octets[place + plain_bytes - symbols.size : place + plain_bytes] = symbols
    return place + plain_bytes - begin


@inner
def _write_map(coded, octets):
    octets[:] = 0
    for tile in range(coded.size):
        if coded[tile]:
            octets[tile >> 3] |= np.uint8(1 << (tile & 7))


@inner
def _lacks_one(symbols, ranges):
    """Return 1 if a symbol has the frequency 0, else 0."""
    for index in range(symbols.size):
        if ranges[symbols[index]] & np.uint64(0xFFFFFFFF) == np.uint64(0):
            return 1
    return 0


@inner
def _split_segment(
    raw, first_unit, coded, num_tiles, num_coded, raw_offset, cut, widths, per_lane, body, symbols, carried
):
    """Write the raw area; fill in symbols (uint8[num_coded * per_tile]) and carried (uint8[64])."""
    per_tile, unit_bytes = per_lane * NUM_LANES, 16 // per_lane
    num_values = raw[0].size // unit_bytes
    fields = np.zeros(per_tile, dtype=np.uint64)
    plane_start = raw_offset - CARRIED_BYTES
    # The second plane of a 4-byte unit of 24 bits; a plane of 2 bytes over whole tiles needs no padding.
    second_start = plane_start + 2 * num_coded * per_tile
    row = 0
    for tile in range(num_tiles):
        if not coded[tile]:
            continue
        begin = first_unit + tile * per_tile
        num_units = min(per_tile, num_values - begin)
        own = symbols[row * per_tile : (row + 1) * per_tile]
        if num_units < per_tile:
            fields[:] = 0
            own[:] = 0
        if row > 0 and num_units == per_tile and unit_bytes == 2 and widths[0] == 8:
            split_2(raw[1], begin, num_units, own, body[0], plane_start + row * per_tile)
        elif row > 0 and num_units == per_tile and unit_bytes == 4 and widths[0] == 16 and widths[1] == 8:
            half_place = (plane_start >> 1) + row * per_tile
            split_4(raw[2], begin, num_units, own, body[1], half_place, body[0], second_start + row * per_tile)
        else:
            split_tile(raw, unit_bytes, begin, num_units, cut, own, fields)
            _store_fields(fields, per_tile, widths, raw_offset, row, num_coded, body, carried)
        row += 1


@inner
def _split_sparse(raw, first_unit, coded, num_tiles, num_fields, raw_offset, cut, widths, per_lane, body, symbols):
    """Do what `_split_segment` does where units of 0 have a symbol of their own and no field."""
    per_tile, unit_bytes = per_lane * NUM_LANES, 16 // per_lane
    num_values = raw[0].size // unit_bytes
    zero_symbol, zero_field = cut[1] & np.uint64(255), ((cut[1] >> np.uint64(8)) & cut[5]) << cut[4]
    fields = np.zeros(per_tile, dtype=np.uint64)
    kept = np.empty(num_fields, dtype=np.uint64)
    row, num_kept = 0, 0
    for tile in range(num_tiles):
        if not coded[tile]:
            continue
        begin = first_unit + tile * per_tile
        num_units = min(per_tile, num_values - begin)
        own = symbols[row * per_tile : (row + 1) * per_tile]
        own[num_units:] = 0
        split_tile(raw, unit_bytes, begin, num_units, cut, own, fields)
        for index in range(num_units):
            if fields[index] == zero_field and np.uint64(own[index]) == zero_symbol:
                own[index] = EMPTY_SYMBOL
            else:
                kept[num_kept] = fields[index]
                num_kept += 1
        row += 1
    lowest = 0
    for plane in range(widths.size):
        width = widths[plane]
        if width == 0:
            break
        store_plane(kept, num_fields, width, np.uint64(lowest), body, raw_offset)
        lowest += width
        raw_offset += num_fields * width // 8
        while raw_offset & 15:
            body[0][raw_offset] = 0
            raw_offset += 1


@inner
def _store_fields(fields, per_tile, widths, raw_offset, row, num_coded, body, carried):
    octets = body[0]
    plane_start = raw_offset - CARRIED_BYTES
    lowest = 0
    for plane in range(widths.size):
        width = widths[plane]
        if width == 0:
            break
        tile_bytes = per_tile * width // 8
        if row == 0 and plane == 0:
            first = np.empty(4 * per_tile, dtype=np.uint8)
            view = (first, first.view(np.uint16), first.view(np.uint32), first.view(np.uint64))
            store_plane(fields, per_tile, width, np.uint64(0), view, 0)
            carried[:] = first[:CARRIED_BYTES]
            octets[raw_offset : plane_start + tile_bytes] = first[CARRIED_BYTES:tile_bytes]
        else:
            store_plane(fields, per_tile, width, np.uint64(lowest), body, plane_start + row * tile_bytes)
        lowest += width
        plane_start += num_coded * tile_bytes
        while plane_start & 15:
            octets[plane_start] = 0
            plane_start += 1
