"""What the GPU codecs compute without a GPU: the cut of a chunk, the digest's end, and who may import what."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
import xxhash

from tidegate.codec.availability import device_codecs, require_device_codec, unavailable_reason
from tidegate.codec.base import frame_bound_bytes
from tidegate.codec.device_blocks import memory_of
from tidegate.codec.device_plan import (
    BlockLayout,
    NvcompNeeds,
    encoder_memory,
    lay_out,
    max_blocks,
    merged,
    raw_encoder_memory,
)
from tidegate.codec.device_report import TAIL_WORDS, digest_words, read_digest
from tidegate.codec.digest import PIECE_BYTES, digest
from tidegate.codec.errors import CodecError, CodecUnavailableError, UnknownCodecError
from tidegate.codec.nvcomp_codecs import NVCOMP_CODECS
from tidegate.codec.words import WordType


def layouts() -> list[BlockLayout]:
    return [
        lay_out(codec, word, values * word.itemsize, block_bytes)
        for codec in NVCOMP_CODECS
        for word in WordType
        for values in (1, 100, 4095, 4096, 4097, 70_001)
        for block_bytes in (4096, 65536)
    ]


@pytest.mark.parametrize("max_candidates", [1, 3, 1000])
def test_batches_cover_every_block_and_candidate_once(max_candidates: int) -> None:
    for layout in layouts():
        batches = list(layout.batches(max_candidates))
        assert batches[0].low == 0
        assert batches[-1].high == layout.num_blocks
        assert sum(batch.count for batch in batches) == layout.num_candidates
        for before, after in itertools.pairwise(batches):
            assert (before.high, before.first + before.count) == (after.low, after.first)
        for batch in batches:
            assert batch.count <= max_candidates
            blocks = {
                plane * layout.blocks_per_plane + index
                for plane, index in (
                    divmod(candidate, layout.coded_per_plane)
                    for candidate in range(batch.first, batch.first + batch.count)
                )
            }
            assert blocks <= set(range(batch.low, batch.high))


def test_no_layout_has_more_blocks_than_the_encoder_has_room_for() -> None:
    for layout in layouts():
        assert layout.num_blocks <= max_blocks(layout.raw_bytes, layout.num_planes, layout.block_bytes)
        assert layout.plane_stride * layout.num_planes <= layout.raw_bytes + 256 * layout.num_planes


def test_exponents_are_coded_and_short_ends_are_not() -> None:
    assert lay_out("zstd", WordType.BF16, 2 * 65536, 65536).num_candidates == 1
    assert lay_out("zstd", WordType.F64, 8 * 65536, 65536).num_candidates == 2
    assert lay_out("zstd", WordType.U32, 4 * 65536, 65536).num_candidates == 4
    assert lay_out("zstd", WordType.U32, 4 * (65536 + 255), 65536).num_candidates == 4
    assert lay_out("zstd", WordType.U32, 4 * (65536 + 256), 65536).num_candidates == 8
    assert lay_out("ans", WordType.F64, 8 * 65536, 65536).num_candidates == 8


def test_memory_grows_by_one_body_and_report_a_slot() -> None:
    memory = encoder_memory("zstd", 1 << 20, 65536, NvcompNeeds(65552, 1000))
    slot_bytes = memory.total_bytes(2) - memory.total_bytes(1)
    assert memory.total_bytes(3) - memory.total_bytes(2) == slot_bytes >= frame_bound_bytes(1 << 20)


@pytest.mark.parametrize("chunk_bytes", [16, 1 << 20, (1 << 26) + 48])
def test_codecs_share_memory(chunk_bytes: int) -> None:
    memories = [
        encoder_memory(name, chunk_bytes, codec.block_bytes, NvcompNeeds(codec.block_bytes + 100 * codec.number, 1000))
        for name, codec in NVCOMP_CODECS.items()
    ]
    both = merged([raw_encoder_memory(chunk_bytes), *memories])
    for memory in memories:
        assert all(getattr(both, field.name) >= getattr(memory, field.name) for field in dataclasses.fields(memory))
    assert merged(memories[:1]) == memories[0]
    assert both.total_bytes(2) < sum(memory.total_bytes(2) for memory in memories)
    assert both.frame % 4096 == 0
    assert both.frame - 64 >= -(-chunk_bytes // 16) * 16


def test_unknown_codecs_and_block_sizes_are_refused() -> None:
    cpu = torch.device("cpu", 0)
    with pytest.raises(UnknownCodecError, match="no codec 'snappy'; it has raw, zstd, ans, gdeflate, deflate"):
        memory_of(["raw", "snappy"], 1 << 20, None, cpu)
    with pytest.raises(CodecError, match="name at least one codec"):
        memory_of([], 1 << 20, None, cpu)
    for codec, block_bytes in (("ans", 2048), ("ans", 3 << 12), ("ans", 1 << 25), ("gdeflate", 1 << 17)):
        with pytest.raises(CodecError, match=f"blocks of {block_bytes} bytes do not suit {codec}; .* power of two"):
            memory_of([codec], 1 << 20, {codec: block_bytes}, cpu)


@pytest.mark.parametrize("num_bytes", [0, 1, 240, 241, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 240])
def test_digest_is_finished_on_the_host(num_bytes: int) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    words = np.full(digest_words(num_bytes), 0xAAAA, dtype=np.uint64)
    for i in range(-(-num_bytes // PIECE_BYTES)):
        piece = source[i * PIECE_BYTES : (i + 1) * PIECE_BYTES]
        if piece.size > 240:
            words[TAIL_WORDS + i] = xxhash.xxh3_64_intdigest(piece.tobytes())
        else:
            words.view(np.uint8)[: piece.size] = piece
    assert read_digest(words, num_bytes) == digest(source)


def test_a_cpu_has_no_device_codecs() -> None:
    cpu = torch.device("cpu")
    assert device_codecs(cpu) == frozenset()
    assert "no NVIDIA GPU" in str(unavailable_reason("zstd", cpu))
    with pytest.raises(CodecUnavailableError, match="codec ans cannot run on cpu"):
        require_device_codec("ans", cpu)
    assert "there are raw, zstd, ans, gdeflate" in str(unavailable_reason("snappy", cpu))


def test_nothing_imports_cupy_or_nvcomp_before_a_gpu_is_used() -> None:
    code = (
        "import sys, torch; import tidegate.codec.availability as a; a.device_codecs(torch.device('cpu'));"
        "print([m for m in sys.modules if m.split('.')[0] == 'cupy' or m.startswith('nvidia.')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
