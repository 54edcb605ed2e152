"""What is left of a chunk, put on the chunk before, is the chunk: for every word type and every bit pattern."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.codec_contract import CONTENTS
from tidegate.codec.words import WordType
from tidegate.residual import KINDS, Kind, residual_word, take_residual, undo_residual

NUM_VALUES = 4099


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", WordType, ids=lambda word: word.name)
def test_every_pattern_on_every_other(kind: Kind, word: WordType) -> None:
    rng = np.random.default_rng(1)
    contents = {name: make(word, NUM_VALUES, rng) for name, make in CONTENTS.items()}
    for new, old in itertools.product(contents, repeat=2):
        raw, base = contents[new], contents[old]
        left = np.full_like(raw, 0xA5)
        take_residual(kind, word, raw, base, left)
        rebuilt = base.copy()
        undo_residual(kind, word, left, rebuilt)
        assert rebuilt.tobytes() == raw.tobytes(), (new, old)
        assert left.any() == (raw.tobytes() != base.tobytes()), "nothing is left only of what is the same"
        in_place = base.copy()
        take_residual(kind, word, raw, in_place, in_place)
        assert in_place.tobytes() == left.tobytes()
    assert residual_word(kind, word).itemsize == word.itemsize


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from(list(WordType)), st.integers(0, 200_000), st.integers(0, 2**32 - 1))
def test_any_length(kind: Kind, word: WordType, num_values: int, seed: int) -> None:
    raw, base = np.random.default_rng(seed).integers(0, 256, (2, num_values * word.itemsize), dtype=np.uint8)
    left = np.empty_like(raw)
    take_residual(kind, word, raw, base, left)
    undo_residual(kind, word, left, base)
    assert base.tobytes() == raw.tobytes()


@pytest.mark.parametrize("word", [WordType.F16, WordType.BF16, WordType.F32, WordType.F64], ids=lambda w: w.name)
def test_neighbouring_floats_differ_by_one(word: WordType) -> None:
    """Across zero, too: from the least denormal down through +0.0 and -0.0 to the least negative one."""
    dtype = np.dtype(f"<u{word.itemsize}")
    sign = 1 << (8 * word.itemsize - 1)
    row = np.array([0x41, 0x40, 1, 0, sign, sign | 1, sign | 0x40, sign | 0x41], dtype=dtype)
    left = np.empty(row.nbytes - word.itemsize, dtype=np.uint8)
    take_residual("difference", word, row[1:].copy().view(np.uint8), row[:-1].copy().view(np.uint8), left)
    zigzag = left.view(dtype).tolist()
    assert zigzag[2:5] == [1, 1, 1], "down by one each"
    assert zigzag[0] == zigzag[-1] == 1
    take_residual("difference", word, row[:-1].copy().view(np.uint8), row[1:].copy().view(np.uint8), left)
    assert left.view(dtype).tolist()[2:5] == [2, 2, 2], "up by one each"
