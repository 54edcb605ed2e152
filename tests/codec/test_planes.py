"""The plane split is the one of FRAME.md, and joining undoes it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.codec.planes import extract_plane, join_planes
from tidegate.codec.words import WordType

WORDS = pytest.mark.parametrize("word", WordType, ids=lambda word: word.name)
WIDE = pytest.mark.parametrize("word", [w for w in WordType if w.itemsize > 1], ids=lambda word: word.name)


def split_by_the_book(octets: bytes, word: WordType) -> list[bytes]:
    """FRAME.md, word for word, in Python's integers."""
    size, bits = word.itemsize, 8 * word.itemsize
    values = [int.from_bytes(octets[i : i + size], "little") for i in range(0, len(octets), size)]
    if word in (WordType.F16, WordType.BF16, WordType.F32, WordType.F64):
        values = [(value << 1 | value >> (bits - 1)) & ((1 << bits) - 1) for value in values]
    return [bytes(value >> (bits - 8 * (plane + 1)) & 0xFF for value in values) for plane in range(size)]


def split(raw: NDArray[np.uint8], word: WordType) -> list[NDArray[np.uint8]]:
    """All planes, each in memory of its own that was full of other bytes."""
    count = raw.size // word.itemsize
    return [extract_plane(raw, word, plane, np.full(count, 0xA5, dtype=np.uint8)) for plane in range(word.itemsize)]


@WORDS
@given(octets=st.binary(max_size=320))
@settings(max_examples=30, deadline=None)
def test_split_and_join(word: WordType, octets: bytes) -> None:
    octets = octets[: len(octets) // word.itemsize * word.itemsize]
    planes = split(np.frombuffer(octets, dtype=np.uint8), word)
    assert [plane.tobytes() for plane in planes] == split_by_the_book(octets, word)
    out = np.full(len(octets), 0x5A, dtype=np.uint8)
    join_planes(planes, word, out)
    assert out.tobytes() == octets


@WIDE
@pytest.mark.parametrize("count", [(1 << 18) - 1, 1 << 18, (1 << 18) + 1, (1 << 19) + 7])
def test_longer_than_a_piece(word: WordType, count: int) -> None:
    raw = np.random.default_rng(count).integers(0, 256, count * word.itemsize, dtype=np.uint8)
    out = np.zeros_like(raw)
    join_planes(split(raw, word), word, out)
    assert out.tobytes() == raw.tobytes()


@WIDE
@pytest.mark.parametrize("shift", [1, 3])
def test_unaligned_memory(word: WordType, shift: int) -> None:
    room = np.random.default_rng(1).integers(0, 256, 1000 * word.itemsize + shift, dtype=np.uint8)
    raw = room[shift:]
    planes = split(raw, word)
    assert [plane.tobytes() for plane in planes] == split_by_the_book(raw.tobytes(), word)
    out = np.zeros_like(room)
    join_planes(planes, word, out[shift:])
    assert out.tobytes() == bytes(shift) + raw.tobytes()


@WIDE
@pytest.mark.parametrize("num_constant", range(1, 9))
def test_constant_planes_are_given_as_one_byte(word: WordType, num_constant: int) -> None:
    count, rng = 300_000, np.random.default_rng(2)
    planes = [rng.integers(0, 256, count, dtype=np.uint8) for _ in range(word.itemsize)]
    for plane in planes[:num_constant]:
        plane[:] = plane[0]
    full, short = np.zeros(count * word.itemsize, dtype=np.uint8), np.zeros(count * word.itemsize, dtype=np.uint8)
    join_planes(planes, word, full)
    repeated = [np.broadcast_to(plane[:1], count) for plane in planes[:num_constant]]
    join_planes([*repeated, *planes[num_constant:]], word, short)
    assert full.tobytes() == short.tobytes()
    assert [plane.tobytes() for plane in split(full, word)] == [plane.tobytes() for plane in planes]
