"""The digest of FRAME.md: XXH3-64 over the XXH3-64 values of 64 KiB pieces, so that pieces hash side by side."""

from __future__ import annotations

import time

import numpy as np
import xxhash
from numpy.typing import NDArray

PIECE_BYTES = 65536
"""How many bytes one inner hash covers."""

# xxhash keeps the GIL for pieces this short, and a loop of them would make a training thread wait 5 ms (the switch
# interval) before each of its operations. Giving way after every 16 MiB, about 1.2 ms, prevents that; to give way more
# often would have this thread wait those 5 ms each time beside one that runs Python without pause.
_PIECES_PER_TURN = 256


def digest(source: bytes | bytearray | memoryview | NDArray[np.uint8]) -> int:
    """Return the digest of contiguous bytes, as an unsigned 64-bit integer. Blocks; lets other threads run in between.

    Args:
        source: Any number of contiguous bytes (uint8[num_bytes], or a buffer of format "B").
    """
    octets = octets_of(source)
    num_pieces = -(-len(octets) // PIECE_BYTES)
    pieces = np.empty(num_pieces, dtype=np.uint64)
    for index in range(num_pieces):
        if index and index % _PIECES_PER_TURN == 0:
            time.sleep(0)
        pieces[index] = xxhash.xxh3_64_intdigest(octets[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
    return combine(pieces)


def combine(piece_digests: NDArray[np.uint64]) -> int:
    """Return the digest of bytes whose pieces hash to `piece_digests`.

    Args:
        piece_digests: uint64[num_pieces], the XXH3-64 (seed 0) of each 65,536-byte piece in order; empty for no bytes.
    """
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(piece_digests, dtype="<u8").tobytes())


def octets_of(source: bytes | bytearray | memoryview | NDArray[np.uint8]) -> memoryview:
    """Return a view of contiguous bytes, one item a byte."""
    return source.data if isinstance(source, np.ndarray) else memoryview(source)
