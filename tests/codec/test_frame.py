"""What encode_frame and decode_frame refuse, and what they leave alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.contract.codec_contract import POISON, poisoned, small_chunk, tensor_of
from tidegate.codec.base import RAW_CODEC, ZSTD_CODEC, frame_bound_bytes
from tidegate.codec.frame import decode_frame, encode_frame
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType

ZSTD = codec_named("zstd")


def encoded() -> torch.Tensor:
    raw, word = small_chunk()
    out = poisoned(frame_bound_bytes(raw.numel()))
    encode_frame(ZSTD, raw, word, out)
    return out


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(1024, dtype=torch.int8),
        torch.zeros(256, dtype=torch.float32),
        torch.zeros(32, 32, dtype=torch.uint8),
        torch.zeros(2048, dtype=torch.uint8)[::2],
        torch.zeros(1024, dtype=torch.uint8, device="meta"),
    ],
    ids=["int8", "float32", "2-D", "strided", "meta"],
)
def test_only_flat_bytes_of_the_cpu(wrong: torch.Tensor) -> None:
    raw, word = small_chunk()
    with pytest.raises(ValueError, match="raw must be a 1-D contiguous uint8 tensor on the CPU"):
        encode_frame(ZSTD, wrong, word, poisoned(8192))
    with pytest.raises(ValueError, match="out must be"):
        encode_frame(ZSTD, raw, word, wrong)
    with pytest.raises(ValueError, match="frame must be"):
        decode_frame(wrong, raw)
    with pytest.raises(ValueError, match="out must be"):
        decode_frame(encoded(), wrong)


def test_a_value_cut_in_two_is_refused() -> None:
    with pytest.raises(ValueError, match="1023 bytes, which is no whole number of F32 values"):
        encode_frame(ZSTD, poisoned(1023), WordType.F32, poisoned(8192))


def test_too_little_room_is_refused_before_anything_is_written() -> None:
    raw, word = small_chunk()
    out = poisoned(frame_bound_bytes(raw.numel()) - 1)
    with pytest.raises(ValueError, match="4095 bytes and a frame of 1024 raw bytes may need 4096"):
        encode_frame(ZSTD, raw, word, out)
    assert (out.numpy() == POISON).all()


def test_more_room_than_needed_is_left_alone() -> None:
    raw, word = small_chunk()
    out = poisoned(3 * 4096)
    header = encode_frame(ZSTD, raw, word, out)
    assert header.codec == ZSTD_CODEC
    assert (out.numpy()[frame_bound_bytes(raw.numel()) :] == POISON).all()
    back = poisoned(raw.numel())
    assert decode_frame(out, back) == header
    assert back.numpy().tobytes() == raw.numpy().tobytes()


def test_what_does_not_shrink_is_stored_with_the_raw_codec() -> None:
    raw = tensor_of(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8))
    out = poisoned(frame_bound_bytes(raw.numel()))
    header = encode_frame(ZSTD, raw, WordType.U8, out)
    assert (header.codec, header.codec_version, header.body_bytes, header.parameter) == (RAW_CODEC, 1, 5000, 0)
    assert header.raw_digest == header.body_digest
    assert out.numpy()[64:5064].tobytes() == raw.numpy().tobytes()
