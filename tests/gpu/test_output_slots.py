"""nvCOMP's output slots hold zeros between chunks, and what was in them before never shows in a frame.

The gather clears what nvCOMP says it wrote. That is enough only while nvCOMP writes nothing behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from tidegate.codec.availability import device_codecs, unavailable_reason
from tidegate.codec.base import FrameHeader
from tidegate.codec.device import DEVICE_CODEC_NUMBERS, DeviceEncoder
from tidegate.codec.device_blocks import _CLEARED_BY_GATHER
from tidegate.codec.words import WordType

from .chunks import CONTENTS, make_chunk, sizes_of
from .conftest import CHUNK_BYTES
from .frames import encode

pytestmark = pytest.mark.gpu

chunk_of = functools.cache(make_chunk)


@pytest.fixture(scope="module", params=sorted(_CLEARED_BY_GATHER))
def cleared(request: pytest.FixtureRequest, device: torch.device) -> str:
    reason = unavailable_reason(request.param, device)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def fresh(cleared: str, device: torch.device, stream: torch.cuda.Stream) -> Iterator[DeviceEncoder]:
    yield DeviceEncoder([cleared], CHUNK_BYTES, device, stream)


def num_dirty_bytes(encoder: DeviceEncoder) -> int:
    torch.cuda.synchronize()
    return int(torch.count_nonzero(encoder._buffers.slots.memory))


def frame_bytes(
    encoder: DeviceEncoder, content: str, word: WordType, num_bytes: int, device: torch.device, codec: str
) -> bytes:
    header, body = encode(encoder, chunk_of(content, word, num_bytes), word, device, codec)
    return header.pack() + body.cpu().numpy().tobytes()


def test_small_slots_are_zero_after_every_chunk(fresh: DeviceEncoder, device: torch.device) -> None:
    encode(fresh, chunk_of("normal", WordType.BF16, CHUNK_BYTES), WordType.BF16, device)
    for word in WordType:
        for content in CONTENTS:
            for num_bytes in (*sizes_of(word), (3 << 20) + 48, CHUNK_BYTES):
                encode(fresh, chunk_of(content, word, num_bytes), word, device)
                assert num_dirty_bytes(fresh) == 0, f"{num_bytes} bytes of {content} {word.name}"


@pytest.mark.parametrize("word", [WordType.BF16, WordType.F32, WordType.F64, WordType.U8], ids=lambda word: word.name)
def test_a_frame_does_not_depend_on_the_chunk_before(
    fresh: DeviceEncoder, cleared: str, device: torch.device, word: WordType
) -> None:
    chunks = [(content, num_bytes) for content in ("normal", "sparse") for num_bytes in (CHUNK_BYTES, (1 << 20) + 48)]
    expected = [frame_bytes(fresh, content, word, num_bytes, device, cleared) for content, num_bytes in chunks]
    for other in WordType:
        for content in CONTENTS:
            for (mine, num_bytes), frame in zip(chunks, expected, strict=True):
                frame_bytes(fresh, content, other, CHUNK_BYTES, device, cleared)
                found = frame_bytes(fresh, mine, word, num_bytes, device, cleared)
                assert found == frame, f"{num_bytes} bytes of {mine} {word.name} after {content} {other.name}"


def test_a_frame_does_not_depend_on_the_codec_before(
    cleared: str, device: torch.device, stream: torch.cuda.Stream
) -> None:
    available = device_codecs(device)
    every = DeviceEncoder([name for name in DEVICE_CODEC_NUMBERS if name in available], CHUNK_BYTES, device, stream)
    words = (WordType.BF16, WordType.F32)
    expected = {word: frame_bytes(every, "normal", word, CHUNK_BYTES, device, cleared) for word in words}
    for codec in every.codecs:
        for content in ("normal", "sparse", "random"):
            for word in words:
                frame_bytes(every, content, word, CHUNK_BYTES, device, codec)
                assert frame_bytes(every, "normal", word, CHUNK_BYTES, device, cleared) == expected[word], codec
                assert num_dirty_bytes(every) == 0, f"after {content} {word.name} by {codec}"


def test_large_chunks_leave_zeros_and_equal_frames(
    cleared: str, device: torch.device, stream: torch.cuda.Stream
) -> None:
    """Chunks of 64 MiB; between them one of several batches, whose slots are filled with zeros beforehand."""
    encoder = DeviceEncoder([cleared], 192 << 20, device, stream)
    generator = torch.Generator(device).manual_seed(3)
    values = torch.randn(48 << 20, generator=generator, device=device).mul_(0.02)
    large = values.view(torch.uint8)
    dense = large[: 64 << 20]
    half = values[: 32 << 20].to(torch.bfloat16).view(torch.uint8)
    rich = torch.where(values[: 16 << 20] > 0.02, values[: 16 << 20], 0).view(torch.uint8)
    noise = torch.randint(0, 256, (64 << 20,), generator=generator, device=device, dtype=torch.uint8)
    chunks = [(dense, WordType.F32), (half, WordType.BF16), (rich, WordType.F32), (noise, WordType.U8)]
    torch.cuda.synchronize(device)
    frames: list[list[tuple[FrameHeader, torch.Tensor]]] = [[] for _ in chunks]
    for _ in range(2):
        for kept, (chunk, word) in zip(frames, chunks, strict=True):
            kept.append(_encode(encoder, chunk, word, cleared))
            assert num_dirty_bytes(encoder) == 0, word.name
        _encode(encoder, large, WordType.F32, cleared)
    for (header, body), (again, second) in frames:
        assert header == again
        assert torch.equal(body, second)


def test_a_failure_between_two_chunks_is_made_good(fresh: DeviceEncoder, cleared: str, device: torch.device) -> None:
    """As after a chunk that was not enqueued to its end: the slots hold anything, and are noted to."""
    word = WordType.BF16
    expected = frame_bytes(fresh, "normal", word, CHUNK_BYTES, device, cleared)
    slots = fresh._buffers.slots
    slots.memory.fill_(0xA5)
    torch.cuda.synchronize(device)
    slots.mark_written(slots.memory.numel())
    assert frame_bytes(fresh, "normal", word, CHUNK_BYTES, device, cleared) == expected
    assert num_dirty_bytes(fresh) == 0


def _encode(
    encoder: DeviceEncoder, chunk: torch.Tensor, word: WordType, codec: str
) -> tuple[FrameHeader, torch.Tensor]:
    ticket = encoder.start(chunk, word, codec)
    header, body = ticket.finish()
    copy = body.clone()
    torch.cuda.synchronize(chunk.device)
    ticket.release()
    return header, copy
