"""What every codec does. Subclass `CodecContract` and name the codec; a device overrides `encode` and `decode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.codec.base import FRAME_ALIGNMENT_BYTES, HEADER_BYTES, frame_bound_bytes, unpack_header
from tidegate.codec.digest import digest
from tidegate.codec.errors import CodecError, CorruptionError, TruncatedError
from tidegate.codec.frame import decode_frame, encode_frame
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType

POISON = 0xA5
EXPONENT_BITS = {WordType.F8: 4, WordType.F16: 5, WordType.BF16: 8, WordType.F32: 8, WordType.F64: 11}
FLOAT_OF_WIDTH = {1: WordType.F8, 2: WordType.F16, 4: WordType.F32, 8: WordType.F64}

Octets = NDArray[np.uint8]
Content = Callable[[WordType, int, np.random.Generator], Octets]


def _float_fields(word: WordType) -> tuple[np.dtype[np.unsignedinteger], int, int]:
    """Unsigned type, exponent bits and mantissa bits of a word; of an integer, those of the float of that width."""
    exponent = EXPONENT_BITS[word if word in EXPONENT_BITS else FLOAT_OF_WIDTH[word.itemsize]]
    return np.dtype(f"<u{word.itemsize}"), exponent, 8 * word.itemsize - 1 - exponent


def _compose(word: WordType, sign: Octets, exponent: NDArray[np.uint64], mantissa: NDArray[np.uint64]) -> Octets:
    dtype, exponent_bits, mantissa_bits = _float_fields(word)
    bits = sign.astype(np.uint64) << np.uint64(exponent_bits + mantissa_bits)
    bits |= exponent << np.uint64(mantissa_bits)
    return (bits | mantissa).astype(dtype).view(np.uint8)


def _random_bits(word: WordType, count: int, rng: np.random.Generator) -> Octets:
    return rng.integers(0, 256, count * word.itemsize, dtype=np.uint8)


def _zeros(word: WordType, count: int, rng: np.random.Generator) -> Octets:
    return np.zeros(count * word.itemsize, dtype=np.uint8)


def _all_equal(word: WordType, count: int, rng: np.random.Generator) -> Octets:
    return np.tile(rng.integers(1, 256, word.itemsize, dtype=np.uint8), count)


def _special(word: WordType, exponent: int, mantissas: Sequence[int], count: int, rng: np.random.Generator) -> Octets:
    sign = rng.integers(0, 2, count).astype(np.uint8)
    exponents = np.full(count, exponent, dtype=np.uint64)
    return _compose(word, sign, exponents, np.resize(np.array(mantissas, dtype=np.uint64), count))


def _nan_payloads(word: WordType, count: int, rng: np.random.Generator) -> Octets:
    """Quiet and signalling NaNs of both signs: the least and the greatest payload, single bits, and infinities."""
    _, exponent_bits, mantissa_bits = _float_fields(word)
    top = 1 << mantissa_bits
    classes = [0, 1, top - 1, top >> 1, (top >> 1) | 1, *(1 << bit for bit in range(mantissa_bits))]
    return _special(word, (1 << exponent_bits) - 1, classes, count, rng)


def _signed_zeros(word: WordType, count: int, rng: np.random.Generator) -> Octets:
    return _special(word, 0, [0], count, rng)


def _denormals(word: WordType, count: int, rng: np.random.Generator) -> Octets:
    _, _, mantissa_bits = _float_fields(word)
    draws = rng.integers(1, 1 << mantissa_bits, 1000).tolist()
    return _special(word, 0, [1, (1 << mantissa_bits) - 1, *draws], count, rng)


def _normal_floats(word: WordType, count: int, rng: np.random.Generator) -> Octets:
    """Dense values as in a weight: a skewed exponent, random sign and mantissa."""
    _, exponent_bits, mantissa_bits = _float_fields(word)
    middle = (1 << (exponent_bits - 1)) - 1
    exponent = np.clip(middle - rng.geometric(0.5, count), 1, None).astype(np.uint64)
    mantissa = rng.integers(0, 1 << mantissa_bits, count).astype(np.uint64)
    return _compose(word, rng.integers(0, 2, count).astype(np.uint8), exponent, mantissa)


def _zero_runs(word: WordType, count: int, rng: np.random.Generator) -> Octets:
    values = _normal_floats(word, count, rng).reshape(count, word.itemsize)
    values[rng.random(count // 64 + 1).repeat(64)[:count] < 0.3] = 0
    return values.reshape(-1)


CONTENTS: dict[str, Content] = {
    "random-bits": _random_bits,
    "zeros": _zeros,
    "all-equal": _all_equal,
    "nan-payloads": _nan_payloads,
    "signed-zeros": _signed_zeros,
    "denormals": _denormals,
    "normal-floats": _normal_floats,
    "zero-runs": _zero_runs,
}
A17_BYTES = (1, 33, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 1 << 20)


def sizes_of(word: WordType) -> tuple[int, ...]:
    """Chunk lengths around every border: none, one value, a digest piece and a block more or less, several strips."""
    value, piece = word.itemsize, 64 << 10
    return (0, value, 63 << 10, piece - value, piece, piece + value, (1 << 20) + 3 * value)


def tensor_of(octets: Octets) -> torch.Tensor:
    """The bytes as a tensor of their own memory, at an aligned address."""
    return torch.from_numpy(octets.copy())


def poisoned(num_bytes: int) -> torch.Tensor:
    """Bytes that show where nothing was written. Filled by NumPy: torch would wake its threads for each."""
    return torch.from_numpy(np.full(num_bytes, POISON, dtype=np.uint8))


def widened(count: int, rng: np.random.Generator) -> Octets:
    """fp32 values with 8 bits of mantissa: planes of coded, stored, constant and coded (the signs) blocks with zstd."""
    values = _normal_floats(WordType.F32, count, rng).view("<u4")
    return (values & np.uint32(0xFFFF_8000)).view(np.uint8)


def small_chunk() -> tuple[torch.Tensor, WordType]:
    """A kibibyte that becomes blocks of every kind with zstd."""
    return tensor_of(widened(256, np.random.default_rng(3))), WordType.F32


class CodecContract:
    """The promises of a codec: exact, bounded, and never wrong without saying so."""

    codec_name: ClassVar[str]

    def encode(self, raw: torch.Tensor, word: WordType) -> torch.Tensor:
        """Return the padded frame of a chunk (uint8[raw_bytes], CPU), on the CPU."""
        out = poisoned(frame_bound_bytes(raw.numel()))
        header = encode_frame(codec_named(self.codec_name), raw, word, out)
        assert header == unpack_header(out.numpy())
        return out[: header.padded_bytes]

    def decode(self, frame: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """Return the chunk (uint8[num_bytes], CPU) of a frame on the CPU."""
        out = poisoned(num_bytes)
        decode_frame(frame, out)
        return out

    def check_round_trip(self, raw: torch.Tensor, word: WordType) -> torch.Tensor:
        """Encode, check every promise about the frame, decode, compare; return the frame."""
        before = raw.numpy().tobytes()
        frame = self.encode(raw, word)
        assert raw.numpy().tobytes() == before, "encoding changed its input"
        header = unpack_header(frame.numpy())
        assert header.frame_bytes <= raw.numel() + HEADER_BYTES
        assert (header.word, header.raw_bytes, header.raw_digest) == (word, raw.numel(), digest(before))
        assert header.body_digest == digest(frame.numpy()[HEADER_BYTES : header.frame_bytes])
        assert frame.numel() == header.padded_bytes == frame_bound_bytes(header.body_bytes)
        assert frame.numel() % FRAME_ALIGNMENT_BYTES == 0
        assert not frame.numpy()[header.frame_bytes :].any(), "the padding is not zero"
        back = self.decode(frame, raw.numel())
        assert (back.dtype, back.shape) == (torch.uint8, raw.shape)
        assert back.numpy().tobytes() == before
        return frame

    @pytest.mark.parametrize("content", CONTENTS)
    @pytest.mark.parametrize("word", WordType, ids=lambda word: word.name)
    def test_round_trip(self, word: WordType, content: str) -> None:
        for num_bytes in sizes_of(word):
            count = num_bytes // word.itemsize
            # Drawing a million values takes longer than coding them, so most contents repeat.
            drawn = count if content == "random-bits" else min(count, 20_011)
            octets = CONTENTS[content](word, drawn, np.random.default_rng(count))
            assert octets.size == drawn * word.itemsize
            self.check_round_trip(tensor_of(np.resize(octets, num_bytes)), word)

    @given(runs=st.lists(st.tuples(st.binary(min_size=8, max_size=64), st.integers(1, 300)), max_size=12))
    @settings(max_examples=30, deadline=None)
    @pytest.mark.parametrize("word", [WordType.U8, WordType.BF16, WordType.F32, WordType.U64], ids=lambda w: w.name)
    def test_never_longer_than_the_chunk_and_the_header(self, word: WordType, runs: list[tuple[bytes, int]]) -> None:
        octets = b"".join(piece * times for piece, times in runs)
        octets = octets[: len(octets) // word.itemsize * word.itemsize]
        self.check_round_trip(tensor_of(np.frombuffer(octets, dtype=np.uint8)), word)

    @pytest.mark.parametrize("num_bytes", A17_BYTES)
    def test_A17_incompressible_and_tiny_buffers(self, num_bytes: int) -> None:
        noise = tensor_of(_random_bits(WordType.U8, num_bytes, np.random.default_rng(17)))
        frame = self.check_round_trip(noise, WordType.U8)
        assert frame.numel() <= 1.01 * num_bytes + 4096 + HEADER_BYTES

    @pytest.mark.parametrize("word", WordType, ids=lambda word: word.name)
    def test_A17_random_values_of_every_word(self, word: WordType) -> None:
        frame = self.check_round_trip(tensor_of(_random_bits(word, 40_000, np.random.default_rng(17))), word)
        assert unpack_header(frame.numpy()).body_bytes == 40_000 * word.itemsize, "noise was not stored as it is"

    @pytest.mark.parametrize("word", WordType, ids=lambda word: word.name)
    def test_A17_unaligned_view(self, word: WordType) -> None:
        octets = _zero_runs(word, 5_000, np.random.default_rng(17))
        self.check_round_trip(torch.cat([torch.zeros(1, dtype=torch.uint8), tensor_of(octets)])[1:], word)

    def test_every_flipped_bit_is_found_or_harmless(self) -> None:
        raw, word = small_chunk()
        frame = self.encode(raw, word)
        length = unpack_header(frame.numpy()).frame_bytes
        for bit in range(8 * (length + 2)):
            damaged = frame.clone()
            damaged[bit // 8] ^= 1 << bit % 8
            if bit < 8 * length:
                with pytest.raises(CorruptionError):
                    self.decode(damaged, raw.numel())
            else:
                assert self.decode(damaged, raw.numel()).numpy().tobytes() == raw.numpy().tobytes()

    def test_every_truncation_is_found(self) -> None:
        raw, word = small_chunk()
        frame = self.encode(raw, word)
        length = unpack_header(frame.numpy()).frame_bytes
        for num_bytes in range(length):
            with pytest.raises(TruncatedError):
                self.decode(frame[:num_bytes].clone(), raw.numel())
        assert self.decode(frame[:length].clone(), raw.numel()).numpy().tobytes() == raw.numpy().tobytes()

    def test_a_chunk_of_another_length_is_refused(self) -> None:
        raw, word = small_chunk()
        frame = self.encode(raw, word)
        for num_bytes in (0, raw.numel() - 4, raw.numel() + 4):
            with pytest.raises(CodecError, match=f"{num_bytes} are expected"):
                self.decode(frame, num_bytes)

    def test_threads_share_one_codec(self) -> None:
        words = [WordType.F32, WordType.BF16, WordType.U8, WordType.U64] * 2
        chunks = [
            (tensor_of(_zero_runs(word, 100_000 + index, np.random.default_rng(index))), word)
            for index, word in enumerate(words)
        ]
        alone = [self.encode(raw, word).numpy().tobytes() for raw, word in chunks]
        with ThreadPoolExecutor(len(chunks)) as pool:
            together = list(pool.map(lambda chunk: self.check_round_trip(*chunk).numpy().tobytes(), chunks))
        assert together == alone
