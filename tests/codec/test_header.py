"""The header is the 64 bytes that FRAME.md draws, and says what is wrong with others."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
import xxhash

from tidegate.codec.base import (
    ANS_CODEC,
    CASCADED_CODEC,
    CODEC_VERSIONS,
    FRAME_ALIGNMENT_BYTES,
    HEADER_BYTES,
    RAW_CODEC,
    ZSTD_CODEC,
    FrameHeader,
    frame_bound_bytes,
    unpack_header,
)
from tidegate.codec.errors import CorruptionError, TruncatedError, UnknownCodecError
from tidegate.codec.words import WordType

HEADER = FrameHeader(ZSTD_CODEC, 1, WordType.F32, 0x1234_5678_9ABC, 0x1234_5678, 2**64 - 1, 2**63 + 5)


def seal(fields: bytes) -> bytes:
    """56 bytes with the hash that makes a reader believe them."""
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


def test_bytes() -> None:
    octets = HEADER.pack()
    assert len(octets) == HEADER_BYTES == 64
    assert octets[:8] == b"TGFR" + bytes([1, ZSTD_CODEC, 1, 7])
    assert octets[8:16] == (0x1234_5678_9ABC).to_bytes(8, "little")
    assert octets[16:24] == (0x1234_5678).to_bytes(8, "little")
    assert octets[24:32] == b"\xff" * 8
    assert octets[32:40] == (2**63 + 5).to_bytes(8, "little")
    assert octets[40:56] == bytes(16)
    assert octets == seal(octets[:56])


@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        *(dataclasses.replace(HEADER, codec=codec, parameter=6) for codec in range(ANS_CODEC, CASCADED_CODEC + 1)),
        dataclasses.replace(HEADER, codec=RAW_CODEC, body_bytes=HEADER.raw_bytes),
        FrameHeader(RAW_CODEC, 1, WordType.U8, 0, 0, 1, 1),
        FrameHeader(RAW_CODEC, 1, WordType.F64, 2**64 - 8, 2**64 - 8, 1, 1),
    ],
)
def test_unpack_is_the_inverse_of_pack(header: FrameHeader) -> None:
    octets = header.pack()
    assert unpack_header(octets) == header
    assert unpack_header(bytearray(octets + b"the body")) == header
    assert unpack_header(memoryview(octets)) == header
    assert unpack_header(np.frombuffer(octets, dtype=np.uint8)) == header
    assert isinstance(unpack_header(octets).word, WordType)


def test_lengths() -> None:
    assert HEADER.frame_bytes == 64 + HEADER.body_bytes
    header = dataclasses.replace(HEADER, body_bytes=FRAME_ALIGNMENT_BYTES - HEADER_BYTES)
    assert (header.frame_bytes, header.padded_bytes) == (4096, 4096)
    assert dataclasses.replace(header, body_bytes=header.body_bytes + 1).padded_bytes == 8192
    assert [frame_bound_bytes(n) for n in (0, 4032, 4033, 1 << 40)] == [4096, 4096, 8192, (1 << 40) + 4096]


@pytest.mark.parametrize("num_bytes", [0, 1, 55, 63])
def test_too_short(num_bytes: int) -> None:
    with pytest.raises(TruncatedError, match=f"{num_bytes} bytes"):
        unpack_header(HEADER.pack()[:num_bytes])


def test_not_a_frame() -> None:
    with pytest.raises(CorruptionError, match="instead of b'TGFR'"):
        unpack_header(seal(b"PK\x03\x04" + HEADER.pack()[4:56]))


@pytest.mark.parametrize("place", range(64))
def test_every_changed_byte_is_found(place: int) -> None:
    octets = bytearray(HEADER.pack())
    octets[place] ^= 0x40
    with pytest.raises(CorruptionError):
        unpack_header(octets)


@pytest.mark.parametrize(
    ("place", "octet", "message"),
    [
        (4, 0, "format version 0"),
        (4, 2, "format version 2"),
        (5, 10, "codec 10 version 1"),
        (5, 255, "codec 255"),
        (6, 0, "codec 1 version 0"),
        (6, 2, "codec 1 version 2"),
        (7, 9, "word type 9"),
        (7, 255, "word type 255"),
    ],
)
def test_of_another_build(place: int, octet: int, message: str) -> None:
    fields = bytearray(HEADER.pack()[:56])
    fields[place] = octet
    with pytest.raises(UnknownCodecError, match=f"{message}.*upgrade"):
        unpack_header(seal(bytes(fields)))


@pytest.mark.parametrize(
    "changes",
    [
        {"raw_bytes": HEADER.raw_bytes + 2},
        {"body_bytes": HEADER.raw_bytes},
        {"body_bytes": 2**64 - 1},
        {"raw_bytes": 0, "body_bytes": 0},
        {"codec": RAW_CODEC},
        {"codec": RAW_CODEC, "raw_bytes": 8, "body_bytes": 4},
        {"parameter": 1},
    ],
)
def test_sealed_but_absurd(changes: dict[str, int]) -> None:
    with pytest.raises(CorruptionError):
        unpack_header(dataclasses.replace(HEADER, **changes).pack())  # type: ignore[arg-type]


@pytest.mark.parametrize("place", range(44, 56))
def test_reserved_bytes_are_zero(place: int) -> None:
    fields = bytearray(HEADER.pack()[:56])
    fields[place] = 1
    with pytest.raises(CorruptionError, match="zeros"):
        unpack_header(seal(bytes(fields)))


def test_known_versions_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CODEC_VERSIONS[8] = 1  # type: ignore[index]
