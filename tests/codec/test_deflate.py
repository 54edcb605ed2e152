"""The deflate codec on the CPU: streams that other writers make, and streams made to harm."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.contract.codec_contract import poisoned, tensor_of, widened
from tidegate.codec.base import DEFLATE_CODEC, HEADER_BYTES, FrameHeader, frame_bound_bytes, unpack_header
from tidegate.codec.blocked import BlockKind, pack_table, packed_body_bytes, parse_body
from tidegate.codec.deflate import BLOCK_BYTES
from tidegate.codec.digest import digest
from tidegate.codec.errors import CorruptionError
from tidegate.codec.frame import decode_frame, encode_frame
from tidegate.codec.planes import extract_plane
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType

BLOCK = 4096


def raw_deflate(octets: bytes, level: int = 9, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    compressor = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy)
    return compressor.compress(octets) + compressor.flush()


def frame_of(word: WordType, raw: NDArray[np.uint8], stored: list[bytes], kinds: list[BlockKind]) -> torch.Tensor:
    """A frame of blocks of BLOCK bytes, as nvCOMP 6 would sign it."""
    lengths = np.array([len(block) for block in stored], dtype=np.int64)
    table = pack_table(BLOCK, word.itemsize, np.array(kinds, dtype=np.uint8), lengths).tobytes()
    body = table + b"".join(block + bytes(-len(block) % 16) for block in stored)
    assert len(body) == packed_body_bytes(lengths)
    header = FrameHeader(DEFLATE_CODEC, 1, word, raw.size, len(body), digest(raw), digest(body), parameter=6)
    return torch.frombuffer(bytearray(header.pack() + body), dtype=torch.uint8)


def test_every_kind_of_block() -> None:
    raw = tensor_of(widened(3 * BLOCK_BYTES + 5, np.random.default_rng(1)))
    out, back = poisoned(frame_bound_bytes(raw.numel())), poisoned(raw.numel())
    header = encode_frame(codec_named("deflate"), raw, WordType.F32, out)
    decode_frame(out, back)
    assert torch.equal(back, raw)
    assert (header.codec, header.parameter) == (DEFLATE_CODEC, 0)
    table = parse_body(unpack_header(out.numpy()), out.numpy()[HEADER_BYTES:])
    assert table.block_bytes == BLOCK_BYTES
    assert set(table.kinds.tolist()) == set(BlockKind)


@pytest.mark.parametrize("strategy", [zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY, zlib.Z_FIXED])
@pytest.mark.parametrize("after", [b"", b"\0", b"\0" * 7, b"anything"])
@pytest.mark.parametrize("word", [WordType.U8, WordType.BF16, WordType.F64], ids=lambda word: word.name)
def test_streams_of_other_writers(word: WordType, after: bytes, strategy: int) -> None:
    count = 2 * BLOCK + 17
    raw = (np.random.default_rng(2).integers(0, 3, count * word.itemsize, dtype=np.uint8) * 5).astype(np.uint8)
    stored, kinds = [], []
    for plane in range(word.itemsize):
        octets = extract_plane(raw, word, plane, np.empty(count, dtype=np.uint8)).tobytes()
        for begin in range(0, count, BLOCK):
            block = octets[begin : begin + BLOCK]
            coded = raw_deflate(block, strategy=strategy) + after
            stored.append(coded if len(coded) < len(block) else block)
            kinds.append(BlockKind.CODED if len(coded) < len(block) else BlockKind.STORED)
    back = poisoned(raw.size)
    decode_frame(frame_of(word, raw, stored, kinds), back)
    assert back.numpy().tobytes() == raw.tobytes()


HARMFUL: dict[str, Callable[[], bytes]] = {
    "1-MiB-of-zeros": lambda: raw_deflate(bytes(1 << 20)),
    "one-byte-more": lambda: raw_deflate(bytes(BLOCK + 1)),
    "one-byte-less": lambda: raw_deflate(bytes(BLOCK - 1)),
    "cut": lambda: raw_deflate(bytes(BLOCK))[:-1],
    "nothing-but-a-header-byte": lambda: b"\x01",
    "reserved-block-type": lambda: b"\x07" + bytes(40),
    "zlib-wrapped": lambda: zlib.compress(bytes(BLOCK)),
    "two-halves": lambda: raw_deflate(bytes(BLOCK // 2)) * 2,
    "garbage": lambda: np.random.default_rng(3).integers(0, 256, 100, dtype=np.uint8).tobytes(),
}


@pytest.mark.parametrize("harm", HARMFUL)
def test_harmful_streams_are_refused_at_no_cost(harm: str) -> None:
    raw = np.zeros(9 * BLOCK, dtype=np.uint8)
    frame = frame_of(WordType.U8, raw, [HARMFUL[harm](), *[b"\0"] * 8], [BlockKind.CODED, *[BlockKind.CONSTANT] * 8])
    back = poisoned(raw.size)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="block 0"):
            decode_frame(frame, back)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
