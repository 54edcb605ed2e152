"""Chunks to encode, by content and word type. All are made on the host from a seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.words import WordType

CONTENTS = ("random", "zeros", "constant", "normal", "sparse", "specials")
"""`normal`: what weights look like, or small integers. `sparse`: that, with 7 of 8 values zero. `specials`: NaNs of
several payloads, infinities, subnormals and zeros of both signs, at random."""


def make_chunk(content: str, word: WordType, num_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return uint8[num_bytes], num_bytes a multiple of the itemsize."""
    rng = np.random.default_rng([seed, word, num_bytes, CONTENTS.index(content)])
    num_values = num_bytes // word.itemsize
    match content:
        case "random":
            return rng.integers(0, 256, num_bytes, dtype=np.uint8)
        case "zeros":
            return np.zeros(num_bytes, dtype=np.uint8)
        case "constant":
            return np.tile(rng.integers(0, 256, word.itemsize, dtype=np.uint8), num_values)
        case "normal":
            return _normal(rng, word, num_values).view(np.uint8)
        case "sparse":
            values = _normal(rng, word, num_values)
            values[rng.integers(0, 8, num_values) > 0] = 0
            return values.view(np.uint8)
        case "specials":
            return _specials(rng, word, num_values).view(np.uint8)
    raise ValueError(content)


def sizes_of(word: WordType) -> Iterator[int]:
    """Yield the lengths where something changes: nothing, one value, few, around a piece and a block, more."""
    yield 0
    yield word.itemsize
    yield -(-33 // word.itemsize) * word.itemsize
    yield 4096
    yield (64 << 10) - word.itemsize
    yield 64 << 10
    yield (64 << 10) + word.itemsize
    yield (1 << 20) + 33 * word.itemsize


def _normal(rng: np.random.Generator, word: WordType, num_values: int) -> NDArray[np.unsignedinteger]:
    values = rng.standard_normal(num_values).astype(np.float32) * np.float32(0.02)
    match word:
        case WordType.F64:
            return values.astype(np.float64).view(np.uint64)
        case WordType.F32:
            return values.view(np.uint32)
        case WordType.F16:
            return values.astype(np.float16).view(np.uint16)
        case WordType.BF16:
            return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
        case WordType.F8:
            return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.abs(values * 5000).astype(f"<u{word.itemsize}")


def _specials(rng: np.random.Generator, word: WordType, num_values: int) -> NDArray[np.unsignedinteger]:
    bits = 8 * word.itemsize
    exponent = {WordType.F64: 11, WordType.F32: 8, WordType.BF16: 8, WordType.F16: 5, WordType.F8: 4}.get(word, 4)
    mantissa = bits - 1 - exponent
    sign, infinity, top = 1 << bits - 1, (1 << exponent) - 1 << mantissa, (1 << mantissa) - 1
    nans = [infinity | 1, infinity | top, sign | infinity | top >> 1]
    kinds = [0, sign, infinity, sign | infinity, *nans, 1, top, sign | 1]
    return np.array(kinds, dtype=f"<u{word.itemsize}")[rng.integers(0, len(kinds), num_values)]
