"""The digest is the one of FRAME.md."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from tidegate.codec.digest import PIECE_BYTES, combine, digest


def by_the_book(octets: bytes) -> int:
    """FRAME.md, word for word."""
    values = [xxhash.xxh3_64_intdigest(octets[i : i + 65_536], seed=0) for i in range(0, len(octets), 65_536)]
    return xxhash.xxh3_64_intdigest(b"".join(value.to_bytes(8, "little") for value in values), seed=0)


def test_of_no_bytes() -> None:
    # The published XXH3-64 of the empty input.
    assert digest(b"") == combine(np.empty(0, dtype=np.uint64)) == 0x2D06_8005_38D3_94C2


@pytest.mark.parametrize("num_bytes", [1, 8, 240, 241, 65_535, 65_536, 65_537, 131_072, 300_001, 9_000_000])
def test_every_length(num_bytes: int) -> None:
    octets = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    expected = by_the_book(octets.tobytes())
    assert digest(octets) == expected
    assert digest(octets.tobytes()) == digest(bytearray(octets)) == digest(memoryview(octets)) == expected
    padded = np.concatenate([np.zeros(3, dtype=np.uint8), octets, np.zeros(3, dtype=np.uint8)])
    assert digest(padded[3:-3]) == expected
    padded.flags.writeable = False
    assert digest(padded[3:-3]) == expected


def test_combine_takes_the_pieces_in_order() -> None:
    octets = np.random.default_rng(0).integers(0, 256, 3 * PIECE_BYTES + 5, dtype=np.uint8).tobytes()
    pieces = np.array(
        [xxhash.xxh3_64_intdigest(octets[i : i + PIECE_BYTES]) for i in range(0, len(octets), PIECE_BYTES)],
        dtype=np.uint64,
    )
    assert combine(pieces) == combine(np.repeat(pieces, 2)[::2]) == digest(octets)
    assert combine(pieces[::-1]) != digest(octets)


def test_a_piece_is_not_the_whole() -> None:
    octets = bytes(100)
    assert digest(octets) != xxhash.xxh3_64_intdigest(octets)
