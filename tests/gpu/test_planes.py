"""planes on a GPU: the bytes that the CPU writes, exact for every value, and safe with any bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tidegate.codec.availability import unavailable_reason
from tidegate.codec.base import HEADER_BYTES, PLANES_CODEC, FrameHeader, frame_bound_bytes, unpack_header
from tidegate.codec.device import DeviceDecoder, DeviceEncoder
from tidegate.codec.device_decode import prefix_bytes
from tidegate.codec.errors import CodecError, CorruptionError, UnknownCodecError
from tidegate.codec.frame import encode_frame
from tidegate.codec.planes_body import START_BYTES
from tidegate.codec.planes_plan import PLANES_ON_GPU
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType

from .chunks import CONTENTS, make_chunk
from .frames import check_frame, count_refused, decode, encode, frame_of, read_on_cpu

pytestmark = pytest.mark.gpu

WORDS = pytest.mark.parametrize("word", list(WordType), ids=lambda word: word.name)
NAMES = pytest.mark.parametrize("name", PLANES_ON_GPU)
CHUNK_BYTES = 8 << 20
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "frames"


@pytest.fixture(scope="module")
def encoder(device: torch.device, stream: torch.cuda.Stream) -> Iterator[DeviceEncoder]:
    reason = unavailable_reason("planes", device)
    if reason is not None:
        pytest.skip(reason)
    yield DeviceEncoder(["rans", *PLANES_ON_GPU], CHUNK_BYTES, device, stream)


@pytest.fixture(scope="module")
def decoder(device: torch.device, stream: torch.cuda.Stream) -> DeviceDecoder:
    return DeviceDecoder(CHUNK_BYTES, device, stream)


def on_cpu(chunk: NDArray[np.uint8], word: WordType, name: str) -> NDArray[np.uint8]:
    """The frame that the CPU makes."""
    frame = torch.zeros(frame_bound_bytes(chunk.size), dtype=torch.uint8)
    header = encode_frame(codec_named(name), torch.from_numpy(chunk.copy()), word, frame)
    return frame[: header.frame_bytes].numpy()


def check_all(
    encoder: DeviceEncoder, decoder: DeviceDecoder, chunk: NDArray[np.uint8], word: WordType, name: str
) -> FrameHeader:
    """Hold a chunk's frame against the CPU's, and read it on both, with all of the body on the host and without."""
    device = torch.device("cuda", 0)
    header, body = encode(encoder, chunk, word, device, name)
    frame, expected = frame_of(header, body).numpy(), on_cpu(chunk, word, name)
    assert frame.size == expected.size
    differs = np.flatnonzero(frame != expected)
    assert not differs.size, f"byte {differs[0]} of {frame.size} is the first of {differs.size} that differ"
    assert decode(decoder, header, body).tobytes() == chunk.tobytes()
    out = torch.full((chunk.size,), 0xA5, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    decoder.decode(header, body, body[: prefix_bytes(header)].cpu().numpy(), out).wait()
    assert out.cpu().numpy().tobytes() == chunk.tobytes()
    assert read_on_cpu(torch.from_numpy(frame), chunk.size).tobytes() == chunk.tobytes()
    return header


@NAMES
@WORDS
@pytest.mark.parametrize("content", CONTENTS)
def test_chunks_are_coded_as_on_the_cpu(
    encoder: DeviceEncoder, decoder: DeviceDecoder, content: str, word: WordType, name: str
) -> None:
    for num_values in (1, 5, 48, 49, 97, 100, 333, 4096, 4097, 40_001, (1 << 20) // word.itemsize + 3):
        check_all(encoder, decoder, make_chunk(content, word, num_values * word.itemsize), word, name)


@WORDS
def test_every_number_of_values_behind_a_unit(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, word: WordType
) -> None:
    """Runs inside of the mantissas begin at any byte then."""
    for num_values in range(1000, 1040):
        chunk = make_chunk("normal", word, num_values * word.itemsize)
        check_all(encoder, decoder, chunk, word, "planes:mantissa=rans")
        check_frame(encoder, decoder, chunk, word, device)


@NAMES
@pytest.mark.parametrize("word", [WordType.BF16, WordType.F16, WordType.U16], ids=lambda word: word.name)
def test_every_16_bit_value(encoder: DeviceEncoder, decoder: DeviceDecoder, word: WordType, name: str) -> None:
    values = np.arange(1 << 16, dtype=np.uint16)
    check_all(encoder, decoder, np.repeat(values, 3).view(np.uint8), word, name)
    check_all(encoder, decoder, np.tile(values, 20)[::-1].copy().view(np.uint8), word, name)


@pytest.mark.parametrize("name", ["planes:exponent=zstd", "planes:sign=deflate,mantissa=zstd"])
@WORDS
def test_streams_of_other_codecs_are_decoded_too(decoder: DeviceDecoder, word: WordType, name: str) -> None:
    chunk = make_chunk("sparse", word, 200_000)
    frame = on_cpu(chunk, word, name)
    header = unpack_header(frame)
    body = torch.from_numpy(frame[HEADER_BYTES:].copy()).to("cuda")
    assert decode(decoder, header, body).tobytes() == chunk.tobytes()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("planes*.tgf")), ids=lambda path: path.stem)
def test_golden_frames_decode_on_the_gpu(decoder: DeviceDecoder, device: torch.device, path: Path) -> None:
    frame = np.fromfile(path, dtype=np.uint8)
    header = unpack_header(frame)
    expected = read_on_cpu(torch.from_numpy(frame.copy()), header.raw_bytes)
    body = torch.from_numpy(frame[HEADER_BYTES : header.frame_bytes].copy()).to(device)
    assert decode(decoder, header, body).tobytes() == expected.tobytes()


def mutated(rng: np.random.Generator, good: NDArray[np.uint8], is_start: bool) -> NDArray[np.uint8]:
    """A copy with one bit changed, of the entries where it `is_start`."""
    body = good.copy()
    body[int(rng.integers(0, START_BYTES if is_start else good.size))] ^= 1 << rng.integers(8)
    return body


@pytest.mark.parametrize("seed", range(4))
def test_mutated_frames_are_found(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, seed: int
) -> None:
    """Frames whose digest is taken for granted: the chunk, or an error, and nothing out of bounds."""
    rng = np.random.default_rng(seed)
    found = 0
    for word in (WordType.BF16, WordType.F32, WordType.F64, WordType.F8, WordType.F16, WordType.U32):
        chunk = make_chunk("sparse", word, 40_000 + 8 * seed)
        header, body = encode(encoder, chunk, word, device, "planes:mantissa=rans")
        good = body.cpu().numpy()
        found += count_refused(decoder, header, chunk, (mutated(rng, good, i % 3 == 0) for i in range(40)))
        assert decode(decoder, header, body, verified=True).tobytes() == chunk.tobytes()
    assert found > 200


def test_lengths_are_checked_before_any_kernel_runs(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device
) -> None:
    chunk = make_chunk("normal", WordType.F32, 256 << 10)
    header, body = encode(encoder, chunk, WordType.F32, device, "planes")
    assert header.codec == PLANES_CODEC
    out = torch.empty(chunk.size, dtype=torch.uint8, device=device)
    for place in (0, 1, 2, 3, 4, 8, 9, 15, 24, 40, 47):
        prefix = body[: prefix_bytes(header)].cpu().numpy()
        prefix[place] ^= 0x20
        with pytest.raises((CorruptionError, UnknownCodecError)):
            decoder.decode(header, body, prefix, out, body_verified=True)
    with pytest.raises(CodecError):
        decoder.decode(header, body, body[:20].cpu().numpy(), out, body_verified=True)
    longer = dataclasses.replace(header, raw_bytes=header.raw_bytes * 2)
    with pytest.raises(CorruptionError):
        decode(decoder, longer, body, verified=True)


@pytest.mark.parametrize("run", range(3))
def test_what_no_value_has_is_refused(decoder: DeviceDecoder, device: torch.device, run: int) -> None:
    """A set bit behind the last value of a run, an exponent that is too large, padding that is not zero."""
    chunk = make_chunk("random", WordType.F16, 2 * 4097)
    header, frame = _stored_streams(chunk)
    body = frame.copy()
    sign_bytes, exponents_at = 513, 48 + 528
    place = (48 + sign_bytes - 1, exponents_at + 7, exponents_at + 4097)[run]
    body[place] |= 0x80
    with pytest.raises(CorruptionError, match="not zero"):
        decode(decoder, header, torch.from_numpy(body).to(device), verified=True)
    assert decode(decoder, header, torch.from_numpy(frame).to(device), verified=True).tobytes() == chunk.tobytes()


def _stored_streams(chunk: NDArray[np.uint8]) -> tuple[FrameHeader, NDArray[np.uint8]]:
    """A body whose streams are all raw, which is longer than any writer makes it; only a decoder takes it."""
    from tidegate.codec.planes_body import ENTRY, padded, stream_sizes, stream_words
    from tidegate.codec.planes_fields import split_fields

    word = WordType.F16
    signs, exponents, mantissas = (np.zeros(size, dtype=np.uint8) for size in stream_sizes(word, chunk.size))
    split_fields(chunk, word, (signs, exponents, mantissas))
    parts = []
    for stream, of_stream in zip((signs, exponents, mantissas), stream_words(word), strict=True):
        parts.append(ENTRY.pack(0, 1, of_stream, 0, 0, stream.size))
    parts += [stream.tobytes() + bytes(padded(stream.size) - stream.size) for stream in (signs, exponents, mantissas)]
    body = np.frombuffer(b"".join(parts), dtype=np.uint8)
    good = on_cpu(chunk, word, "raw")
    return dataclasses.replace(unpack_header(good), codec=PLANES_CODEC, body_bytes=body.size), body.copy()
