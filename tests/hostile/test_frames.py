"""Frames made to harm: every checksum is right and the fields lie. A reader refuses them before it pays for them."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.codec_contract import poisoned, widened
from tidegate.codec.base import ANS_CODEC, RAW_CODEC, ZSTD_CODEC, FrameHeader, unpack_header
from tidegate.codec.blocked import BlockKind, parse_body
from tidegate.codec.digest import digest
from tidegate.codec.errors import CodecError, CorruptionError, TruncatedError
from tidegate.codec.frame import decode_frame, encode_frame
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType

BLOCK = 4096
NUM_BLOCKS = 9
RAW_BYTES = NUM_BLOCKS * BLOCK
STORED, CODED, CONSTANT = BlockKind


def honest_header(**changes: object) -> FrameHeader:
    """A header for RAW_BYTES one-byte values, but for the changes."""
    header = FrameHeader(ZSTD_CODEC, 1, WordType.U8, RAW_BYTES, 0, digest(bytes(RAW_BYTES)), 0)
    return dataclasses.replace(header, **changes)  # type: ignore[arg-type]


def body_of(
    entries: list[tuple[int, bytes]],
    *,
    block_bytes: int = BLOCK,
    num_planes: int = 1,
    num_blocks: int | None = None,
    reserved: int = 0,
    lengths: dict[int, int] | None = None,
    filler: bytes = b"\0",
) -> bytes:
    """A body whose fields may lie: `lengths` replaces stored lengths in the table, `filler` is what the padding is."""
    count = len(entries) if num_blocks is None else num_blocks
    preamble = np.array([block_bytes, num_planes, count, reserved], dtype="<u4").tobytes()
    lies = lengths or {}
    table = [kind << 30 | lies.get(index, len(block)) for index, (kind, block) in enumerate(entries)]
    start = preamble + np.array(table, dtype="<u4").tobytes()
    parts = [start + filler * (-len(start) % 16)]
    parts += [block + filler * (-len(block) % 16) for _, block in entries]
    return b"".join(parts)


def signed(body: bytes, **changes: object) -> torch.Tensor:
    """The frame of a body, with every checksum as it should be."""
    fields: dict[str, object] = {"body_bytes": len(body), "body_digest": digest(body), **changes}
    return torch.frombuffer(bytearray(honest_header(**fields).pack() + body), dtype=torch.uint8)


def constants(count: int = NUM_BLOCKS) -> list[tuple[int, bytes]]:
    return [(CONSTANT, b"\0")] * count


def one_coded(coded: bytes) -> bytes:
    """An honest body but for its first block."""
    return body_of([(CODED, coded), *constants()[1:]])


@contextmanager
def at_most_bytes(limit: int) -> Iterator[None]:
    """Fail if Python objects and arrays grow by more than that inside, be it for an instant."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def refused(frame: torch.Tensor, error: type[CodecError] = CorruptionError, match: str | None = None) -> None:
    out = poisoned(RAW_BYTES)
    with at_most_bytes(1 << 20), pytest.raises(error, match=match):
        decode_frame(frame, out)


def test_the_forge_makes_good_frames() -> None:
    """Else the tests below would prove nothing."""
    coded = zstandard.ZstdCompressor().compress(bytes(BLOCK))
    for body in (body_of(constants()), one_coded(coded), body_of([(STORED, bytes(BLOCK)), *constants()[1:]])):
        out = poisoned(RAW_BYTES)
        decode_frame(signed(body), out)
        assert out.numpy().tobytes() == bytes(RAW_BYTES)


@pytest.mark.parametrize("raw_bytes", [0, 8, RAW_BYTES - 8, RAW_BYTES + 8, 2**40, 2**64 - 8])
def test_raw_bytes_other_than_expected(raw_bytes: int) -> None:
    refused(signed(body_of(constants()), raw_bytes=raw_bytes))


@pytest.mark.parametrize("body_bytes", [0, 16, 100, RAW_BYTES - 1])
def test_body_bytes_other_than_there_are(body_bytes: int) -> None:
    body = body_of(constants())
    refused(signed(body, body_bytes=body_bytes, body_digest=digest(body[:body_bytes])))


@pytest.mark.parametrize("body_bytes", [RAW_BYTES, RAW_BYTES + 1, 2**63, 2**64 - 1])
def test_body_as_long_as_the_chunk(body_bytes: int) -> None:
    refused(signed(body_of(constants()), body_bytes=body_bytes), match="never writes")


@pytest.mark.parametrize("codec", [RAW_CODEC, ANS_CODEC])
def test_body_of_another_codec(codec: int) -> None:
    refused(signed(body_of(constants()), codec=codec), CodecError)


def test_raw_body_with_another_raw_digest() -> None:
    refused(signed(bytes(RAW_BYTES), codec=RAW_CODEC, raw_digest=1), match="the chunk has digest")


@pytest.mark.parametrize("block_bytes", [0, 1, 16, 2048, 4095, 4097, 12_288, 8192, 2**25, 2**30, 2**32 - 1])
def test_block_bytes(block_bytes: int) -> None:
    refused(signed(body_of(constants(), block_bytes=block_bytes)))


@pytest.mark.parametrize("num_planes", [0, 2, 8, 2**32 - 1])
def test_number_of_planes(num_planes: int) -> None:
    refused(signed(body_of(constants(), num_planes=num_planes)), match="planes")


@pytest.mark.parametrize("num_blocks", [0, 1, 8, 10, 2**16, 2**32 - 1])
def test_number_of_blocks(num_blocks: int) -> None:
    refused(signed(body_of(constants(), num_blocks=num_blocks)), match=f"lists {num_blocks} blocks")


@pytest.mark.parametrize("present", [0, 1, 8])
def test_fewer_blocks_than_listed(present: int) -> None:
    refused(signed(body_of(constants(present), num_blocks=NUM_BLOCKS)))


@pytest.mark.parametrize("length", [0, 1, 15])
def test_body_shorter_than_its_preamble(length: int) -> None:
    refused(signed(body_of(constants())[:length]), TruncatedError)


WRONG_LENGTHS = {STORED: (0, 1, 4095, 4097), CODED: (0, 4096, 4097), CONSTANT: (0, 2, 4096), 3: (0, 1, 4096)}


@pytest.mark.parametrize(("kind", "length"), [(kind, n) for kind, lengths in WRONG_LENGTHS.items() for n in lengths])
def test_kinds_and_lengths_that_do_not_go_together(kind: int, length: int) -> None:
    refused(signed(body_of([(kind, bytes(length)), *constants()[1:]])), match="block 0 .* which no writer makes")


@pytest.mark.parametrize(("kind", "length"), [(STORED, 4096), (CODED, 17), (CODED, 4095), (CODED, 2**30 - 1)])
def test_lengths_of_what_is_not_there(kind: int, length: int) -> None:
    refused(signed(body_of([(kind, b"\0"), *constants()[1:]], lengths={0: length})))


def test_longer_body_than_its_blocks() -> None:
    refused(signed(body_of(constants()) + bytes(16)), match="the header promises")


def test_reserved_bits_of_the_preamble() -> None:
    refused(signed(body_of(constants(), reserved=1)), match="zeros")


def test_padding_with_something_in_it() -> None:
    body = body_of(constants())
    table_end = 16 + 4 * NUM_BLOCKS
    for place in range(table_end, table_end + 12):
        refused(signed(body[:place] + b"x" + body[place + 1 :]), match="padding behind the block table")
    refused(signed(body[:-1] + b"x"), match="padding behind a block")
    refused(signed(body_of(constants(), filler=b"x")), match="padding")


def test_a_table_for_more_than_there_is_costs_nothing() -> None:
    """The device decodes without `out` at hand, so the table itself must refuse lengths that the body cannot hold."""
    raw_bytes = 2**44
    preamble = np.array([BLOCK, 1, raw_bytes // BLOCK & 0xFFFF_FFFF, 0], dtype="<u4").view(np.uint8)
    for codec in (ZSTD_CODEC, ANS_CODEC):
        header = honest_header(codec=codec, raw_bytes=raw_bytes, body_bytes=4096)
        with at_most_bytes(1 << 16), pytest.raises(CorruptionError):
            parse_body(header, np.resize(preamble, 4096))
    header = honest_header(raw_bytes=2**32, body_bytes=4096)
    preamble[8:12] = np.array([2**20], dtype="<u4").view(np.uint8)
    with at_most_bytes(1 << 16), pytest.raises(TruncatedError, match="table of 1048576 blocks"):
        parse_body(header, np.resize(preamble, 4096))


def with_size(coded: bytes, num_bytes: int) -> bytes:
    """A single-segment Zstandard frame of a kibibyte or more, telling another content size."""
    descriptor = coded[4]
    assert descriptor >> 5 == 0b011, "not a single segment with a two-byte size"
    return coded[:4] + bytes([0b1110_0000]) + num_bytes.to_bytes(8, "little") + coded[7:]


def compressed(num_bytes: int, *, size_known: bool = True, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_content_size=size_known).compress(bytes(num_bytes))


BOMBS: dict[str, Callable[[], bytes]] = {
    "16-MiB-of-zeros": lambda: compressed(16 << 20),
    "16-MiB-of-zeros-size-unknown": lambda: compressed(16 << 20, size_known=False),
    "one-byte-more": lambda: compressed(BLOCK + 1),
    "one-byte-more-size-unknown": lambda: compressed(BLOCK + 1, size_known=False),
    "one-byte-less": lambda: compressed(BLOCK - 1),
    "one-byte-less-size-unknown": lambda: compressed(BLOCK - 1, size_known=False),
    "promises-an-exbibyte": lambda: with_size(compressed(BLOCK), 2**60),
    "promises-all-there-is": lambda: with_size(compressed(BLOCK), 2**64 - 2),
    "promises-a-block-holds-less": lambda: with_size(compressed(BLOCK - 1), BLOCK),
    "promises-a-block-holds-more": lambda: with_size(compressed(BLOCK + 1), BLOCK),
    "promises-nothing": lambda: with_size(compressed(BLOCK), 0),
    "two-frames": lambda: compressed(BLOCK // 2) * 2,
    "a-frame-and-another": lambda: compressed(BLOCK) + compressed(BLOCK),
    "a-frame-and-a-byte": lambda: compressed(BLOCK) + b"\0",
    "cut": lambda: compressed(BLOCK)[:-1],
    "skippable": lambda: (0x184D2A50).to_bytes(4, "little") + (8).to_bytes(4, "little") + bytes(8),
    "not-zstd": lambda: b"\x1f\x8b" + bytes(30),
    "one-byte": lambda: b"\x28",
}


@pytest.mark.parametrize("name", BOMBS)
def test_zstd_bombs(name: str) -> None:
    coded = BOMBS[name]()
    assert 1 <= len(coded) < BLOCK, "the table would be refused before the block is looked at"
    refused(signed(one_coded(coded)), match="block 0")


def test_a_window_of_32_mebibytes() -> None:
    """Ten bytes that hold the right block but ask the decoder for a window that no block needs."""
    magic = (0xFD2FB528).to_bytes(4, "little")
    run_of_zeros = (BLOCK << 3 | 0b011).to_bytes(3, "little") + b"\0"
    modest, huge = (bytes([0, (log - 10) << 3]) for log in (24, 25))
    out = poisoned(RAW_BYTES)
    decode_frame(signed(one_coded(magic + modest + run_of_zeros)), out)
    assert out.numpy().tobytes() == bytes(RAW_BYTES)
    refused(signed(one_coded(magic + huge + run_of_zeros)), match="block 0 is no Zstandard frame")


def test_a_frame_that_needs_a_dictionary() -> None:
    samples = [b"the quick %d brown %d fox jumps" % (i, i * 7) for i in range(2000)]
    words = zstandard.train_dictionary(1024, samples)
    coded = zstandard.ZstdCompressor(dict_data=words).compress((b"".join(samples))[:BLOCK])
    refused(signed(one_coded(coded)), match="block 0")


@given(
    places=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=8),
    word=st.sampled_from([WordType.F32, WordType.U8, WordType.U64]),
)
@settings(max_examples=150, deadline=None)
def test_damaged_bodies_with_good_checksums(places: list[tuple[int, int]], word: WordType) -> None:
    """Whatever a body holds, it decodes to the right bytes or is refused; nothing else is raised."""
    raw = torch.from_numpy(np.tile(widened(2048, np.random.default_rng(0)), 2).copy())
    frame = poisoned(raw.numel() + 8192)
    header = encode_frame(codec_named("zstd"), raw, word, frame)
    assert header.codec == ZSTD_CODEC
    body = frame.numpy()[64 : header.frame_bytes]
    for place, change in places:
        body[place % body.size] ^= change
    forged = dataclasses.replace(header, body_digest=digest(body))
    frame[:64] = torch.frombuffer(bytearray(forged.pack()), dtype=torch.uint8)
    out = poisoned(raw.numel())
    try:
        assert decode_frame(frame, out) == unpack_header(frame.numpy())
    except CorruptionError:
        return
    assert out.numpy().tobytes() == raw.numpy().tobytes()
