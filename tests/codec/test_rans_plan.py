"""What a GPU's rans encoder asks for is enough for every chunk that it may get."""

from __future__ import annotations

import pytest

from tidegate.codec.device_plan import BUFFER_ALIGNMENT_BYTES
from tidegate.codec.rans_groups import MAX_GROUPS, MAX_TABLES, segments_per_group
from tidegate.codec.rans_plan import RansBuffers, RansPlan, max_segments, rans_encoder_memory
from tidegate.codec.words import WordType

CHUNK_BYTES = (16, 4096, (1 << 20) + 16, 64 << 20, 1 << 30)


@pytest.mark.parametrize("chunk_bytes", CHUNK_BYTES)
@pytest.mark.parametrize("word", list(WordType), ids=lambda word: word.name)
def test_memory_suffices_for_shorter_chunks(word: WordType, chunk_bytes: int) -> None:
    memory = rans_encoder_memory(chunk_bytes)
    for raw_bytes in {word.itemsize, chunk_bytes // 3 // 8 * 8 or 8, chunk_bytes - 8, chunk_bytes}:
        plan = RansPlan(word, raw_bytes)
        assert plan.num_segments * plan.slot_bytes <= memory.slots
        assert plan.num_segments <= max_segments(chunk_bytes)
        assert 1 <= plan.num_tables <= MAX_TABLES
        assert plan.num_tables <= plan.num_blocks, "each block gathers one table at most"
        assert 8 * (plan.num_blocks - 1) < plan.num_segments <= 8 * plan.num_blocks
        assert 8 << plan.group_shift == segments_per_group(plan.num_segments)
        assert plan.num_tables <= -(-plan.num_blocks // (1 << plan.group_shift)) <= MAX_GROUPS
        buffers = RansBuffers.at(0, plan.num_segments)
        assert 1024 * plan.num_blocks <= buffers.block_sums - buffers.counts
        assert 8 * plan.num_blocks <= buffers.block_tables - buffers.block_sums
        assert 4 * plan.num_blocks <= buffers.block_areas - buffers.block_tables
        assert 4 * plan.num_blocks <= buffers.block_streams - buffers.block_areas
        assert 4 * plan.num_blocks <= buffers.entries - buffers.block_streams


@pytest.mark.parametrize("word", list(WordType), ids=lambda word: word.name)
def test_a_slot_holds_a_plain_stream_and_one_tile_more(word: WordType) -> None:
    plan = RansPlan(word, 1 << 20)
    units = 512 // plan.shape.unit_bytes
    longest_plain = 64 + units * plan.shape.segment_tiles
    # The coder stops after the first tile with which the stream is no shorter than a plain one; a word a unit at most.
    assert plan.slot_bytes >= 32 + longest_plain + 2 * units
    assert plan.slot_bytes % 16 == 0


def test_buffers_lie_apart() -> None:
    buffers = RansBuffers.at(1 << 20, 100)
    places = [getattr(buffers, name) for name in RansBuffers.__slots__]
    assert places == sorted(places)
    assert places[0] == 1 << 20
    assert all(place % BUFFER_ALIGNMENT_BYTES == 0 for place in places)
    assert buffers.maps - buffers.infos >= 400
    assert buffers.counts - buffers.maps >= 3200
    assert buffers.directory - buffers.raw_offsets >= 808
    assert rans_encoder_memory(100 * 16384).temp == buffers.end - (1 << 20)


def test_a_short_chunk_is_not_sampled() -> None:
    assert RansPlan(WordType.F16, 2 << 20).spread == 0
    assert RansPlan(WordType.F16, (2 << 20) + 2).spread == 8
    assert RansPlan(WordType.U8, 64 << 20).spread == 0
