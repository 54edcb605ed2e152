"""Frequency tables of the rans codec: from counts to frequencies, and what coding and decoding look up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptionError
from .rans_units import EMPTY_SYMBOL

NUM_SYMBOLS = 256
MAP_BYTES = NUM_SYMBOLS // 8
MAX_TABLE_BYTES = MAP_BYTES + 2 * NUM_SYMBOLS
"""Bytes of a table that has every symbol; a multiple of 16."""


@dataclass(frozen=True, slots=True, eq=False)
class CodeTables:
    """All tables of a body, each followed by its wide one: table 2 t is stored table t, 2 t + 1 its wide table.

    Attributes:
        log2_sum: n; the frequencies of each table sum to 2**n.
        frequencies: uint32[2 * num_tables, 256]; in stored tables 0 for the symbols they do not have.
        starts: uint32[2 * num_tables, 256], the sum of the frequencies of all symbols below.
    """

    log2_sum: int
    frequencies: NDArray[np.uint32]
    starts: NDArray[np.uint32]

    def symbols(self) -> NDArray[np.uint8]:
        """Return the symbol of every slot: uint8[2 * num_tables, 2**log2_sum]."""
        every = np.arange(NUM_SYMBOLS, dtype=np.uint8)
        return np.stack([np.repeat(every, row) for row in self.frequencies])


def quantise(counts: NDArray[np.int64], spread: int, sampled: bool, log2_sum: int) -> NDArray[np.uint32]:
    """Turn the counts of symbols into frequencies, with whole numbers only, as RANS.md says.

    Args:
        counts: int64[256].
        spread: Symbols of an octave; 0 where neighbours of a counted symbol are no likelier than others.
        sampled: Whether symbols may occur that were not counted.
        log2_sum: n.

    Returns:
        uint32[256], 0 for symbols that the table does not have; they sum to 2**n.
    """
    total_sum = 1 << log2_sum
    counts = counts.copy()
    if not counts.any():
        counts[0] = 1
    present = counts > 0
    if sampled and spread:
        for symbol in np.flatnonzero(counts[:EMPTY_SYMBOL]):
            present[max(0, int(symbol) - 8 * spread) : int(symbol) + 2 * spread + 1] = True
    num_counted = int(counts.sum())
    frequencies = np.where(present, np.maximum(1, (counts * total_sum + num_counted // 2) // num_counted), 0)
    missing = total_sum - int(frequencies.sum())
    if missing > 0:
        frequencies[np.argmax(frequencies)] += missing
    while missing < 0:
        greatest = np.argmax(frequencies)
        lessened = min(-missing, max(1, int(frequencies[greatest]) // 8))
        frequencies[greatest] -= lessened
        missing += lessened
    return frequencies.astype(np.uint32)


def wide_beside(frequencies: NDArray[np.uint32], log2_sum: int) -> NDArray[np.uint32]:
    """Put its wide table behind each: uint32[num_tables, 256], each of sum 2**log2_sum, to [2 * num_tables, 256]."""
    total_sum = 1 << log2_sum
    both = np.empty((len(frequencies), 2, NUM_SYMBOLS), dtype=np.uint32)
    both[:, 0] = frequencies
    wide = both[:, 1]
    np.multiply(frequencies, np.uint32(total_sum - NUM_SYMBOLS), out=wide)
    wide >>= np.uint32(log2_sum)
    wide += np.uint32(1)
    missing = np.uint32(total_sum) - wide.sum(axis=1, dtype=np.uint32)
    wide[np.arange(len(wide)), np.argmax(frequencies, axis=1)] += missing
    return both.reshape(-1, NUM_SYMBOLS)


def with_wide(frequencies: NDArray[np.uint32], log2_sum: int) -> CodeTables:
    """Add to each table its wide one.

    Args:
        frequencies: uint32[num_tables, 256], each row of sum 2**log2_sum.
        log2_sum: n.
    """
    every = wide_beside(frequencies, log2_sum)
    return CodeTables(log2_sum, every, np.cumsum(every, axis=1, dtype=np.uint32) - every)


def pack_tables(frequencies: NDArray[np.uint32]) -> bytes:
    """Return the tables as a body holds them, padding included: frequencies is uint32[num_tables, 256]."""
    parts = []
    for row in frequencies:
        parts.append(np.packbits(row > 0, bitorder="little").tobytes())
        parts.append(row[row > 0].astype("<u2").tobytes())
    packed = b"".join(parts)
    return packed + bytes(-len(packed) % 16)


def unpack_tables(octets: NDArray[np.uint8], num_tables: int, log2_sum: int) -> NDArray[np.uint32]:
    """Read and check the tables of a body.

    Args:
        octets: The bytes that the preamble gives the tables.
        num_tables: How many there are.
        log2_sum: n.

    Returns:
        uint32[num_tables, 256].

    Raises:
        CorruptionError: If they do not fill the bytes, or one does not sum to 2**n.
    """
    packed = octets.tobytes()
    maps, values = [], []
    place = 0
    for index in range(num_tables):
        bits = packed[place : place + MAP_BYTES]
        end = place + MAP_BYTES + 2 * int.from_bytes(bits, "little").bit_count()
        if end > len(packed):
            raise CorruptionError(f"table {index} of {num_tables} ends behind the {octets.size} bytes of all tables")
        maps.append(bits)
        values.append(packed[place + MAP_BYTES : end])
        place = end
    if octets.size != place + -place % 16 or any(packed[place:]):
        raise CorruptionError(f"the tables take {place} bytes of the {octets.size} that the body gives them")
    bits_of_tables = np.unpackbits(np.frombuffer(b"".join(maps), dtype=np.uint8), bitorder="little")
    present = bits_of_tables.astype(bool).reshape(num_tables, NUM_SYMBOLS)
    frequencies = np.zeros((num_tables, NUM_SYMBOLS), dtype=np.uint32)
    frequencies[present] = np.frombuffer(b"".join(values), dtype="<u2")
    bad = (frequencies.sum(axis=1) != 1 << log2_sum) | (present & (frequencies == 0)).any(axis=1)
    if bad.any():
        raise CorruptionError(f"table {bad.argmax()} of {num_tables} does not sum to {1 << log2_sum} or has a 0")
    return frequencies
