"""Tickets of one encoder: several codecs in the same memory, and whole frames put together on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tidegate.codec.availability import device_codecs
from tidegate.codec.base import FRAME_ALIGNMENT_BYTES, RAW_CODEC, FrameHeader, unpack_header
from tidegate.codec.device import DEVICE_CODEC_NUMBERS, DeviceEncoder, device_encoder_bytes
from tidegate.codec.errors import CodecError
from tidegate.codec.words import WordType

from .chunks import CONTENTS, make_chunk, sizes_of
from .conftest import CHUNK_BYTES
from .frames import encode, frame_of, on_device

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def every(device: torch.device, stream: torch.cuda.Stream) -> Iterator[DeviceEncoder]:
    """One encoder of all codecs that work here."""
    available = device_codecs(device)
    yield DeviceEncoder([name for name in DEVICE_CODEC_NUMBERS if name in available], CHUNK_BYTES, device, stream)


def padded(header: FrameHeader, body: torch.Tensor) -> bytes:
    """The padded frame, put together on the host."""
    frame = frame_of(header, body).numpy().tobytes()
    return frame + bytes(header.padded_bytes - len(frame))


def test_small_frame_is_header_body_and_padding(
    encoder: DeviceEncoder, device: torch.device, stream: torch.cuda.Stream
) -> None:
    copying = torch.cuda.Stream(device)
    codec = encoder.codecs[0]
    for word in (WordType.U8, WordType.BF16, WordType.F64):
        for content in CONTENTS:
            for num_bytes in (*list(sizes_of(word))[:7], 4096 - 64, 8192 - 64):
                raw = on_device(make_chunk(content, word, num_bytes), device)
                ticket = encoder.start(raw, word, codec)
                with pytest.raises(CodecError, match="not finished"):
                    ticket.frame(stream)
                header, body = ticket.finish()
                expected = padded(header, body)
                for where in (copying, copying.cuda_stream, stream):
                    frame = ticket.frame(where)
                    torch.cuda.synchronize(device)
                    assert frame.data_ptr() % FRAME_ALIGNMENT_BYTES == 0
                    assert (frame.dtype, frame.device) == (torch.uint8, device)
                    assert frame.cpu().numpy().tobytes() == expected, (content, word, num_bytes)
                assert unpack_header(frame.cpu().numpy()) == header
                ticket.release()
                with pytest.raises(CodecError, match="released"):
                    ticket.frame(stream)


def test_a_slot_is_not_overwritten_before_its_frame_is_read(encoder: DeviceEncoder, device: torch.device) -> None:
    """The frame's copy is held up on another stream; the ticket is released, and the slot used again at once."""
    word, codec = WordType.F32, encoder.codecs[0]
    chunks = [make_chunk("normal", word, 1 << 20, seed=seed) for seed in range(6)]
    raws = [on_device(chunk, device) for chunk in chunks]
    copying = torch.cuda.Stream(device)
    copies, expected = [], []
    for raw in raws:
        ticket = encoder.start(raw, word, codec)
        header, body = ticket.finish()
        expected.append(padded(header, body))
        with torch.cuda.stream(copying):
            torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
            copies.append(ticket.frame(copying).clone())
            copied = torch.cuda.Event()
            copied.record(copying)
        ticket.release(copied)
    torch.cuda.synchronize(device)
    for copy, frame in zip(copies, expected, strict=True):
        assert copy.cpu().numpy().tobytes() == frame


def test_is_done_turns_true_and_does_not_wait(
    encoder: DeviceEncoder, device: torch.device, stream: torch.cuda.Stream
) -> None:
    raw = on_device(make_chunk("normal", WordType.BF16, 1 << 20), device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
    ticket = encoder.start(raw, WordType.BF16, encoder.codecs[0])
    assert not ticket.is_done()
    assert encoder.num_free == 1
    ticket.finish()
    assert ticket.is_done()
    ticket.release()
    assert encoder.num_free == 2
    with pytest.raises(CodecError, match="released"):
        ticket.is_done()


def test_small_codecs_in_turn_make_the_frames_that_they_make_alone(
    every: DeviceEncoder, device: torch.device, stream: torch.cuda.Stream
) -> None:
    words = (WordType.BF16, WordType.F32, WordType.U8, WordType.F64)
    chunks = [
        (make_chunk(content, word, (256 << 10) + 8 * i, seed=i), word)
        for i, (word, content) in enumerate((word, content) for word in words for content in ("normal", "sparse"))
    ]
    alone = {}
    for codec in every.codecs:
        single = DeviceEncoder([codec], CHUNK_BYTES, device, stream)
        alone[codec] = [encode(single, chunk, word, device) for chunk, word in chunks]
        del single
    for i, (chunk, word) in enumerate(chunks):
        for codec in every.codecs:
            header, body = encode(every, chunk, word, device, codec)
            expected, expected_body = alone[codec][i]
            assert header == expected, (codec, i)
            assert header.codec in (RAW_CODEC, DEVICE_CODEC_NUMBERS[codec])
            assert body.cpu().numpy().tobytes() == expected_body.cpu().numpy().tobytes(), (codec, i)


def test_two_codecs_in_flight_at_once(every: DeviceEncoder, device: torch.device) -> None:
    raws = [on_device(make_chunk("normal", WordType.BF16, (1 << 20) + 16 * i, seed=i), device) for i in range(2)]
    first_codec, *others = every.codecs
    for codec in others:
        tickets = [
            every.start(raws[0], WordType.BF16, codec),
            every.start(raws[1], WordType.BF16, first_codec),
        ]
        (header, _), (other, _) = (ticket.finish() for ticket in tickets)
        assert (header.raw_bytes, other.raw_bytes) == tuple(raw.numel() for raw in raws)
        assert header.codec in (RAW_CODEC, DEVICE_CODEC_NUMBERS[codec])
        for ticket in tickets:
            ticket.release()


def test_codecs_share_the_memory_of_the_largest(every: DeviceEncoder, device: torch.device) -> None:
    single = [device_encoder_bytes([codec], CHUNK_BYTES, device=device) for codec in every.codecs]
    assert max(single) <= every.device_bytes == device_encoder_bytes(every.codecs, CHUNK_BYTES, device=device)
    if len(single) > 2:
        assert every.device_bytes < sum(single)


@pytest.mark.parametrize("word", [WordType.BF16, WordType.F32, WordType.F8, WordType.U8], ids=lambda word: word.name)
def test_ans_frames_do_not_depend_on_what_was_in_memory(
    device: torch.device, stream: torch.cuda.Stream, word: WordType
) -> None:
    """A fresh encoder, one whose memory held other chunks, and one whose memory is all ones make the same frame."""
    if "ans" not in device_codecs(device):
        pytest.skip("nvCOMP's ANS does not work here")
    chunk = make_chunk("normal", word, (3 << 20) + 48)
    frames = set()
    for fill in (0x00, 0xFF, 0x5A):
        num_bytes = device_encoder_bytes(["ans"], 4 << 20, device=device)
        with torch.cuda.stream(stream):
            poison = torch.full((num_bytes,), fill, dtype=torch.uint8, device=device)
            del poison  # the encoder's memory is most likely this
        encoder = DeviceEncoder(["ans"], 4 << 20, device, stream)
        for other in (None, "random", "sparse"):
            if other is not None:
                encode(encoder, make_chunk(other, word, 4 << 20), word, device)
            header, body = encode(encoder, chunk, word, device)
            frames.add((header.pack(), body.cpu().numpy().tobytes()))
        del encoder
    assert len(frames) == 1
    assert np.frombuffer(next(iter(frames))[0], dtype=np.uint8)[5] == DEVICE_CODEC_NUMBERS["ans"]
