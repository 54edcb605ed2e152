"""The segments of a rans body, coded and decoded with NumPy alone. RANS.md gives the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptionError
from .rans_directory import CONSTANT_BYTES, STATES_BYTES, TILE_MAP_BYTES, SegmentKind
from .rans_format import BodyLayout
from .rans_rows import LOWEST_STATE, RowDecoder, RowEncoder, count_symbols
from .rans_segments import Segment, coded_units, pack_map, segments_of, write_raw_area, write_units
from .rans_units import EMPTY_SYMBOL, TILE_BYTES, symbols_of

# Enough rows that NumPy's calls are few for the bytes, few enough that the temporaries of a step stay in the caches.
_ROWS = 256

Octets = NDArray[np.uint8]

__all__ = ["count_symbols", "decode_segments", "encode_segments"]


def encode_segments(raw: Octets, coded: NDArray[np.bool_], layout: BodyLayout, body: Octets) -> bool:
    """Write the raw region and the stream region of a body, and complete its directory.

    Args:
        raw: uint8[raw_bytes], the chunk.
        coded: bool[S, T], the tile maps.
        layout: Where the raw areas go; its directory gets kinds, tables and stream bytes.
        body: uint8[at least layout.raw_end], the body.

    Returns:
        Whether the streams fit; if not, body and directory are undefined.
    """
    encoder = RowEncoder(layout.tables)
    ends_coded = bool(coded[-1, layout.tiles[-1] - 1])
    streams: dict[int, Octets] = {}
    place = layout.raw_end
    for batch in _batches(segments_of(layout, raw.size, ends_coded)):
        for segment, stream in zip(batch, _streams(batch, raw, coded, layout, body, encoder), strict=True):
            streams[segment.index] = stream
            place += stream.size + -stream.size % 16
        if place > body.size:
            return False
    segment_bytes = layout.segment_tiles * TILE_BYTES
    for index in np.flatnonzero(layout.directory.kind == SegmentKind.CONSTANT).tolist():
        stream = raw[index * segment_bytes : (index + 1) * segment_bytes][:CONSTANT_BYTES]
        streams[index] = np.pad(stream, (0, CONSTANT_BYTES - stream.size))
    for index, stream in streams.items():
        layout.directory.stream_bytes[index] = stream.size
    if layout.body_bytes > body.size:
        return False
    body[layout.raw_end : layout.body_bytes] = 0
    offsets = layout.stream_offsets()
    for index, stream in streams.items():
        body[offsets[index] : offsets[index] + stream.size] = stream
    return True


def _batches(segments: Iterator[Segment]) -> Iterator[list[Segment]]:
    batch: list[Segment] = []
    for segment in segments:
        batch.append(segment)
        if len(batch) == _ROWS:
            yield _sorted(batch)
            batch = []
    if batch:
        yield _sorted(batch)


def _sorted(batch: list[Segment]) -> list[Segment]:
    return sorted(batch, key=lambda segment: -segment.num_steps)


def _streams(
    batch: Sequence[Segment],
    raw: Octets,
    coded: NDArray[np.bool_],
    layout: BodyLayout,
    body: Octets,
    encoder: RowEncoder,
) -> Iterator[Octets]:
    """Write the raw areas of a batch, yield its streams, and set its kinds, tables and flags."""
    directory, shape = layout.directory, layout.shape
    symbols, carried, tables = [], [], []
    for segment in batch:
        values = coded_units(raw, segment, coded[segment.index])
        own = symbols_of(values, shape)
        if segment.num_fields:
            own[values == 0] = EMPTY_SYMBOL
        num_existing = own.size - segment.num_missing
        own[num_existing:] = 0
        symbols.append(own)
        carried.append(write_raw_area(values, segment, body))
        table = 2 * int(directory.table[segment.index])
        narrow = (layout.tables.frequencies[table] > 0)[own[:num_existing]].all()
        tables.append(table if narrow else table + 1)
    states, words = encoder.encode(batch, symbols, carried, tables)
    plain_bytes = directory.plain_bytes(shape)
    for segment, own_symbols, own_carried, table, own_states, own_words in zip(
        batch, symbols, carried, tables, states, words, strict=True
    ):
        index = segment.index
        parts = [pack_map(coded[index])] if directory.mapped[index] else []
        if sum(part.size for part in parts) + STATES_BYTES + own_words.nbytes < plain_bytes[index]:
            directory.wide[index] = table & 1
            parts += [own_states.view(np.uint8), own_words.view(np.uint8)]
        else:
            directory.kind[index], directory.table[index] = SegmentKind.PLAIN, 0
            parts += [own_carried, own_symbols]
        yield np.concatenate(parts)


def decode_segments(layout: BodyLayout, body: Octets, out: Octets) -> None:
    """Restore a chunk.

    Args:
        layout: The body's, checked.
        body: uint8[body_bytes].
        out: uint8[raw_bytes], the chunk.

    Raises:
        CorruptionError: If a segment is not what a writer makes.
    """
    directory = layout.directory
    offsets = layout.stream_offsets()
    segment_bytes = layout.segment_tiles * TILE_BYTES
    for index in np.flatnonzero(directory.num_coded == 0).tolist():
        place = out[index * segment_bytes : (index + 1) * segment_bytes]
        if directory.kind[index] == SegmentKind.ZERO:
            place[:] = 0
        else:
            place[:] = np.resize(body[offsets[index] : offsets[index] + CONSTANT_BYTES], place.size)
    decoder = RowDecoder(layout.tables)
    for batch in _batches(segments_of(layout, out.size, _ends_coded(layout, body, offsets))):
        _decode_batch(batch, layout, body, offsets, decoder, out)


def _ends_coded(layout: BodyLayout, body: Octets, offsets: NDArray[np.int64]) -> bool:
    if not layout.directory.mapped[-1]:
        return True
    last_tile = int(layout.tiles[-1]) - 1
    return bool(body[offsets[-1] + last_tile // 8] >> (last_tile % 8) & 1)


def _decode_batch(
    batch: Sequence[Segment],
    layout: BodyLayout,
    body: Octets,
    offsets: NDArray[np.int64],
    decoder: RowDecoder,
    out: Octets,
) -> None:
    directory = layout.directory
    rows: list[Segment] = []
    maps: list[Octets] = []
    streams: list[Octets] = []
    for segment in batch:
        index = segment.index
        stream = body[offsets[index] : offsets[index] + directory.stream_bytes[index]]
        map_bytes = TILE_MAP_BYTES if directory.mapped[index] else 0
        if directory.kind[index] == SegmentKind.PLAIN:
            carried_end = map_bytes + segment.carried_bytes
            carried = stream[map_bytes:carried_end]
            write_units(stream[carried_end:], carried, segment, layout, body, stream[:map_bytes], out)
        else:
            rows.append(segment)
            maps.append(stream[:map_bytes])
            streams.append(stream[map_bytes:])
    if not rows:
        return
    states = np.stack([stream[:STATES_BYTES].view("<u4") for stream in streams])
    words = [stream[STATES_BYTES:].view("<u2") for stream in streams]
    tables = [2 * int(directory.table[row.index]) + int(directory.wide[row.index]) for row in rows]
    if (states < LOWEST_STATE).any():
        raise CorruptionError("a coded segment starts with a state below 65536")
    decoded = decoder.decode(rows, states, words, tables)
    for row, segment in enumerate(rows):
        last = decoded.states[row]
        limit = 2 * LOWEST_STATE if segment.carried_bytes else LOWEST_STATE + 1
        if decoded.words_left[row] or (last < LOWEST_STATE).any() or (last >= limit).any():
            raise CorruptionError(f"segment {segment.index} does not decode to its first state and no words left")
        carried = last.astype("<u2").view(np.uint8)[: segment.carried_bytes]
        write_units(decoded.symbols[row], carried, segment, layout, body, maps[row], out)
