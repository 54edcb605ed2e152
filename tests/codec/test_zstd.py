"""The zstd codec: every mix of blocks, and bodies that other writers make."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.contract.codec_contract import CONTENTS, poisoned, small_chunk, tensor_of, widened
from tidegate.codec.base import HEADER_BYTES, ZSTD_CODEC, FrameHeader, frame_bound_bytes, unpack_header
from tidegate.codec.blocked import BlockKind, pack_table, parse_body
from tidegate.codec.digest import digest
from tidegate.codec.errors import CorruptionError
from tidegate.codec.frame import decode_frame, encode_frame
from tidegate.codec.planes import extract_plane
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType
from tidegate.codec.zstd import BLOCK_BYTES

ZSTD = codec_named("zstd")


def kinds_of(frame: torch.Tensor) -> NDArray[np.uint8]:
    """The kind of every block, a row a plane."""
    header = unpack_header(frame.numpy())
    table = parse_body(header, frame.numpy()[HEADER_BYTES:])
    return table.kinds.reshape(table.num_planes, -1)


def round_trip(octets: NDArray[np.uint8], word: WordType) -> torch.Tensor:
    raw = tensor_of(octets)
    out, back = poisoned(frame_bound_bytes(raw.numel())), poisoned(raw.numel())
    header = encode_frame(ZSTD, raw, word, out)
    decode_frame(out[: header.frame_bytes], back)
    assert back.numpy().tobytes() == octets.tobytes()
    return out


def test_all_kinds_in_one_chunk() -> None:
    frame = round_trip(widened(2 * BLOCK_BYTES + 1000, np.random.default_rng(0)), WordType.F32)
    expected = [BlockKind.CODED, BlockKind.STORED, BlockKind.CONSTANT, BlockKind.CODED]
    assert kinds_of(frame).tolist() == [[kind] * 3 for kind in expected]


def test_the_small_chunk_has_all_kinds() -> None:
    raw, word = small_chunk()
    frame = round_trip(raw.numpy(), word)
    assert kinds_of(frame).tolist() == [[BlockKind.CODED], [BlockKind.STORED], [BlockKind.CONSTANT], [BlockKind.CODED]]


PIECES = {
    "noise": lambda rng, count: rng.integers(0, 1 << 16, count).astype("<u2"),
    "zeros": lambda rng, count: np.zeros(count, dtype="<u2"),
    "narrow": lambda rng, count: rng.integers(0, 40, count).astype("<u2"),
    "noisy-top": lambda rng, count: (rng.integers(0, 256, count) << 8).astype("<u2"),
    "noisy-bottom": lambda rng, count: rng.integers(0, 256, count).astype("<u2"),
}


@given(
    pieces=st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=6),
    rest=st.sampled_from([0, 1, 15, 16, 4097]),
    word=st.sampled_from([WordType.U16, WordType.BF16, WordType.U8]),
)
@settings(max_examples=25, deadline=None)
def test_every_mix_of_blocks(pieces: list[str], rest: int, word: WordType) -> None:
    rng = np.random.default_rng(len(pieces))
    parts = [PIECES[name](rng, BLOCK_BYTES) for name in pieces]
    parts[-1] = parts[-1][: BLOCK_BYTES - rest]
    round_trip(np.concatenate(parts).view(np.uint8), word)


def test_zeros_amid_noise_are_not_overlooked() -> None:
    """The probe that spares zstd the mantissa must see rows of zeros wherever they are."""
    values = CONTENTS["normal-floats"](WordType.F32, 4 * BLOCK_BYTES, np.random.default_rng(1)).view("<u4").copy()
    dense = unpack_header(round_trip(values.view(np.uint8), WordType.F32).numpy()).body_bytes
    values.reshape(32, -1)[7::8] = 0
    sparse = unpack_header(round_trip(values.view(np.uint8), WordType.F32).numpy()).body_bytes
    assert sparse < 0.9 * dense


def body_by_hand(
    raw: NDArray[np.uint8], word: WordType, block_bytes: int, compressor: zstandard.ZstdCompressor, *, size_known: bool
) -> NDArray[np.uint8]:
    """A body as another writer may make it: other block lengths, another level, no content size."""
    kinds, blocks = [], []
    for plane in range(word.itemsize):
        octets = extract_plane(raw, word, plane, np.empty(raw.size // word.itemsize, dtype=np.uint8))
        for begin in range(0, octets.size, block_bytes):
            block = octets[begin : begin + block_bytes].tobytes()
            stream = compressor.compressobj()
            coded = compressor.compress(block) if size_known else stream.compress(block) + stream.flush()
            kinds.append(BlockKind.CODED if len(coded) < len(block) else BlockKind.STORED)
            blocks.append(coded if len(coded) < len(block) else block)
    lengths = np.array([len(block) for block in blocks], dtype=np.int64)
    table = pack_table(block_bytes, word.itemsize, np.array(kinds, dtype=np.uint8), lengths)
    padded = b"".join(block + bytes(-len(block) % 16) for block in blocks)
    return np.concatenate([table, np.frombuffer(padded, dtype=np.uint8)])


@pytest.mark.parametrize("size_known", [True, False])
@pytest.mark.parametrize("level", [-5, 1, 3, 19])
@pytest.mark.parametrize("block_bytes", [4096, 65_536, 1 << 24])
def test_bodies_of_other_writers(block_bytes: int, level: int, size_known: bool) -> None:
    word = WordType.F32
    raw = CONTENTS["zero-runs"](word, 50_000, np.random.default_rng(2))
    compressor = zstandard.ZstdCompressor(level=level)
    body = body_by_hand(raw, word, block_bytes, compressor, size_known=size_known)
    header = FrameHeader(ZSTD_CODEC, 1, word, raw.size, body.size, digest(raw), digest(body))
    frame = np.concatenate([np.frombuffer(header.pack(), dtype=np.uint8), body])
    back = poisoned(raw.size)
    assert decode_frame(torch.from_numpy(frame), back) == header
    assert back.numpy().tobytes() == raw.tobytes()


def test_any_libzstd_reads_the_coded_blocks() -> None:
    raw = CONTENTS["normal-floats"](WordType.BF16, 100_000, np.random.default_rng(3))
    frame = round_trip(raw, WordType.BF16)
    body = frame.numpy()[HEADER_BYTES:]
    table = parse_body(unpack_header(frame.numpy()), body)
    exponents = body[table.offsets[0] : table.offsets[0] + table.stored_bytes[0]].tobytes()
    assert exponents[:4] == (0xFD2FB528).to_bytes(4, "little")
    parameters = zstandard.get_frame_parameters(exponents)
    assert (parameters.content_size, parameters.dict_id, parameters.has_checksum) == (100_000, 0, False)
    plane = extract_plane(raw, WordType.BF16, 0, np.empty(100_000, dtype=np.uint8))
    assert zstandard.ZstdDecompressor().decompress(exponents) == plane.tobytes()


@pytest.mark.parametrize("noise_bytes", range(900, 1009, 4))
def test_around_the_point_of_no_gain(noise_bytes: int) -> None:
    """The body becomes as long as the chunk somewhere here, and must not be written then."""
    octets = np.zeros(1008, dtype=np.uint8)
    octets[:noise_bytes] = np.random.default_rng(6).integers(0, 256, noise_bytes)
    round_trip(octets, WordType.U8)


def test_a_wrong_raw_digest_is_found() -> None:
    raw = tensor_of(CONTENTS["normal-floats"](WordType.F32, 1000, np.random.default_rng(4)))
    out = poisoned(frame_bound_bytes(raw.numel()))
    header = encode_frame(ZSTD, raw, WordType.F32, out)
    lie = dataclasses.replace(header, raw_digest=header.raw_digest ^ 1)
    out[:HEADER_BYTES] = torch.frombuffer(bytearray(lie.pack()), dtype=torch.uint8)
    with pytest.raises(CorruptionError, match="the chunk has digest"):
        decode_frame(out, poisoned(raw.numel()))
