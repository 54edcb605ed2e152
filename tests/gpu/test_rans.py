"""rans on a GPU: the bytes that the CPU writes, exact for every value, and safe with any bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tidegate.codec.availability import unavailable_reason
from tidegate.codec.base import HEADER_BYTES, RANS_CODEC, FrameHeader, frame_bound_bytes, unpack_header
from tidegate.codec.device import DeviceDecoder, DeviceEncoder
from tidegate.codec.device_decode import prefix_bytes
from tidegate.codec.digest import digest
from tidegate.codec.errors import CodecError, CorruptionError, UnknownCodecError
from tidegate.codec.frame import decode_frame, encode_frame
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType

from .chunks import CONTENTS, make_chunk
from .frames import check_frame, count_refused, decode, encode, frame_of, on_device, read_on_cpu

pytestmark = pytest.mark.gpu

WORDS = pytest.mark.parametrize("word", list(WordType), ids=lambda word: word.name)
CHUNK_BYTES = 8 << 20
TILE_BYTES = 512
GROUP_BYTES = 128 << 10
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "frames"


@pytest.fixture(scope="module")
def encoder(device: torch.device, stream: torch.cuda.Stream) -> Iterator[DeviceEncoder]:
    reason = unavailable_reason("rans", device)
    if reason is not None:
        pytest.skip(reason)
    yield DeviceEncoder(["rans"], CHUNK_BYTES, device, stream)


@pytest.fixture(scope="module")
def decoder(device: torch.device, stream: torch.cuda.Stream) -> DeviceDecoder:
    return DeviceDecoder(CHUNK_BYTES, device, stream)


def on_cpu(chunk: NDArray[np.uint8], word: WordType) -> NDArray[np.uint8]:
    """The frame that the CPU makes."""
    frame = torch.zeros(frame_bound_bytes(chunk.size), dtype=torch.uint8)
    header = encode_frame(codec_named("rans"), torch.from_numpy(chunk.copy()), word, frame)
    return frame[: header.frame_bytes].numpy()


def check_all(
    encoder: DeviceEncoder, decoder: DeviceDecoder, chunk: NDArray[np.uint8], word: WordType, device: torch.device
) -> FrameHeader:
    """Hold a chunk's frame against the CPU's, and read it on both."""
    header = check_frame(encoder, decoder, chunk, word, device)
    frame = frame_of(*encode(encoder, chunk, word, device)).numpy()
    expected = on_cpu(chunk, word)
    differs = np.flatnonzero(frame[: expected.size] != expected[: frame.size])
    assert frame.size == expected.size
    assert not differs.size, f"byte {differs[0]} of {frame.size} is the first of {differs.size} that differ"
    return header


def special_chunk(kind: str, word: WordType, num_bytes: int) -> NDArray[np.uint8]:
    """A chunk with what sets a flag of a segment, or makes a coder change its mind."""
    rng = np.random.default_rng([word, num_bytes])
    chunk = make_chunk("normal", word, num_bytes).copy()
    tops = chunk.reshape(-1, word.itemsize)[:, -1]
    match kind:
        case "one-sign-0":
            tops &= 0x7F
        case "one-sign-1":
            tops |= 0x80
        case "short":
            chunk.reshape(-1, word.itemsize)[:, : word.itemsize // 2] = 0
        case "zero-tiles":
            tiles = chunk[: num_bytes // TILE_BYTES * TILE_BYTES].reshape(-1, TILE_BYTES)
            tiles[rng.random(len(tiles)) < 0.6] = 0
        case "rare":  # symbols that a sampled table lacks
            tops[:: max(1, len(tops) // 7)] = 0x7F
        case "mixed":  # plain, zero, constant and coded segments side by side
            segments = np.array_split(chunk, 9)
            segments[1][:] = rng.integers(0, 256, segments[1].size)
            segments[4][:] = 0
            segments[6][:] = 0x3C
        case "zeros":  # here and there, beside what is nearly 0
            values = values_of(chunk, word)
            values[3::17] = 1 << (8 * word.itemsize - 1)
            values[5::19] = rng.integers(1, 128, values[5::19].size)
            values[rng.random(values.size) < 0.3] = 0
        case "zeros-and-zero-tiles":
            values = values_of(chunk, word)
            values[rng.random(values.size) < 0.5] = 0
            chunk[: num_bytes // TILE_BYTES * TILE_BYTES].reshape(-1, TILE_BYTES)[1::5] = 0
        case "short-zeros":
            chunk.reshape(-1, word.itemsize)[:, : word.itemsize // 2] = 0
            values_of(chunk, word)[rng.random(num_bytes // word.itemsize) < 0.1] = 0
        case "zeros-of-all-shares":  # from none to all, with symbols that the table lacks, and 255 in one ninth
            values = values_of(chunk, word)
            values[rng.random(values.size) < np.linspace(-0.2, 1.1, values.size)] = 0
            tops[:: max(1, len(tops) // 7)] = 0x70
            np.array_split(chunk, 9)[4][:8] = 0xFF
        case "scales":  # some of them equal, of what has one table; and zeros
            for i, begin in enumerate(range(0, num_bytes, GROUP_BYTES)):
                tops[begin // word.itemsize : (begin + GROUP_BYTES) // word.itemsize] -= np.uint8(4 * (i * i % 11 % 4))
                if i % 7 == 3:
                    chunk[begin : begin + GROUP_BYTES] = 0
    return chunk


def values_of(chunk: NDArray[np.uint8], word: WordType) -> NDArray[np.unsignedinteger]:
    """The values of a chunk as whole numbers."""
    return chunk.view(f"<u{word.itemsize}")


KINDS = (
    *("one-sign-0", "one-sign-1", "short", "zero-tiles", "rare", "mixed"),
    *("zeros", "zeros-and-zero-tiles", "short-zeros", "zeros-of-all-shares", "scales"),
)


@WORDS
@pytest.mark.parametrize("content", CONTENTS)
def test_small_chunks_are_coded_as_on_the_cpu(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, content: str, word: WordType
) -> None:
    size = word.itemsize
    for num_bytes in (size, 96, 104, TILE_BYTES - size, TILE_BYTES, TILE_BYTES + size, (32 << 10) - size, 32 << 10):
        check_all(encoder, decoder, make_chunk(content, word, num_bytes // size * size), word, device)
    for num_bytes in ((32 << 10) + size, (64 << 10) + size, 200_000 // size * size):
        check_all(encoder, decoder, make_chunk(content, word, num_bytes), word, device)


@WORDS
@pytest.mark.parametrize("kind", KINDS)
def test_small_special_segments_are_coded_as_on_the_cpu(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, kind: str, word: WordType
) -> None:
    for num_bytes in (TILE_BYTES + word.itemsize, (64 << 10) - word.itemsize, 600_000 // 8 * 8):
        check_all(encoder, decoder, special_chunk(kind, word, num_bytes), word, device)


@WORDS
@pytest.mark.parametrize("kind", [*KINDS, "normal"])
def test_sampled_chunks_with_several_tables_are_coded_as_on_the_cpu(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, kind: str, word: WordType
) -> None:
    for num_bytes in (2 << 20, (2 << 20) + word.itemsize, (7 << 20) + 3 * word.itemsize):
        check_all(encoder, decoder, special_chunk(kind, word, num_bytes), word, device)


@WORDS
def test_small_chunks_with_zeros_of_every_length(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, word: WordType
) -> None:
    """Ends inside a tile, and planes that end anywhere in 16 bytes."""
    for num_bytes in range(512, 1536, 24):
        check_all(encoder, decoder, special_chunk("zeros", word, num_bytes), word, device)


@pytest.mark.parametrize("word", [WordType.BF16, WordType.F16, WordType.F32, WordType.F64], ids=lambda word: word.name)
def test_a_plain_segment_with_zeros(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, word: WordType
) -> None:
    """Symbols so even that coding them saves nothing, among zeros."""
    rng = np.random.default_rng(word)
    chunk = make_chunk("normal", word, 1 << 20).copy()
    values = values_of(chunk, word)
    values[40_000:] = rng.integers(0, 256, values[40_000:].size * word.itemsize, dtype=np.uint8).view(values.dtype)
    place = 52 if word is WordType.F64 else 8 * word.itemsize - 9
    step = values.dtype.type(1 << place)
    symbols = values // step % 256
    values[symbols == (126 if word is WordType.F64 else 255)] = 1  # 126 + 1,153 is 255 modulo 256
    values[rng.random(values.size) < 0.02] = 0
    check_all(encoder, decoder, chunk, word, device)


@pytest.mark.parametrize("word", [WordType.BF16, WordType.F16], ids=lambda word: word.name)
def test_every_16_bit_value(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, word: WordType
) -> None:
    values = np.arange(1 << 16, dtype=np.uint16)
    check_all(encoder, decoder, values.view(np.uint8), word, device)
    check_all(encoder, decoder, np.tile(values, 20)[::-1].copy().view(np.uint8), word, device)


def test_every_8_bit_value(encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device) -> None:
    for repeats in (1, 3, 1000):
        check_all(encoder, decoder, np.repeat(np.arange(256, dtype=np.uint8), repeats), WordType.F8, device)


def test_random_32_bit_values(encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device) -> None:
    rng = np.random.default_rng(5)
    for seed in range(8):
        chunk = rng.integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
        values = chunk.view(np.uint32)
        values[::3] = values[::3] & 0x807FFFFF | 0x3C000000  # so that it shrinks, with every mantissa
        values[seed::5] |= 0x7F800000  # infinities and NaNs of every payload
        assert check_all(encoder, decoder, chunk, WordType.F32, device).codec == RANS_CODEC


@WORDS
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_small_frames_decode_to_any_address(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, word: WordType, offset: int
) -> None:
    chunk = special_chunk("zero-tiles", word, (96 << 10) + word.itemsize)
    header, body = encode(encoder, chunk, word, device)
    room = torch.full((chunk.size + 32,), 0xA5, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    prefix = body[: prefix_bytes(header)].cpu().numpy()
    decoder.decode(header, body, prefix, room[offset : offset + chunk.size]).wait()
    found = room.cpu().numpy()
    assert found[offset : offset + chunk.size].tobytes() == chunk.tobytes()
    assert (np.delete(found, slice(offset, offset + chunk.size)) == 0xA5).all()


@WORDS
def test_cpu_frames_decode_on_the_gpu(decoder: DeviceDecoder, device: torch.device, word: WordType) -> None:
    for kind in KINDS:
        chunk = special_chunk(kind, word, 300_000 // 8 * 8)
        frame = on_cpu(chunk, word)
        room = torch.empty(chunk.size, dtype=torch.uint8)
        header = decode_frame(torch.from_numpy(frame.copy()), room)
        body = torch.from_numpy(frame[HEADER_BYTES:].copy()).to(device)
        assert decode(decoder, header, body).tobytes() == chunk.tobytes()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("rans*.tgf")), ids=lambda path: path.stem)
def test_small_golden_frames_decode_on_the_gpu(decoder: DeviceDecoder, device: torch.device, path: Path) -> None:
    frame = np.fromfile(path, dtype=np.uint8)
    header = unpack_header(frame)
    expected = read_on_cpu(torch.from_numpy(frame.copy()), header.raw_bytes)
    body = torch.from_numpy(frame[HEADER_BYTES : header.frame_bytes].copy()).to(device)
    assert decode(decoder, header, body).tobytes() == expected.tobytes()


def mutated(rng: np.random.Generator, good: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy with a few bytes changed: single bits, bytes, runs; mostly from somewhere on."""
    body, first = good.copy(), int(rng.integers(0, good.size)) if rng.random() < 0.7 else 0
    for _ in range(rng.integers(1, 5)):
        place = int(rng.integers(first, body.size))
        match rng.integers(3):
            case 0:
                body[place] ^= 1 << rng.integers(8)
            case 1:
                body[place] = rng.integers(256)
            case _:
                end = min(body.size, place + int(rng.integers(1, 64)))
                body[place:end] = rng.integers(0, 256, end - place)
    return body


@pytest.mark.parametrize("seed", range(10))
def test_small_mutated_frames_are_found(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, seed: int
) -> None:
    """1,000 frames a seed whose digest is taken for granted: the chunk, or an error, and nothing out of bounds."""
    rng = np.random.default_rng(seed)
    found = 0
    for word in (WordType.BF16, WordType.F32, WordType.F64, WordType.U8, WordType.F16):
        for kind in ("one-sign-0", "zero-tiles", "mixed", "normal", "zeros-and-zero-tiles"):
            chunk = special_chunk(kind, word, 40_000)
            header, body = encode(encoder, chunk, word, device)
            good = body.cpu().numpy()
            found += count_refused(decoder, header, chunk, (mutated(rng, good) for _ in range(40)))
            assert decode(decoder, header, body, verified=True).tobytes() == chunk.tobytes()
    assert found > 800


def test_small_damaged_starts_are_found_on_the_host(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device
) -> None:
    chunk = make_chunk("normal", WordType.BF16, 256 << 10)
    header, body = encode(encoder, chunk, WordType.BF16, device)
    for place in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24):
        prefix = body.cpu().numpy()
        prefix[place] ^= 0x04
        out = torch.empty(chunk.size, dtype=torch.uint8, device=device)
        with pytest.raises((CorruptionError, UnknownCodecError)):
            decoder.decode(header, body, prefix, out, body_verified=True)
    with pytest.raises(CodecError):
        decoder.decode(header, body, body[:20].cpu().numpy(), torch.empty_like(out), body_verified=True)
    longer = dataclasses.replace(header, raw_bytes=header.raw_bytes * 2)
    with pytest.raises(CorruptionError):
        decode(decoder, longer, body, verified=True)


def test_large_chunks_are_read_by_the_cpu(device: torch.device, stream: torch.cuda.Stream) -> None:
    encoder = DeviceEncoder(["rans"], 64 << 20, device, stream)
    decoder = DeviceDecoder(64 << 20, device, stream)
    for word, dtype in ((WordType.BF16, torch.bfloat16), (WordType.F32, torch.float32)):
        values = torch.randn((64 << 20) // word.itemsize, device=device).mul_(0.02).to(dtype)
        raw = values.view(torch.uint8)
        torch.cuda.synchronize(device)
        ticket = encoder.start(raw, word, "rans")
        header, body = ticket.finish()
        assert header.codec == RANS_CODEC
        assert raw.numel() / header.body_bytes > (1.505 if word is WordType.BF16 else 1.195)
        out = torch.zeros_like(raw)
        torch.cuda.synchronize(device)
        decoder.decode(header, body, body[: prefix_bytes(header)].cpu().numpy(), out).wait()
        assert bool((out == raw).all())
        assert read_on_cpu(frame_of(header, body), raw.numel()).tobytes() == raw.cpu().numpy().tobytes()
        assert header.raw_digest == digest(raw.cpu().numpy())
        ticket.release()


def test_large_chunks_of_many_scales_are_coded_as_on_the_cpu(device: torch.device, stream: torch.cuda.Stream) -> None:
    """More than 512 groups of 8 segments, so that a group is 16."""
    num_bytes = (66 << 20) + 2
    encoder = DeviceEncoder(["rans"], num_bytes, device, stream)
    decoder = DeviceDecoder(num_bytes, device, stream)
    chunk = special_chunk("scales", WordType.BF16, num_bytes)
    assert check_all(encoder, decoder, chunk, WordType.BF16, device).codec == RANS_CODEC


def test_a_slot_that_other_codecs_used_before(device: torch.device, stream: torch.cuda.Stream) -> None:
    codecs = [name for name in ("zstd", "ans") if unavailable_reason(name, device) is None]
    encoder = DeviceEncoder([*codecs, "rans"], 1 << 20, device, stream)
    chunk = make_chunk("normal", WordType.F32, 1 << 20)
    expected = on_cpu(chunk, WordType.F32)
    for codec in (*codecs, "rans"):
        encode(encoder, make_chunk("sparse", WordType.BF16, 1 << 20), WordType.BF16, device, codec)
        frame = frame_of(*encode(encoder, chunk, WordType.F32, device, "rans")).numpy()
        assert frame.tobytes() == expected.tobytes()


def test_rans_needs_no_nvcomp_in_its_header(encoder: DeviceEncoder, device: torch.device) -> None:
    header, _ = encode(encoder, make_chunk("normal", WordType.BF16, 1 << 20), WordType.BF16, device)
    assert (header.codec, header.parameter) == (RANS_CODEC, 0)
    raw = on_device(make_chunk("normal", WordType.BF16, 1 << 20), device)
    ticket = encoder.start(raw, WordType.BF16, "rans")
    ticket.finish()
    assert ticket.refused_blocks == 0
    ticket.release()
