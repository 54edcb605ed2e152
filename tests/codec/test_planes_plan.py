"""What a GPU's planes encoder asks for is enough for every chunk that it may get."""

from __future__ import annotations

import itertools

import pytest

from tidegate.codec.base import PLANES_CODEC
from tidegate.codec.device_plan import BUFFER_ALIGNMENT_BYTES
from tidegate.codec.planes_body import STREAMS, stream_sizes
from tidegate.codec.planes_plan import PLANES_ON_GPU, PlanesRoom, planes_encoder_memory
from tidegate.codec.rans_plan import MIN_RAW_BYTES, rans_encoder_memory
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType

CHUNK_BYTES = (16, 4096, (1 << 20) + 16, 64 << 20, 1 << 30)
NAMES = pytest.mark.parametrize("name", PLANES_ON_GPU)


@NAMES
@pytest.mark.parametrize("chunk_bytes", CHUNK_BYTES)
@pytest.mark.parametrize("word", list(WordType), ids=lambda word: word.name)
def test_memory_suffices_for_shorter_chunks(name: str, word: WordType, chunk_bytes: int) -> None:
    memory, rans = planes_encoder_memory(name, chunk_bytes), rans_encoder_memory(chunk_bytes)
    for raw_bytes in {word.itemsize, chunk_bytes // 3 // 8 * 8 or 8, chunk_bytes // word.itemsize * word.itemsize}:
        assert PlanesRoom.at(0, name, word, raw_bytes).end <= memory.planes
        # rans is made for streams of up to a chunk; it gets none of these.
        assert max(stream_sizes(word, raw_bytes)) <= max(raw_bytes, MIN_RAW_BYTES - 1)
    assert (memory.slots, memory.temp, memory.report, memory.frame) == (rans.slots, rans.temp, rans.report, rans.frame)


@NAMES
@pytest.mark.parametrize("word", list(WordType), ids=lambda word: word.name)
@pytest.mark.parametrize("num_values", [1, 97, 100_003])
def test_streams_lie_apart(name: str, word: WordType, num_values: int) -> None:
    begin = 1 << 20
    room = PlanesRoom.at(begin, name, word, num_values * word.itemsize)
    spans = [(room.reports, room.reports + 32 * len(STREAMS))]
    for part in room.streams:
        spans += [(place, place + part.num_bytes) for place in (part.place, part.coded) if place]
        assert room.reports <= part.report < room.reports + 32 * len(STREAMS)
    assert spans == sorted(spans)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert start % BUFFER_ALIGNMENT_BYTES == 0
        assert start >= -(-end // 16) * 16, "the kernels read and write whole 16 bytes"
    assert room.end >= spans[-1][1]


@NAMES
def test_the_cpu_has_the_codec_of_that_name(name: str) -> None:
    assert codec_named(name).number == PLANES_CODEC


def test_only_streams_that_are_routed_to_rans_have_room_for_it() -> None:
    plain, every = (PlanesRoom.at(256, name, WordType.F32, 1 << 20) for name in PLANES_ON_GPU)
    assert [bool(part.coded) for part in plain.streams] == [True, True, False]
    assert [bool(part.coded) for part in every.streams] == [True, True, True]
    assert [bool(part.coded) for part in PlanesRoom.at(256, "planes", WordType.F32, 64).streams] == [False] * 3
