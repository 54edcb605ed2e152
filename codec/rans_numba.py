"""The segments of a rans body, coded and decoded by compiled loops. Needs numba. RANS.md gives the bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptionError
from .rans_decode_loops import GOOD, decode_loop
from .rans_directory import SegmentKind
from .rans_encode_loops import encode_loop
from .rans_format import BodyLayout
from .rans_loops import count_loop
from .rans_tables import CodeTables
from .rans_units import field_cut, planes_of

Octets = NDArray[np.uint8]


def count_symbols(symbols: Octets, groups: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Do what `rans_numpy.count_symbols` does."""
    count_loop(symbols, groups, counts)


def encode_segments(raw: Octets, coded: NDArray[np.bool_], layout: BodyLayout, body: Octets) -> bool:
    """Do what `rans_numpy.encode_segments` does."""
    directory, shape = layout.directory, layout.shape
    parts = (directory.kind, directory.table, directory.wide, directory.num_coded, directory.stream_bytes)
    entries = np.stack([*parts, directory.num_fields])
    cuts, widths = _cuts(layout)
    end: int = encode_loop(
        _view(raw),
        coded,
        entries,
        layout.raw_offsets,
        cuts,
        widths,
        *_encode_lookups(layout.tables),
        np.uint64(layout.tables.log2_sum),
        shape.units_per_lane,
        layout.raw_end,
        _view(body),
    )
    directory.kind[:], directory.table[:], directory.wide[:], _, directory.stream_bytes[:], _ = entries
    return end >= 0


def decode_segments(layout: BodyLayout, body: Octets, out: Octets) -> None:
    """Do what `rans_numpy.decode_segments` does."""
    directory, shape = layout.directory, layout.shape
    tables = 2 * directory.table + directory.wide
    entries = np.stack(
        [directory.kind, tables, directory.num_coded, directory.mapped, layout.tiles, directory.num_fields]
    )
    cuts, widths = _cuts(layout)
    place: int = decode_loop(
        _view(body),
        entries,
        layout.raw_offsets,
        layout.stream_offsets(),
        directory.stream_bytes,
        cuts,
        widths,
        _slots(layout.tables),
        np.uint64(layout.tables.log2_sum),
        shape.units_per_lane,
        layout.segment_tiles,
        _view(out),
    )
    if place != GOOD:
        kind = SegmentKind(int(directory.kind[place])).name.lower()
        raise CorruptionError(
            f"segment {place}, {kind}, does not decode: no writer makes its tile map, states or words"
        )


def _cuts(layout: BodyLayout) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the numbers of each segment's cut, uint64[S, 9] for `split_units`, and its planes' widths, int64[S, 6]."""
    directory, shape = layout.directory, layout.shape
    flags = directory.one_sign | directory.no_high << 1 | directory.short << 2
    cuts = np.zeros((8, 9), dtype=np.uint64)
    widths = np.zeros((8, 6), dtype=np.int64)
    for index in np.unique(flags).tolist():
        cut = field_cut(shape, bool(index & 1), bool(index & 2), bool(index & 4))
        own_widths = [width for width, _ in planes_of(cut.num_bits)]
        widths[index, : len(own_widths)] = own_widths
        cuts[index, :8] = (
            shape.mantissa_bits,
            shape.exponent_shift,
            shape.exponent_bits,
            cut.dropped_bits,
            cut.low_bits,
            (1 << cut.high_bits) - 1,
            max(cut.num_bits - 1, 0),
            cut.sign_bits,
        )
    chosen = cuts[flags]
    chosen[:, 8] = directory.sign
    return chosen, widths[flags]


def _encode_lookups(tables: CodeTables) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return what `encode_tile` looks up, of each table and symbol: uint64[tables, 256] twice."""
    frequencies = tables.frequencies.astype(np.uint64)
    divisors = np.maximum(frequencies, np.uint64(1))
    scale = np.uint64(1 << (32 + tables.log2_sum))
    ranges = tables.starts.astype(np.uint64) << np.uint64(32) | frequencies
    return ranges, (scale + divisors - np.uint64(1)) // divisors


def _slots(tables: CodeTables) -> NDArray[np.uint64]:
    """Return what `decode_tile` looks up, of each table and slot: uint64[tables, 2**n]."""
    symbols = tables.symbols()
    frequencies = np.take_along_axis(tables.frequencies, symbols.astype(np.intp), axis=1).astype(np.uint64)
    starts = np.take_along_axis(tables.starts, symbols.astype(np.intp), axis=1).astype(np.uint64)
    biases = np.arange(symbols.shape[1], dtype=np.uint64) - starts
    return frequencies << np.uint64(32) | biases << np.uint64(8) | symbols


def _view(octets: Octets) -> tuple[NDArray[np.unsignedinteger], ...]:
    """Return memory as words of 1, 2, 4 and 8 bytes; bytes at its end that make no whole word are left out."""
    return tuple(octets[: octets.size // width * width].view(f"<u{width}") for width in (1, 2, 4, 8))
