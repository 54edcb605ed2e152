"""Which table a group of segments gets: the rule of RANS.md, worked out again here, and what it is worth."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.codec.rans_chunks import CODERS, coder_named, decoded, encoded, layout_of, of_scales, scattered, use_coder
from tidegate.codec import rans_groups, rans_survey
from tidegate.codec.rans_directory import SegmentKind
from tidegate.codec.rans_format import BodyLayout
from tidegate.codec.rans_groups import num_tables_of, segments_per_group, tables_of_groups
from tidegate.codec.rans_units import EMPTY_SYMBOL, SHAPES, TILE_BYTES, symbols_of
from tidegate.codec.words import WordType

Octets = NDArray[np.uint8]

WORDS = pytest.mark.parametrize("word", WordType, ids=lambda word: word.name)
SEGMENT_BYTES = 32 * TILE_BYTES  # of BF16
CODED = SegmentKind.CODED


@pytest.fixture(params=CODERS)
def coder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """NumPy and numba in turn."""
    name: str = request.param
    use_coder(name, monkeypatch)
    return name


def counted_units(raw: Octets, word: WordType, tile: int, sampled: bool) -> NDArray[np.unsignedinteger]:
    """The units of a tile that the histograms count, if it is coded."""
    octets = raw[tile * TILE_BYTES : (tile + 1) * TILE_BYTES]
    if not octets.any():
        octets = octets[:0]
    if sampled:
        sector = (tile * 0x9E3779B1 & 0xFFFF_FFFF) >> 28
        octets = octets[32 * sector : 32 * sector + 32]
    return octets.view(SHAPES[word].dtype)


def expected_tables(raw: Octets, word: WordType, layout: BodyLayout, group: int = 8) -> list[int]:
    """The table of each segment, if it is coded: rules 1, 3 and 4 of the writer, step by step."""
    shape, directory = SHAPES[word], layout.directory
    num_tiles, num_segments = -(-raw.size // TILE_BYTES), directory.num_segments
    sums, counts = [0] * num_segments, [0] * num_segments
    for tile in range(num_tiles):
        segment = tile // shape.segment_tiles
        if directory.kind[segment] not in (CODED, SegmentKind.PLAIN):
            continue
        units = counted_units(raw, word, tile, num_tiles > 4096)
        symbols = symbols_of(units, shape).astype(int)
        if directory.sparse[segment]:
            symbols[units == 0] = EMPTY_SYMBOL
        sums[segment // group] += int(symbols.sum())
        counts[segment // group] += symbols.size
    order = sorted((4 * sums[index] // counts[index], index) for index in range(num_segments) if counts[index])
    tables = {index: rank * num_tables_of(num_segments) // len(order) for rank, (_, index) in enumerate(order)}
    return [tables.get(segment // group, 0) for segment in range(num_segments)]


def check_tables(raw: Octets, word: WordType, group: int = 8) -> BodyLayout:
    """Encode, decode, and hold the directory against the rule."""
    body = encoded(raw, word)
    assert body is not None, "the chunk was to shrink"
    assert decoded(raw, word, body).tobytes() == raw.tobytes()
    layout = layout_of(raw, word, body)
    is_coded = layout.directory.kind == CODED
    assert np.array_equal(layout.directory.table, np.where(is_coded, expected_tables(raw, word, layout, group), 0))
    return layout


def walk(num_segments: int, rng: np.random.Generator) -> list[int]:
    exponents: list[int] = np.clip(np.cumsum(rng.integers(-1, 2, num_segments)), -12, 10).tolist()
    return exponents


@WORDS
@pytest.mark.parametrize("num_segments", [33, 70, 150])
def test_tables_follow_the_rule(word: WordType, num_segments: int, coder: str) -> None:
    rng = np.random.default_rng([word, num_segments])
    raw = of_scales(word, walk(num_segments, rng), rng)
    raw[SEGMENT_BYTES * 3 : SEGMENT_BYTES * 21] = 0
    raw[-5 * SEGMENT_BYTES :].reshape(-1, TILE_BYTES)[::3] = 0
    layout = check_tables(raw[: -TILE_BYTES - 2 * word.itemsize], word)
    assert len(np.unique(layout.directory.table)) > 1


@WORDS
def test_zeros_among_values_count_as_their_symbol(word: WordType, coder: str) -> None:
    rng = np.random.default_rng(word)
    raw = scattered(of_scales(word, walk(64, rng), rng), word, rng, 0.2)
    raw[raw.size // 2 :] = scattered(raw[raw.size // 2 :], word, rng, 0.6)
    assert bool(check_tables(raw, word).directory.sparse.any()) == SHAPES[word].has_sign


@settings(max_examples=25, deadline=None)
@given(exponents=st.lists(st.integers(-12, 10), min_size=33, max_size=80), lacking=st.integers(0, 4000))
def test_tables_follow_the_rule_whatever_the_scales(exponents: list[int], lacking: int) -> None:
    raw = of_scales(WordType.BF16, exponents, np.random.default_rng(lacking))
    check_tables(raw[: raw.size - 2 * lacking], WordType.BF16)


def test_groups_of_two_scales_get_tables_of_their_own(coder: str) -> None:
    """Every 128 KiB another scale: as small as if each were a chunk, and no table for both could do that."""
    rng = np.random.default_rng(3)
    raw = of_scales(WordType.BF16, np.repeat([0, -9] * 8, 8).tolist(), rng)
    body = encoded(raw, WordType.BF16)
    assert body is not None
    symbols = symbols_of(raw.view("<u2"), SHAPES[WordType.BF16]).reshape(-1, 2, raw.size // 32)
    apart = sum(ideal_bytes(symbols[:, scale]) for scale in range(2)) + raw.size / 2
    together = ideal_bytes(symbols) + raw.size / 2
    assert body.size < 1.01 * apart
    assert body.size < 0.97 * together


def ideal_bytes(symbols: Octets) -> float:
    """What any coder with one table for all takes at least."""
    counts = np.bincount(symbols.reshape(-1))
    counts = counts[counts > 0]
    bits: float = -(counts * np.log2(counts / counts.sum())).sum()
    return bits / 8


def test_equal_groups_get_tables_by_place(coder: str) -> None:
    group = of_scales(WordType.BF16, [0] * 8, np.random.default_rng(4))
    layout = check_tables(np.tile(group, 12), WordType.BF16)
    assert layout.directory.table.tolist() == [group * 3 // 12 for group in range(12) for _ in range(8)]


def test_groups_of_zeros_take_no_part(coder: str) -> None:
    """Four groups of values among twelve of zeros share three tables as four alone would."""
    raw = of_scales(WordType.BF16, np.repeat([5, 0, -5, -10], 32).tolist(), np.random.default_rng(5))
    raw.reshape(4, 4, -1)[:, 1:] = 0
    layout = check_tables(raw, WordType.BF16)
    assert layout.directory.table[::32].tolist() == [3, 2, 1, 0]
    assert (layout.directory.kind.reshape(4, 32)[:, 8:] == SegmentKind.ZERO).all()


def test_a_last_group_in_which_nothing_is_counted(coder: str) -> None:
    """Its one tile ends before the sector that a sampled chunk looks at."""
    num_segments = next(s for s in range(161, 1000, 8) if (32 * (s - 1) * 0x9E3779B1 & 0xFFFF_FFFF) >> 28 > 1)
    rng = np.random.default_rng(6)
    raw = of_scales(WordType.BF16, walk(num_segments, rng), rng)[: (num_segments - 1) * SEGMENT_BYTES + 34]
    layout = check_tables(raw, WordType.BF16)
    assert layout.directory.kind[-1] in (CODED, SegmentKind.PLAIN)
    assert layout.directory.table[-1] == 0


@pytest.mark.parametrize("word", [WordType.BF16, WordType.F64, WordType.U8], ids=lambda word: word.name)
def test_larger_groups(word: WordType, coder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rans_groups, "MAX_GROUPS", 4)
    rng = np.random.default_rng(word)
    for num_segments, group in ((32, 8), (33, 16), (64, 16), (65, 32), (140, 64)):
        raw = of_scales(word, walk(num_segments, rng), rng)
        check_tables(raw[: -3 * word.itemsize], word, group)


@pytest.mark.parametrize(
    ("num_segments", "num_tables", "group"),
    [
        (1, 1, 8),
        (32, 1, 8),
        (33, 2, 8),
        (2048, 64, 8),
        (4096, 64, 8),
        (4097, 64, 16),
        (8193, 64, 32),
        (1 << 20, 64, 2048),
    ],
)
def test_numbers_of_tables_and_segments_of_a_group(num_segments: int, num_tables: int, group: int) -> None:
    assert num_tables_of(num_segments) == num_tables
    assert segments_per_group(num_segments) == group


def test_order_is_by_whole_keys_then_place() -> None:
    counts = np.zeros((6, 256), dtype=np.int64)
    counts[0, 100] = 7
    counts[1, [100, 101]] = 3, 2  # 100.4: key 401
    counts[2, [100, 101]] = 4, 1  # 100.2: key 400, as that of 100
    counts[4, 99] = 1 << 40
    counts[5, 255] = 1
    assert tables_of_groups(counts, 5).tolist() == [1, 3, 2, 0, 0, 4]
    assert tables_of_groups(counts, 2).tolist() == [0, 1, 0, 0, 0, 1]
    assert tables_of_groups(counts[3:4], 1).tolist() == [0]


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("width", [0, 1, 4, 7, 32, 512])
def test_counting_by_group(name: str, width: int) -> None:
    module: ModuleType = coder_named(name)
    count: Callable[..., None] = module.count_symbols
    rng = np.random.default_rng(width)
    symbols = rng.integers(0, 256, (700, width), dtype=np.uint8)
    groups = np.sort(rng.integers(0, 9, 700))
    counts = np.ones((9, 256), dtype=np.int64)
    count(symbols[:0], groups[:0], counts)
    count(symbols, groups, counts)
    for group in range(9):
        assert np.array_equal(counts[group], 1 + np.bincount(symbols[groups == group].reshape(-1), minlength=256))


def test_chunks_of_many_batches_of_tiles(coder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that end inside groups change nothing."""
    rng = np.random.default_rng(8)
    raw = of_scales(WordType.BF16, walk(70, rng), rng)[:-520]
    whole = encoded(raw, WordType.BF16)
    monkeypatch.setattr(rans_survey, "_TILES_AT_A_TIME", 37)
    parts = encoded(raw, WordType.BF16)
    assert whole is not None
    assert parts is not None
    assert parts.tobytes() == whole.tobytes()
