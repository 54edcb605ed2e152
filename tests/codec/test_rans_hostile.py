"""Damaged and hostile rans bodies end in an error of the codecs, on both coders, before anything is out of bounds."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.codec.fuzz_rans import check_mutation, mutations, small_bodies
from tests.codec.rans_chunks import CODERS, decoded, use_coder
from tidegate.codec.errors import CodecError, CorruptionError, TruncatedError, UnknownCodecError
from tidegate.codec.words import WordType

Octets = NDArray[np.uint8]


@pytest.fixture(params=CODERS)
def coder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """NumPy and numba in turn."""
    name: str = request.param
    use_coder(name, monkeypatch)
    return name


def first_body() -> tuple[WordType, Octets, Octets]:
    word, raw, body = small_bodies()[0]
    return word, raw, body.copy()


def directory_start(body: Octets) -> int:
    return 32 + int(struct.unpack_from("<I", body, 12)[0])


def test_mutated_frames(coder: str) -> None:
    count = 4000 if coder == "numba" else 500
    refused = sum(check_mutation(*mutation) for mutation in mutations(count, seed=26))
    assert refused > count // 2


def test_every_truncation(coder: str) -> None:
    word, raw, body = first_body()
    for num_bytes in [*range(1, 300), *range(300, body.size, 977)]:
        with pytest.raises(CorruptionError):
            decoded(raw, word, body[:num_bytes].copy())


def test_a_body_inside_its_preamble(coder: str) -> None:
    word, raw, body = first_body()
    with pytest.raises(TruncatedError, match="31 bytes, inside its 32-byte preamble"):
        decoded(raw, word, body[:31].copy())


@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        (0, 2, UnknownCodecError, "version 2 and context rule 0, and this build reads version 1.*upgrade"),
        (3, 1, UnknownCodecError, "context rule 1"),
        (3, 2, UnknownCodecError, "context rule 2"),
        (1, 11, CorruptionError, "11 bits of probability"),
        (1, 15, CorruptionError, "15 bits of probability"),
        (1, 13, CorruptionError, "does not sum to 8192"),
        (2, WordType.F32, CorruptionError, "word type 7"),
        (4, 15, CorruptionError, "15 tiles a segment"),
        (4, 32, CorruptionError, "segments; a chunk of"),
        (6, 0, CorruptionError, "0 tables"),
        (6, 65, CorruptionError, "65 tables"),
        (6, 2, CorruptionError, "table 1 of 2 ends behind"),
        (12, 1, CorruptionError, "parts of the body"),
        (31, 1, CorruptionError, "parts of the body"),
    ],
)
def test_preamble(place: int, value: int, error: type[CodecError], message: str, coder: str) -> None:
    word, raw, body = first_body()
    body[place] = value
    with pytest.raises(error, match=message):
        decoded(raw, word, body)


@pytest.mark.parametrize("bit", [61, 63])
def test_reserved_bits_of_an_entry(bit: int, coder: str) -> None:
    word, raw, body = first_body()
    body[directory_start(body) + bit // 8] |= 1 << bit % 8
    with pytest.raises(CorruptionError, match="bits set where this version has zeros"):
        decoded(raw, word, body)


@pytest.mark.parametrize("bit", [*range(61)])
def test_every_bit_of_an_entry(bit: int, coder: str) -> None:
    for word, raw, body in small_bodies():
        for entry in (0, 3, 6):
            damaged = body.copy()
            damaged[min(directory_start(body) + 8 * entry, body.size - 16) + bit // 8] ^= 1 << bit % 8
            assert check_mutation(word, raw, damaged) or (damaged == body).all()


def test_a_frame_of_no_bytes(coder: str) -> None:
    word, _, body = first_body()
    with pytest.raises(CorruptionError, match="stands for no bytes"):
        decoded(np.empty(0, dtype=np.uint8), word, body)


def test_a_promise_of_huge_regions_allocates_nothing(coder: str) -> None:
    word, raw, body = first_body()
    for place in (8, 12, 16, 24):
        damaged = body.copy()
        damaged[place : place + 4] = [0xF0, 0xFF, 0xFF, 0xFF]
        with pytest.raises(CorruptionError):
            decoded(raw, word, damaged)
