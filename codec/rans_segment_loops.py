"""The outer loops of the compiled rans coder: all segments of a chunk. Needs numba. RANS.md gives the bytes."""

from __future__ import annotations

import numpy as np

from .rans_directory import CONSTANT_BYTES, STATES_BYTES, TILE_MAP_BYTES
from .rans_loops import compiled, decode_tile, encode_tile, join_tile, load_plane, split_tile, store_plane
from .rans_units import CARRIED_BYTES, NUM_LANES, TILE_BYTES

GOOD = -1
"""What `decode_loop` returns where nothing is wrong."""

_CONSTANT, _PLAIN, _CODED = 1, 2, 3
_LOWEST_STATE = 1 << 16


@compiled
def encode_loop(  # type: ignore[no-untyped-def]
    raw, values, coded, entries, raw_offsets, cuts, widths, tables, log2_sum, per_lane, place, octets, halves, words
):
    """Write raw region and stream region.

    Args:
        raw: uint8[raw_bytes], the chunk.
        values: Its units.
        coded: bool[S, T], the tile maps.
        entries: int64[5, S]: kind, table, wide, coded tiles, stream bytes; changed.
        raw_offsets: int64[S].
        cuts: uint64[S, 9].
        widths: int64[S, 6].
        tables: uint64[2 * tables, 3, 256].
        log2_sum: uint64, n.
        per_lane: k.
        place: Where the stream region starts.
        octets: uint8[room], the body; `halves` and `words` are the same memory in words of 2 and 4 bytes.

    Returns:
        The end of the body, or -1 if it does not fit.
    """
    tiles_per_segment = coded.shape[1]
    per_tile = per_lane * NUM_LANES
    # A tile that starts below what plain takes is coded to its end, so there is room for one more.
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
            for index in range(min(CONSTANT_BYTES, raw.size - first_byte)):
                octets[place + index] = raw[first_byte + index]
            entries[4, segment] = CONSTANT_BYTES
            place += 16
            continue
        num_bytes = _encode_segment(
            values, coded[segment], segment, entries, raw_offsets[segment], cuts[segment], widths[segment], tables,
            log2_sum, per_lane, place, octets, halves, words, scratch,
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


@compiled
def _encode_segment(  # type: ignore[no-untyped-def]
    values, coded, segment, entries, raw_offset, cut, widths, tables, log2_sum, per_lane, place, octets, halves, words,
    scratch,
):
    per_tile = per_lane * NUM_LANES
    first_unit = segment * coded.size * per_tile
    num_coded = entries[3, segment]
    table = 2 * entries[1, segment]
    has_fields = widths[0] > 0
    begin = place
    num_tiles = min(coded.size, -((first_unit - values.size) // per_tile))
    if num_coded < num_tiles:
        if place + TILE_MAP_BYTES > octets.size:
            return -1
        for index in range(TILE_MAP_BYTES):
            octets[place + index] = 0
        for tile in range(num_tiles):
            if coded[tile]:
                octets[place + (tile >> 3)] |= np.uint8(1 << (tile & 7))
        place += TILE_MAP_BYTES
    plain_bytes = num_coded * per_tile + (CARRIED_BYTES if has_fields else 0)
    carried = np.zeros(CARRIED_BYTES, dtype=np.uint8)
    words_limit = (plain_bytes - STATES_BYTES + 1) // 2
    symbols = np.empty(num_coded * per_tile, dtype=np.uint8)
    _split_segment(
        values, first_unit, coded, num_tiles, num_coded, raw_offset, cut, widths, per_tile, octets, halves, words,
        symbols, carried,
    )
    missing = max(0, first_unit + num_tiles * per_tile - values.size) if coded[num_tiles - 1] else 0
    num_existing = symbols.size - missing
    wide = 0
    for index in range(num_existing):
        if tables[table, 0, symbols[index]] == 0:
            wide = 1
            break
    states = np.empty(NUM_LANES, dtype=np.uint64)
    for lane in range(NUM_LANES):
        states[lane] = np.uint64(_LOWEST_STATE + carried[2 * lane] + 256 * np.int64(carried[2 * lane + 1]))
    num_words = 0
    for tile in range(num_coded):
        if num_words >= words_limit:
            break
        own = symbols[tile * per_tile : (tile + 1) * per_tile]
        num_units = min(per_tile, num_existing - tile * per_tile)
        num_words = encode_tile(own, num_units, per_lane, states, tables[table + wide], log2_sum, scratch, num_words)
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
    if has_fields:
        octets[place : place + CARRIED_BYTES] = carried
        place += CARRIED_BYTES
    octets[place : place + symbols.size] = symbols
    return place + symbols.size - begin


@compiled
def _split_segment(  # type: ignore[no-untyped-def]
    values, first_unit, coded, num_tiles, num_coded, raw_offset, cut, widths, per_tile, octets, halves, words, symbols,
    carried,
):
    """Write the raw area; fill in symbols (uint8[num_coded * per_tile]) and carried (uint8[64])."""
    fields = np.zeros(per_tile, dtype=np.uint64)
    first_octets = np.empty(4 * per_tile, dtype=np.uint8)
    first_halves, first_words = first_octets.view(np.uint16), first_octets.view(np.uint32)
    row = 0
    for tile in range(num_tiles):
        if not coded[tile]:
            continue
        begin = first_unit + tile * per_tile
        num_units = min(per_tile, values.size - begin)
        own = symbols[row * per_tile : (row + 1) * per_tile]
        if num_units < per_tile:
            fields[:] = 0
            own[:] = 0
        split_tile(values, begin, num_units, cut, own, fields)
        plane_start = raw_offset - CARRIED_BYTES
        lowest = 0
        for plane in range(widths.size):
            width = widths[plane]
            if width == 0:
                break
            tile_bytes = per_tile * width // 8
            if row == 0 and plane == 0:
                store_plane(fields, per_tile, width, np.uint64(0), first_octets, first_halves, first_words, 0)
                carried[:] = first_octets[:CARRIED_BYTES]
                octets[raw_offset : plane_start + tile_bytes] = first_octets[CARRIED_BYTES:tile_bytes]
            else:
                at = plane_start + row * tile_bytes
                store_plane(fields, per_tile, width, np.uint64(lowest), octets, halves, words, at)
            lowest += width
            plane_start += num_coded * tile_bytes
            while plane_start & 15:
                octets[plane_start] = 0
                plane_start += 1
        row += 1


@compiled
def decode_loop(  # type: ignore[no-untyped-def]
    octets, halves, words, entries, raw_offsets, stream_offsets, stream_bytes, cuts, widths, tables, slots, log2_sum,
    per_lane, tiles_per_segment, out, values,
):
    """Restore a chunk.

    Args:
        octets: uint8[body_bytes], the body; `halves` and `words` are the same memory in words of 2 and 4 bytes.
        entries: int64[5, S]: kind, table (wide ones counted), coded tiles, whether there is a tile map, tiles.
        raw_offsets: int64[S].
        stream_offsets: int64[S].
        stream_bytes: int64[S].
        cuts: uint64[S, 9].
        widths: int64[S, 6].
        tables: uint64[2 * tables, 3, 256].
        slots: uint8[2 * tables, 2**n].
        log2_sum: uint64, n.
        per_lane: k.
        tiles_per_segment: T.
        out: uint8[raw_bytes], the chunk.
        values: The same memory as units.

    Returns:
        GOOD, or the number of a segment that no writer makes.
    """
    segment_bytes = tiles_per_segment * TILE_BYTES
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
            octets, halves, words, entries[:, segment], raw_offsets[segment], place, stream_bytes[segment],
            cuts[segment], widths[segment], tables, slots, log2_sum, per_lane, values,
            segment * tiles_per_segment * per_lane * NUM_LANES,
        ):
            return segment
    return GOOD


@compiled
def _decode_segment(  # type: ignore[no-untyped-def]
    octets, halves, words, entry, raw_offset, place, stream_bytes, cut, widths, tables, slots, log2_sum, per_lane,
    values, first_unit,
):
    per_tile = per_lane * NUM_LANES
    kind, table, num_coded, mapped, num_tiles = entry[0], entry[1], entry[2], entry[3], entry[4]
    end = place + stream_bytes
    # One more, because the search below writes a tile before it knows that there is one.
    which = np.empty(num_tiles + 1, dtype=np.int64)
    if not _find_tiles(octets, place, mapped, num_tiles, num_coded, which):
        return False
    if mapped:
        _clear_tiles(values, first_unit, num_tiles, per_tile, which, num_coded)
        place += TILE_MAP_BYTES
    has_fields = widths[0] > 0
    carried = np.zeros(CARRIED_BYTES, dtype=np.uint8)
    states = np.empty(NUM_LANES, dtype=np.uint64)
    left = 0
    if kind == _CODED:
        for lane in range(NUM_LANES):
            states[lane] = np.uint64(words[(place >> 2) + lane])
            if states[lane] < np.uint64(_LOWEST_STATE):
                return False
        place += STATES_BYTES
        left = (end - place) >> 1
    else:
        if has_fields:
            carried[:] = octets[place : place + CARRIED_BYTES]
            place += CARRIED_BYTES
    fields = np.zeros(per_tile, dtype=np.uint64)
    symbols = np.empty(per_tile, dtype=np.uint8)
    for back in range(num_coded):
        row = num_coded - 1 - back
        begin = first_unit + which[row] * per_tile
        num_units = min(per_tile, values.size - begin)
        if kind == _CODED:
            left = decode_tile(
                symbols, num_units, per_lane, states, slots[table], tables[table], log2_sum, halves, place >> 1, left
            )
            if left < 0:
                return False
            if row == 0 and not _last_states(states, left, has_fields, carried):
                return False
        else:
            symbols[:] = octets[place + row * per_tile : place + (row + 1) * per_tile]
        _load_fields(octets, halves, words, raw_offset, row, num_coded, widths, per_tile, carried, fields)
        join_tile(symbols, fields, num_units, cut, values, begin)
    return True


@compiled
def _find_tiles(octets, place, mapped, num_tiles, num_coded, which):  # type: ignore[no-untyped-def]
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


@compiled
def _clear_tiles(values, first_unit, num_tiles, per_tile, which, num_coded):  # type: ignore[no-untyped-def]
    row = 0
    for tile in range(num_tiles):
        if row < num_coded and which[row] == tile:
            row += 1
        else:
            values[first_unit + tile * per_tile : first_unit + (tile + 1) * per_tile] = 0


@compiled
def _last_states(states, left, has_fields, carried):  # type: ignore[no-untyped-def]
    """Check what decoding ends with, and read the carried bytes."""
    good = left == 0
    limit = np.uint64(2 * _LOWEST_STATE if has_fields else _LOWEST_STATE + 1)
    for lane in range(NUM_LANES):
        x = states[lane]
        good = good and np.uint64(_LOWEST_STATE) <= x and x < limit
        carried[2 * lane] = np.uint8(x & np.uint64(255))
        carried[2 * lane + 1] = np.uint8((x >> np.uint64(8)) & np.uint64(255))
    return good


@compiled
def _load_fields(  # type: ignore[no-untyped-def]
    octets, halves, words, raw_offset, row, num_coded, widths, per_tile, carried, fields
):
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
            first[CARRIED_BYTES:tile_bytes] = octets[raw_offset : plane_start + tile_bytes]
            load_plane(fields, per_tile, width, np.uint64(0), first, first.view(np.uint16), first.view(np.uint32), 0)
        else:
            at = plane_start + row * tile_bytes
            load_plane(fields, per_tile, width, np.uint64(lowest), octets, halves, words, at)
        lowest += width
        plane_start = (plane_start + num_coded * tile_bytes + 15) & ~15
