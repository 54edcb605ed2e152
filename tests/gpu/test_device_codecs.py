"""Frames made and read on a GPU: exact, bounded, and the same to the CPU."""

from __future__ import annotations

import dataclasses
import gc
import threading

import numpy as np
import pytest
import torch
import zstandard
from numpy.typing import NDArray

from tidegate.codec.availability import device_codecs, unavailable_reason
from tidegate.codec.base import (
    HEADER_BYTES,
    PLANES_CODEC,
    RANS_CODEC,
    RAW_CODEC,
    ZSTD_CODEC,
    FrameHeader,
    frame_bound_bytes,
)
from tidegate.codec.blocked import BlockKind, block_offsets, pack_table, packed_body_bytes, parse_body
from tidegate.codec.device import DEVICE_CODEC_NUMBERS, DeviceDecoder, DeviceEncoder, device_encoder_bytes
from tidegate.codec.digest import digest
from tidegate.codec.errors import CodecError, CodecUnavailableError, CorruptionError
from tidegate.codec.frame import encode_frame
from tidegate.codec.planes import extract_plane
from tidegate.codec.planes_plan import PLANES_ON_GPU
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType

from .chunks import CONTENTS, make_chunk, sizes_of
from .frames import CPU_READS, NO_BLOCK_TABLE, check_frame, decode, encode, frame_of, on_device, read_on_cpu

pytestmark = pytest.mark.gpu

WORDS = pytest.mark.parametrize("word", list(WordType), ids=lambda word: word.name)
NEED_NOT_SHRINK = ("lz4", "bitcomp", "cascaded")
"""The codecs that may find nothing to gain in dense values."""


@WORDS
def test_round_trip_is_exact(
    encoder: DeviceEncoder, decoder: DeviceDecoder, word: WordType, device: torch.device
) -> None:
    for content in CONTENTS:
        for num_bytes in sizes_of(word):
            chunk = make_chunk(content, word, num_bytes)
            try:
                check_frame(encoder, decoder, chunk, word, device)
            except Exception as exc:
                exc.add_note(f"{num_bytes} bytes of {content} {word.name}, codec {encoder.codecs[0]}")
                raise


@WORDS
def test_what_shrinks_is_coded(
    encoder: DeviceEncoder, decoder: DeviceDecoder, word: WordType, device: torch.device
) -> None:
    codec = encoder.codecs[0]
    for content in ("zeros", "constant", "normal", "sparse"):
        header = check_frame(encoder, decoder, make_chunk(content, word, 1 << 20), word, device)
        if codec == "raw":
            assert header.codec == RAW_CODEC
        elif surely_shrinks(codec, content, word):
            assert header.codec == DEVICE_CODEC_NUMBERS[codec], content
        if content == "zeros" and codec not in ("raw", "planes"):  # whose mantissas are stored as they are
            assert header.body_bytes < 4096


def surely_shrinks(codec: str, content: str, word: WordType) -> bool:
    """Whether a codec that works makes a chunk of the content shorter; with others it depends on nvCOMP."""
    if content == "zeros":
        return True
    if codec == "zstd":
        return True
    if codec in PLANES_ON_GPU:
        return content == "sparse" and word.itemsize < 8
    if codec == "rans":
        return content != "normal" or word != WordType.U8  # plain bytes: what is left of them depends on the values
    if codec in ("gdeflate", "deflate"):
        return content != "normal" or word >= WordType.F8
    # A repeated value of several bytes is no constant block, and untyped ANS need not gain.
    return codec == "ans" and (content != "constant" or word.itemsize == 1)


def test_digests_match_at_every_length(device: torch.device, stream: torch.cuda.Stream) -> None:
    encoder = DeviceEncoder(["raw"], 1 << 20, device, stream)
    lengths = [*range(300), 511, 512, 513, *range(1020, 1094), 2047, 2048, 65535, 65536, 65537]
    lengths += [65536 + n for n in (16, 128, 129, 240, 241, 1024, 1025)] + [3 * 65536 - 1, 3 * 65536, 1 << 20]
    for length in lengths:
        chunk = make_chunk("random", WordType.U8, length)
        header, _ = encode(encoder, chunk, WordType.U8, device)
        assert (length, header.raw_digest) == (length, digest(chunk))


@pytest.mark.parametrize("num_bytes", [1, 33, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 1 << 20])
def test_a17_small_incompressible_chunks_are_stored(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, num_bytes: int
) -> None:
    header = check_frame(encoder, decoder, make_chunk("random", WordType.U8, num_bytes), WordType.U8, device)
    assert header.codec == RAW_CODEC
    assert header.padded_bytes <= num_bytes + num_bytes // 100 + 4096


def test_a17_small_random_float_bits_and_zeros(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device
) -> None:
    for content in ("random", "zeros"):
        for num_bytes in (4, 36, 64 << 10, 1 << 20):
            header = check_frame(encoder, decoder, make_chunk(content, WordType.F32, num_bytes), WordType.F32, device)
            assert header.padded_bytes <= num_bytes + num_bytes // 100 + 4096


def test_a17_small_unaligned_chunks_are_refused(encoder: DeviceEncoder, device: torch.device) -> None:
    with pytest.raises(CodecError, match="no multiple of 16; copy it into an aligned buffer"):
        encoder.start(torch.zeros(257, dtype=torch.uint8, device=device)[1:], WordType.U8, encoder.codecs[0])


def test_small_chunks_that_do_not_fit_are_refused(encoder: DeviceEncoder, device: torch.device) -> None:
    codec = encoder.codecs[0]
    with pytest.raises(CodecError, match=r"has 5 bytes.*whole F32 values of 4 bytes"):
        encoder.start(torch.zeros(5, dtype=torch.uint8, device=device), WordType.F32, codec)
    with pytest.raises(CodecError, match=r"takes up to 4194304"):
        encoder.start(torch.zeros((4 << 20) + 16, dtype=torch.uint8, device=device), WordType.U8, codec)
    with pytest.raises(CodecError, match=r"contiguous 1-D uint8 tensor on cuda:0"):
        encoder.start(torch.zeros(16, dtype=torch.float32, device=device), WordType.F32, codec)
    with pytest.raises(CodecError, match=r"contiguous 1-D uint8 tensor on cuda:0"):
        encoder.start(torch.zeros(16, dtype=torch.uint8), WordType.U8, codec)
    with pytest.raises(CodecError, match=f"made for {codec}, not for 'snappy'"):
        encoder.start(torch.zeros(16, dtype=torch.uint8, device=device), WordType.U8, "snappy")
    assert encoder.num_free == 2


@WORDS
@pytest.mark.parametrize("offset", [0, 1])
def test_small_frames_decode_to_any_address(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device, word: WordType, offset: int
) -> None:
    chunk = make_chunk("normal", word, 96 << 10)
    header, body = encode(encoder, chunk, word, device)
    room = torch.full((chunk.size + 2,), 0xA5, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    decoder.decode(header, body, body.cpu().numpy(), room[offset : offset + chunk.size]).wait()
    found = room.cpu().numpy()
    assert found[offset : offset + chunk.size].tobytes() == chunk.tobytes()
    assert np.delete(found, slice(offset, offset + chunk.size)).tobytes() == b"\xa5\xa5"


@WORDS
@pytest.mark.parametrize("name", ["zstd", "deflate"])
def test_cpu_frames_decode_on_the_gpu(decoder: DeviceDecoder, device: torch.device, name: str, word: WordType) -> None:
    reason = unavailable_reason(name, device)
    if reason is not None:
        pytest.skip(reason)
    for content in CONTENTS:
        for num_bytes in sizes_of(word):
            chunk = make_chunk(content, word, num_bytes)
            frame = torch.zeros(frame_bound_bytes(num_bytes), dtype=torch.uint8)
            header = encode_frame(codec_named(name), torch.from_numpy(chunk.copy()), word, frame)
            body = frame[HEADER_BYTES : header.frame_bytes].to(device)
            assert decode(decoder, header, body).tobytes() == chunk.tobytes(), (content, num_bytes)


def cpu_body(chunk: NDArray[np.uint8], word: WordType, block_bytes: int, level: int) -> NDArray[np.uint8]:
    """Make a body as another writer may: any block size, every plane coded, by stock Zstandard with a checksum."""
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    blocks: list[NDArray[np.uint8]] = []
    kinds = []
    for plane in range(word.itemsize):
        octets = extract_plane(chunk, word, plane, np.empty(chunk.size // word.itemsize, dtype=np.uint8))
        for begin in range(0, octets.size, block_bytes):
            raw = octets[begin : begin + block_bytes].copy()
            coded = np.frombuffer(compressor.compress(raw.data), dtype=np.uint8)
            blocks.append(coded if coded.size < raw.size else raw)
            kinds.append(BlockKind.CODED if coded.size < raw.size else BlockKind.STORED)
    stored = np.array([block.size for block in blocks], dtype=np.int64)
    body = np.zeros(packed_body_bytes(stored), dtype=np.uint8)
    table = pack_table(block_bytes, word.itemsize, np.array(kinds, dtype=np.uint8), stored)
    body[: table.size] = table
    for offset, block in zip(block_offsets(stored), blocks, strict=True):
        body[offset : offset + block.size] = block
    return body


@pytest.mark.parametrize("block_bytes", [4 << 10, 128 << 10, 1 << 20, 16 << 20])
@pytest.mark.parametrize("level", [1, 9])
@pytest.mark.parametrize("word", [WordType.U8, WordType.U16, WordType.BF16, WordType.F64], ids=lambda word: word.name)
def test_foreign_block_sizes_decode_on_the_gpu(
    decoder: DeviceDecoder, device: torch.device, word: WordType, level: int, block_bytes: int
) -> None:
    reason = unavailable_reason("zstd", device)
    if reason is not None:
        pytest.skip(reason)
    chunk = make_chunk("sparse", word, (3 << 20) + 8 * 41)
    body = cpu_body(chunk, word, block_bytes, level)
    header = FrameHeader(ZSTD_CODEC, 1, word, chunk.size, body.size, digest(chunk), digest(body))
    assert read_on_cpu(frame_of(header, torch.from_numpy(body)), chunk.size).tobytes() == chunk.tobytes()
    assert decode(decoder, header, torch.from_numpy(body).to(device)).tobytes() == chunk.tobytes()


def test_small_damage_is_found(encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device) -> None:
    chunk = make_chunk("normal", WordType.BF16, 256 << 10)
    header, body = encode(encoder, chunk, WordType.BF16, device)
    for place in (0, 17, header.body_bytes // 2, header.body_bytes - 1):
        damaged = body.clone()
        damaged[place] ^= 0x10
        with pytest.raises(CorruptionError):
            decode(decoder, header, damaged)
    with pytest.raises(CorruptionError, match="digest"):
        decode(decoder, dataclasses.replace(header, raw_digest=header.raw_digest ^ 1), body)
    assert decode(decoder, header, body).tobytes() == chunk.tobytes()


def test_small_damaged_table_is_found_even_where_the_digest_is_trusted(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device
) -> None:
    chunk = make_chunk("normal", WordType.BF16, 256 << 10)
    header, body = encode(encoder, chunk, WordType.BF16, device)
    if header.codec in NO_BLOCK_TABLE:
        pytest.skip("no block table: test_rans.py and test_planes.py have what those need")
    for place in (0, 4, 8, 12, 17, 19):
        prefix = body.cpu().numpy()
        prefix[place] ^= 0x04
        out = torch.empty(chunk.size, dtype=torch.uint8, device=device)
        with pytest.raises(CorruptionError):
            decoder.decode(header, body, prefix, out, body_verified=True)


def test_frames_of_another_nvcomp_are_refused(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device
) -> None:
    chunk = ramp(1 << 18)
    header, body = encode(encoder, chunk, WordType.F32, device)
    if header.codec == RAW_CODEC:
        pytest.skip("the raw codec needs no nvCOMP")
    assert header.parameter == (0 if header.codec in (ZSTD_CODEC, RANS_CODEC, PLANES_CODEC) else 6)
    other = dataclasses.replace(header, parameter=5)
    if header.codec in CPU_READS:
        assert decode(decoder, other, body).tobytes() == chunk.tobytes()
        return
    with pytest.raises(CodecUnavailableError, match=r"written with nvCOMP 5 .*install tidegate\[cu1"):
        decode(decoder, other, body)


def ramp(num_values: int) -> NDArray[np.uint8]:
    """Steps of seven equal F32 values: coded blocks, and a shorter chunk, with every codec."""
    return (np.arange(num_values) // 7).astype(np.float32).view(np.uint8)


def test_slots_interleave(encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device) -> None:
    chunks = [make_chunk("normal", WordType.F32, (1 << 20) + 4 * i, seed=i) for i in range(6)]
    raws = [on_device(chunk, device) for chunk in chunks]
    copying = torch.cuda.Stream(device)
    frames: list[tuple[FrameHeader, torch.Tensor]] = []
    for i in range(0, 6, 2):
        first, second = (encoder.start(raw, WordType.F32, encoder.codecs[0]) for raw in raws[i : i + 2])
        with pytest.raises(CodecError, match="all 2 slots of this encoder are taken"):
            encoder.start(raws[0], WordType.F32, encoder.codecs[0])
        for ticket in (second, first):
            header, body = ticket.finish()
            assert 0 < ticket.encode_s < 10
            host = torch.empty(body.numel(), dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(copying):
                host.copy_(body, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record(copying)
            ticket.release(copied)
            ticket.release()
            frames.append((header, host))
        with pytest.raises(CodecError, match="released"):
            first.finish()
    copying.synchronize()
    for (header, host), i in zip(frames, (1, 0, 3, 2, 5, 4), strict=True):
        assert decode(decoder, header, host.to(device)).tobytes() == chunks[i].tobytes()


def test_same_chunk_gives_the_same_frame(encoder: DeviceEncoder, device: torch.device) -> None:
    """Nothing of an earlier chunk, or of memory before it, gets into a body."""
    for word in (WordType.BF16, WordType.F32, WordType.U8):
        chunk, other = make_chunk("sparse", word, 1 << 20), make_chunk("normal", word, 4 << 20, seed=1)
        header, body = encode(encoder, chunk, word, device)
        encode(encoder, other, word, device)
        again, second = encode(encoder, chunk, word, device)
        assert again == header
        assert second.cpu().numpy().tobytes() == body.cpu().numpy().tobytes()


def test_padding_of_a_body_is_zero(encoder: DeviceEncoder, device: torch.device) -> None:
    header, body = encode(encoder, make_chunk("sparse", WordType.F64, (1 << 20) + 8), WordType.F64, device)
    if header.codec in NO_BLOCK_TABLE:
        pytest.skip("no block table; test_rans.py and test_planes.py compare every byte with the CPU's")
    octets = body.cpu().numpy()
    table = parse_body(header, octets)
    covered = np.zeros(octets.size, dtype=bool)
    covered[: 16 + 4 * table.kinds.size] = True
    for offset, stored in zip(table.offsets, table.stored_bytes, strict=True):
        covered[offset : offset + stored] = True
    assert not octets[~covered].any()


def test_encoding_takes_no_memory_beyond_the_encoder(
    codec: str, device: torch.device, stream: torch.cuda.Stream
) -> None:
    expected = device_encoder_bytes([codec], 1 << 20, 3, device=device)
    gc.collect()  # what earlier tests have left would be freed in between
    before = torch.cuda.memory_allocated(device)
    encoder = DeviceEncoder([codec], 1 << 20, device, stream, num_slots=3)
    assert encoder.device_bytes == expected
    assert torch.cuda.memory_allocated(device) - before >= expected
    raw = on_device(make_chunk("normal", WordType.BF16, 1 << 20), device)
    allocations = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    for _ in range(3):
        ticket = encoder.start(raw, WordType.BF16, codec)
        ticket.finish()
        ticket.frame(stream)
        stream.synchronize()
        ticket.release()
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == allocations


def test_another_thread_may_encode(codec: str, decoder: DeviceDecoder, device: torch.device) -> None:
    chunk = make_chunk("normal", WordType.BF16, 1 << 20)
    frames: list[tuple[FrameHeader, torch.Tensor]] = []

    def work() -> None:
        encoder = DeviceEncoder([codec], 1 << 20, device, torch.cuda.Stream(device))
        frames.append(encode(encoder, chunk, WordType.BF16, device))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((header, body),) = frames
    assert decode(decoder, header, body).tobytes() == chunk.tobytes()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; torch sees fewer")
def test_a_gpu_that_is_not_the_current_one_works(codec: str) -> None:
    assert torch.cuda.current_device() == 0
    other = torch.device("cuda", 1)
    stream = torch.cuda.Stream(other)
    chunk = make_chunk("normal", WordType.BF16, 1 << 20)
    encoder = DeviceEncoder([codec], 1 << 20, other, stream)
    assert encoder.device_bytes == device_encoder_bytes([codec], 1 << 20, device=other)
    header, body = encode(encoder, chunk, WordType.BF16, other)
    assert body.device == other
    assert header.raw_digest == digest(chunk)
    assert codec in NEED_NOT_SHRINK or header.codec == DEVICE_CODEC_NUMBERS[codec]
    assert decode(DeviceDecoder(1 << 20, other, stream), header, body).tobytes() == chunk.tobytes()
    assert codec in device_codecs(other)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("num_bytes", [64 << 20, (192 << 20) + 2], ids=["typical", "several-batches"])
def test_large_chunks(codec: str, device: torch.device, stream: torch.cuda.Stream, num_bytes: int) -> None:
    word = WordType.U16 if num_bytes > 64 << 20 else WordType.BF16
    encoder = DeviceEncoder([codec], -(-num_bytes // 16) * 16, device, stream)
    generator = torch.Generator(device).manual_seed(7)
    values = torch.randn(num_bytes // 2, generator=generator, device=device).mul_(0.02).to(torch.bfloat16)
    raw = values.view(torch.uint8)
    torch.cuda.synchronize(device)
    ticket = encoder.start(raw, word, codec)
    header, body = ticket.finish()
    assert codec in NEED_NOT_SHRINK or header.codec == DEVICE_CODEC_NUMBERS[codec]
    out = torch.zeros_like(raw)
    torch.cuda.synchronize(device)
    DeviceDecoder(num_bytes, device, stream).decode(header, body, body.cpu().numpy(), out).wait()
    assert bool((out == raw).all())
    if header.codec in CPU_READS:
        assert read_on_cpu(frame_of(header, body), num_bytes).tobytes() == raw.cpu().numpy().tobytes()


def test_the_gpu_says_what_it_can(device: torch.device) -> None:
    available = device_codecs(device)
    assert "raw" in available
    for name in DEVICE_CODEC_NUMBERS:
        reason = unavailable_reason(name, device)
        assert (reason is None) == (name in available)
        assert reason is None or "tidegate[cu1" in reason
