"""Bodies of many short blocks, as a GPU writes them: every mix of kinds, over the borders of strips, and damage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import zstandard
from numpy.typing import NDArray

from tests.contract.codec_contract import poisoned
from tidegate.codec.base import ZSTD_CODEC, FrameHeader
from tidegate.codec.blocked import BlockKind, pack_table
from tidegate.codec.digest import digest
from tidegate.codec.errors import CorruptionError
from tidegate.codec.frame import decode_frame
from tidegate.codec.words import WordType

Octets = NDArray[np.uint8]
Block = tuple[BlockKind, bytes]

STRIP_BYTES = 1 << 18


def joined(planes: list[Octets], word: WordType) -> Octets:
    """The values whose planes these are, by FRAME.md."""
    values = np.zeros(planes[0].size, dtype=np.uint64)
    for plane in planes:
        values = values << np.uint64(8) | plane
    if word.is_float:
        sign = (values & np.uint64(1)) << np.uint64(8 * word.itemsize - 1)
        values = values >> np.uint64(1) | sign
    return values.astype(f"<u{word.itemsize}").view(np.uint8)


def coded(octets: Octets) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(octets.tobytes())


def frame_of(blocks: list[Block], block_bytes: int, word: WordType, raw: Octets) -> torch.Tensor:
    """The frame of a chunk whose blocks these are, plane by plane."""
    kinds = np.array([kind for kind, _ in blocks], dtype=np.uint8)
    lengths = np.array([len(stored) for _, stored in blocks], dtype=np.int64)
    table = pack_table(block_bytes, word.itemsize, kinds, lengths).tobytes()
    body = table + b"".join(stored + bytes(-len(stored) % 16) for _, stored in blocks)
    header = FrameHeader(ZSTD_CODEC, 1, word, raw.size, len(body), digest(raw), digest(body))
    return torch.frombuffer(bytearray(header.pack() + body), dtype=torch.uint8)


def check(planes: list[Octets], blocks: list[Block], block_bytes: int, word: WordType) -> None:
    raw = joined(planes, word)
    back = poisoned(raw.size)
    decode_frame(frame_of(blocks, block_bytes, word, raw), back)
    assert back.numpy().tobytes() == raw.tobytes()


def runs(count: int, rng: np.random.Generator) -> Iterator[int]:
    """Kinds of `count` blocks, alone and in rows of up to a hundred; 3 is a constant that differs from the others.

    The first is constant, so that the body is shorter than the chunk whatever is drawn.
    """
    kinds = [int(BlockKind.CONSTANT)]
    while len(kinds) < count:
        kinds += [int(rng.integers(4))] * int(rng.choice([1, 1, 2, 5, 100]))
    yield from kinds[:count]


def plane_and_blocks(num_bytes: int, block_bytes: int, rng: np.random.Generator) -> tuple[Octets, list[Block]]:
    """A plane of blocks of every kind, and how they are stored."""
    plane = np.empty(num_bytes, dtype=np.uint8)
    blocks: list[Block] = []
    for kind, begin in zip(runs(-(-num_bytes // block_bytes), rng), range(0, num_bytes, block_bytes), strict=True):
        place = plane[begin : begin + block_bytes]
        if kind == BlockKind.CODED:
            place[:] = rng.integers(0, 40, place.size)
            blocks.append((BlockKind.CODED, coded(place)))
        elif kind == BlockKind.STORED:
            place[:] = rng.integers(0, 256, place.size)
            blocks.append((BlockKind.STORED, place.tobytes()))
        else:
            place[:] = 0x3F if kind == BlockKind.CONSTANT else rng.integers(256)
            blocks.append((BlockKind.CONSTANT, place[:1].tobytes()))
    return plane, blocks


SMALL = [
    (word, block_bytes, count)
    for word, block_bytes in [
        (WordType.U8, 4096),
        (WordType.F8, 16_384),
        (WordType.U16, 16_384),
        (WordType.BF16, 8192),
        (WordType.F32, 4096),
        (WordType.F32, 16_384),
        (WordType.U64, 16_384),
        (WordType.F64, 65_536),
    ]
    for count in (STRIP_BYTES - 1, STRIP_BYTES, 2 * STRIP_BYTES + 3 * block_bytes + 1001)
]
LONG = [
    (word, block_bytes, 2 * block_bytes + 1001)
    for word in (WordType.U8, WordType.BF16, WordType.F32)
    for block_bytes in (STRIP_BYTES, 2 * STRIP_BYTES, 4 * STRIP_BYTES)
]


@pytest.mark.parametrize(("word", "block_bytes", "count"), SMALL + LONG)
def test_every_mix_of_blocks(word: WordType, block_bytes: int, count: int) -> None:
    rng = np.random.default_rng([word, block_bytes, count])
    drawn = [plane_and_blocks(count, block_bytes, rng) for _ in range(word.itemsize)]
    check([plane for plane, _ in drawn], [block for _, blocks in drawn for block in blocks], block_bytes, word)


@pytest.mark.parametrize("octet", [0, 1, 0xFF])
@pytest.mark.parametrize("word", [WordType.U16, WordType.F32, WordType.U64], ids=lambda word: word.name)
def test_planes_that_are_constant(word: WordType, octet: int) -> None:
    """Every set of constant planes; of eight planes, every set of an even number."""
    count, block_bytes = 40_000, 16_384
    noise = np.random.default_rng(octet).integers(0, 256, (word.itemsize, count), dtype=np.uint8)
    constant = np.full(count, octet, dtype=np.uint8)
    for chosen in itertools.product([True, False], repeat=word.itemsize):
        if not any(chosen) or (word.itemsize == 8 and sum(chosen) % 2):
            continue
        planes, blocks = list(noise), list[Block]()
        for plane, is_constant in enumerate(chosen):
            if is_constant:
                planes[plane] = constant
            for begin in range(0, count, block_bytes):
                cut = planes[plane][begin : begin + block_bytes].tobytes()
                blocks.append((BlockKind.CONSTANT, cut[:1]) if is_constant else (BlockKind.STORED, cut))
        check(planes, blocks, block_bytes, word)


LIES = {
    "a byte behind it": lambda octets: coded(octets) + b"\0",
    "another frame behind it": lambda octets: coded(octets[:2048]) + coded(octets[2048:]),
    "a byte less": lambda octets: coded(octets[:-1]),
    "a byte more": lambda octets: coded(np.append(octets, octets[:1])),
    "cut": lambda octets: coded(octets)[:-1],
    "no frame": lambda octets: bytes(100),
}


@pytest.mark.parametrize("index", [0, 1, 63, 64, 99, 100, 163, 164, 199])
@pytest.mark.parametrize("lie", LIES)
def test_one_bad_block_among_many_is_named(lie: str, index: int) -> None:
    """Two planes of a hundred blocks: strips end behind the blocks 63, 99, 163 and 199."""
    word, block_bytes = WordType.BF16, 4096
    plane = np.random.default_rng(5).integers(0, 40, 100 * block_bytes, dtype=np.uint8)
    cuts = plane.reshape(100, block_bytes)
    blocks: list[Block] = [
        (BlockKind.STORED, cut.tobytes()) if i % 7 in (3, 4) else (BlockKind.CODED, coded(cut))
        for i, cut in enumerate(cuts)
    ] * 2
    check([plane, plane], blocks, block_bytes, word)
    blocks[index] = (BlockKind.CODED, LIES[lie](cuts[index % 100]))
    frame = frame_of(blocks, block_bytes, word, joined([plane, plane], word))
    with pytest.raises(CorruptionError, match=f"block {index} "):
        decode_frame(frame, poisoned(2 * plane.size))
