"""The table of a blocked body: what is packed is what is parsed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.codec.base import CODEC_VERSIONS, RANS_CODEC, RAW_CODEC, SPLIT_CODECS, ZSTD_CODEC, FrameHeader
from tidegate.codec.blocked import (
    BlockKind,
    block_offsets,
    blocks_start,
    check_padding,
    count_blocks,
    num_planes_of,
    pack_table,
    packed_body_bytes,
    parse_body,
    raw_block_sizes,
    table_bytes,
)
from tidegate.codec.errors import CorruptionError, TruncatedError
from tidegate.codec.words import WordType

WORDS = st.sampled_from(list(WordType))
BLOCKED = st.sampled_from([number for number in CODEC_VERSIONS if number not in (RAW_CODEC, RANS_CODEC)])


@given(word=WORDS, count=st.integers(0, 1 << 22), log=st.integers(12, 24))
def test_block_sizes(word: WordType, count: int, log: int) -> None:
    raw_bytes, planes = count * word.itemsize, word.itemsize
    sizes = raw_block_sizes(raw_bytes, planes, 1 << log)
    assert sizes.size == count_blocks(raw_bytes, planes, 1 << log) == planes * -(-count // (1 << log))
    assert sizes.sum() == raw_bytes
    for plane in np.split(sizes, planes):
        assert (plane[:-1] == 1 << log).all()
        assert plane.sum() == count


@given(word=WORDS, draw=st.data(), log=st.sampled_from([12, 13, 16, 24]), codec=BLOCKED)
@settings(deadline=None)
def test_pack_and_parse(word: WordType, draw: st.DataObject, log: int, codec: int) -> None:
    count = draw.draw(st.integers(1, 40_000))
    raw_bytes = count * word.itemsize
    planes = word.itemsize if codec in SPLIT_CODECS else 1
    sizes = raw_block_sizes(raw_bytes, planes, 1 << log)
    rng = np.random.default_rng(draw.draw(st.integers(0, 1000)))
    kinds = rng.integers(0, 3, sizes.size).astype(np.uint8)
    kinds[(kinds == BlockKind.CODED) & (sizes < 2)] = BlockKind.STORED
    coded = rng.integers(1, np.maximum(sizes, 2))
    stored = np.choose(kinds, [sizes, coded, np.ones_like(sizes)])
    table = pack_table(1 << log, planes, kinds, stored)
    assert table.size == blocks_start(sizes.size) == -(-(16 + 4 * sizes.size) // 16) * 16
    assert table[:16].view("<u4").tolist() == [1 << log, planes, sizes.size, 0]
    assert (table[16 : 16 + 4 * sizes.size].view("<u4") == kinds.astype(np.int64) * 2**30 + stored).all()
    body_bytes = packed_body_bytes(stored)
    if body_bytes >= raw_bytes:
        return
    header = FrameHeader(codec, 1, word, raw_bytes, body_bytes, 0, 0)
    assert num_planes_of(header) == planes
    assert table_bytes(header, table[:16]) == table.size
    parsed = parse_body(header, table)
    assert (parsed.block_bytes, parsed.num_planes) == (1 << log, planes)
    for got, expected in ((parsed.kinds, kinds), (parsed.stored_bytes, stored), (parsed.raw_sizes, sizes)):
        assert got.tobytes() == expected.tobytes()
    assert parsed.offsets.tobytes() == block_offsets(stored).tobytes()
    assert (parsed.offsets % 16 == 0).all()
    ends = parsed.offsets + -(-stored // 16) * 16
    assert parsed.offsets[0] == table.size
    assert (parsed.offsets[1:] == ends[:-1]).all()
    assert ends[-1] == body_bytes
    body = np.zeros(body_bytes, dtype=np.uint8)
    for offset, length in zip(parsed.offsets, stored, strict=True):
        body[offset : offset + length] = 0xFF
    check_padding(parsed, body)


@pytest.mark.parametrize("num_bytes", [0, 15, 16, 47])
def test_a_short_start_is_truncated(num_bytes: int) -> None:
    sizes = raw_block_sizes(40_000, 4, 4096)
    table = pack_table(4096, 4, np.full(sizes.size, 2, dtype=np.uint8), np.ones_like(sizes))
    header = FrameHeader(ZSTD_CODEC, 1, WordType.F32, 40_000, packed_body_bytes(np.ones_like(sizes)), 0, 0)
    with pytest.raises(TruncatedError, match=f"{num_bytes} bytes"):
        parse_body(header, table[:num_bytes])


@pytest.mark.parametrize("gap", range(15))
def test_every_padding_byte_is_looked_at(gap: int) -> None:
    kinds = np.array([BlockKind.CONSTANT, BlockKind.CODED], dtype=np.uint8)
    stored = np.array([1, 33], dtype=np.int64)
    header = FrameHeader(ZSTD_CODEC, 1, WordType.U16, 1000, packed_body_bytes(stored), 0, 0)
    body = np.concatenate([pack_table(4096, 2, kinds, stored), np.zeros(64, dtype=np.uint8)])
    table = parse_body(header, body)
    check_padding(table, body)
    for block in range(2):
        damaged = body.copy()
        damaged[table.offsets[block] + stored[block] + gap] = 1
        with pytest.raises(CorruptionError, match="padding"):
            check_padding(table, damaged)
