"""The rans codec: every pattern comes back, every kind of segment occurs, and NumPy and numba write the same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.codec.rans_chunks import CODERS, decoded, encoded, every_kind, layout_of, scattered, use_coder
from tests.contract.codec_contract import CONTENTS, poisoned
from tidegate.codec.base import HEADER_BYTES, FrameHeader, unpack_header
from tidegate.codec.frame import decode_frame
from tidegate.codec.rans import RansCodec
from tidegate.codec.rans_directory import SegmentKind
from tidegate.codec.rans_format import LOG2_SUM
from tidegate.codec.rans_start import unpack_layout
from tidegate.codec.rans_survey import SAMPLED_ABOVE_TILES
from tidegate.codec.rans_units import SHAPES, TILE_BYTES
from tidegate.codec.words import WordType

Octets = NDArray[np.uint8]

WORDS = pytest.mark.parametrize("word", WordType, ids=lambda word: word.name)


@pytest.fixture(params=CODERS)
def coder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """NumPy and numba in turn."""
    name: str = request.param
    use_coder(name, monkeypatch)
    return name


def check(raw: Octets, word: WordType) -> Octets:
    """Encode, decode, compare; return the body."""
    body = encoded(raw, word)
    assert body is not None, "the chunk was to shrink"
    assert body.size < raw.size
    assert decoded(raw, word, body).tobytes() == raw.tobytes()
    return body


def beside_zeros(octets: Octets, word: WordType) -> Octets:
    """The octets between segments of zeros, so that the body is shorter whatever they are."""
    segment = SHAPES[word].segment_tiles * TILE_BYTES
    zeros = np.zeros(max(segment, octets.size // segment * segment), dtype=np.uint8)
    return np.concatenate([zeros, octets, zeros[: segment // 2]])


@pytest.mark.parametrize("word", [WordType.BF16, WordType.F16, WordType.U16], ids=lambda word: word.name)
def test_all_16_bit_values(word: WordType, coder: str) -> None:
    values = np.arange(1 << 16, dtype="<u2")
    check(beside_zeros(values.view(np.uint8), word), word)
    check(beside_zeros(np.random.default_rng(1).permutation(values).view(np.uint8), word), word)


@pytest.mark.parametrize("word", [WordType.F8, WordType.U8], ids=lambda word: word.name)
def test_all_8_bit_values(word: WordType, coder: str) -> None:
    values = np.arange(256, dtype=np.uint8)
    check(np.concatenate([values, np.repeat(values[100:110], 4096), values[::-1]]), word)
    check(beside_zeros(np.tile(values, 200), word), word)


def test_random_f32_of_every_class(coder: str) -> None:
    rng = np.random.default_rng(24)
    values = rng.integers(0, 1 << 32, 1 << (24 if coder == "numba" else 21), dtype=np.uint32)
    nan = np.uint32(0x7F80_0000) | (np.uint32(1) << np.arange(32, dtype=np.uint32))
    values[: nan.size] = nan
    raw = np.concatenate([np.zeros(values.size, dtype=np.uint32), values, np.zeros(5, dtype=np.uint32)])
    check(raw.view(np.uint8), WordType.F32)


@WORDS
@pytest.mark.parametrize("content", CONTENTS)
def test_both_coders_write_the_same_bytes(word: WordType, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng([word, len(content)])
    bodies = []
    raw = CONTENTS[content](word, 50_001, rng)
    for name in CODERS:
        use_coder(name, monkeypatch)
        bodies.append(encoded(raw, word))
    first, second = bodies
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert first.tobytes() == second.tobytes()


def lengths(word: WordType) -> Iterator[int]:
    """Numbers of bytes around the ends of tiles, segments and the length from which a chunk is sampled."""
    segment = SHAPES[word].segment_tiles * TILE_BYTES
    for border in (TILE_BYTES, 2 * TILE_BYTES, segment, 2 * segment, SAMPLED_ABOVE_TILES * TILE_BYTES):
        yield from (border - word.itemsize, border, border + word.itemsize, border + TILE_BYTES)


@WORDS
@pytest.mark.parametrize("left_out", [False, True], ids=["whole", "zeros"])
def test_lengths(word: WordType, left_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = CONTENTS["normal-floats"](word, 20_011, np.random.default_rng(7))
    for num_bytes in lengths(word):
        raw = np.resize(drawn, num_bytes)
        if left_out:
            raw[num_bytes // 3 : num_bytes // 2] = 0
            raw[-(num_bytes % TILE_BYTES or TILE_BYTES) :] = 0
        bodies = []
        for name in CODERS:
            use_coder(name, monkeypatch)
            body = encoded(raw, word)
            bodies.append(None if body is None else body.tobytes())
            if body is not None:
                assert decoded(raw, word, body).tobytes() == raw.tobytes()
        assert bodies[0] == bodies[1]


@WORDS
@pytest.mark.parametrize("log2_sum", [12, 13, 14])
@pytest.mark.parametrize("segment_tiles", [16, 32, 256])
def test_other_writers(word: WordType, log2_sum: int, segment_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = every_kind(word, np.random.default_rng(3), segment_tiles)
    bodies = []
    for name in CODERS:
        use_coder(name, monkeypatch)
        body = encoded(raw, word, segment_tiles, log2_sum)
        assert body is not None
        assert decoded(raw, word, body).tobytes() == raw.tobytes()
        bodies.append(body.tobytes())
    assert bodies[0] == bodies[1]


@WORDS
def test_every_kind_of_segment(word: WordType, coder: str) -> None:
    raw = every_kind(word, np.random.default_rng(5))
    directory = layout_of(raw, word, check(raw, word)).directory
    assert set(directory.kind.tolist()) == set(SegmentKind)
    assert directory.mapped.any()
    shape = SHAPES[word]
    assert bool(directory.sparse.any()) == shape.has_sign
    assert bool(directory.one_sign.any()) == shape.has_sign
    assert bool(directory.short.any()) == bool(shape.short_bits)
    assert bool(directory.no_high.any()) == bool(shape.high_bits)
    if shape.has_sign or word in (WordType.F8, WordType.U8):
        assert directory.wide.any()


def test_a_sign_of_its_own_and_none(coder: str) -> None:
    rng = np.random.default_rng(6)
    values = np.abs(rng.standard_normal(100_000, dtype=np.float32))
    positive, negative, mixed = values, -values, rng.permutation(np.concatenate([values, -values])[::2])
    sizes = [check(raw.view(np.uint8), WordType.F32).size for raw in (positive, negative, mixed)]
    assert abs(sizes[0] - sizes[1]) < 64
    assert sizes[2] - sizes[0] > 0.9 * values.size / 8


@pytest.mark.parametrize(
    ("word", "scale", "ratio"),
    [(WordType.BF16, 0.02, 1.509), (WordType.F32, 1e-4, 1.203), (WordType.F16, 0.02, 1.18), (WordType.F64, 1.0, 1.14)],
)
def test_ratio_of_normals(word: WordType, scale: float, ratio: float, coder: str) -> None:
    values = np.random.default_rng(8).standard_normal(1 << 21) * scale
    if word is WordType.BF16:
        bits = values.astype(np.float32).view("<u4").astype(np.uint64)
        raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)
    else:
        raw = values.astype(f"<f{word.itemsize}").view(np.uint8)
    assert raw.size / check(raw, word).size >= ratio


def test_untouched_rows_cost_next_to_nothing(coder: str) -> None:
    rng = np.random.default_rng(9)
    rows = rng.standard_normal((1024, 768), dtype=np.float32)
    touched = rng.random(1024) < 0.1
    rows[~touched] = 0
    alone = np.ascontiguousarray(rows[touched]).view(np.uint8).reshape(-1)
    among = rows.view(np.uint8).reshape(-1)
    assert check(among, WordType.F32).size < 1.06 * check(alone, WordType.F32).size


def test_a_chunk_at_an_odd_address(coder: str) -> None:
    raw = CONTENTS["normal-floats"](WordType.F32, 20_000, np.random.default_rng(10))
    moved, out = np.empty(raw.size + 1, dtype=np.uint8)[1:], np.empty(raw.size + 1, dtype=np.uint8)[1:]
    moved[:] = raw
    body_bytes = RansCodec().encode_body(moved, WordType.F32, out)
    assert body_bytes is not None
    body = out[:body_bytes]
    assert body.tobytes() == check(raw, WordType.F32).tobytes()
    assert decoded(raw, WordType.F32, body).tobytes() == raw.tobytes()


GOLDEN = Path(__file__).parent.parent / "golden" / "frames"


NAMES = [path.stem for path in sorted(GOLDEN.glob("rans-*.tgf"))]
FIRST, SECOND = ([name for name in NAMES if name.startswith(f"rans-{writer}-")] for writer in ("first", "second"))
INDEX = json.loads((GOLDEN / "index.json").read_text())


def read_golden(name: str) -> tuple[FrameHeader, Octets, Octets]:
    """Header, body and decoded chunk of a golden frame."""
    frame = torch.from_numpy(np.fromfile(GOLDEN / f"{name}.tgf", dtype=np.uint8))
    header = unpack_header(frame.numpy())
    out = poisoned(header.raw_bytes)
    decode_frame(frame, out)
    return header, frame.numpy()[HEADER_BYTES:], out.numpy()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FIRST + SECOND])
def test_golden_frames_decode_and_are_written_again(name: str, coder: str) -> None:
    header, written, raw = read_golden(name)
    segment_tiles, log2_sum = (16, 14) if name in ("rans-kinds-f32", "rans-kinds-f64") else (None, LOG2_SUM)
    body = encoded(raw, header.word, segment_tiles, log2_sum)
    assert body is not None, "the golden frame is shorter than its chunk"
    assert body.tobytes() == written.tobytes()


@pytest.mark.parametrize("name", FIRST)
def test_frames_of_the_first_writer_decode(name: str, coder: str) -> None:
    """It did not know the flag E: a zero among other values cost a raw field."""
    header, written, raw = read_golden(name)
    assert not unpack_layout(header, written).directory.sparse.any()
    assert hashlib.sha256(raw).hexdigest() == INDEX[name]["sha256"]
    newer = name.replace("-first", "")
    if INDEX[newer]["sha256"] == INDEX[name]["sha256"]:  # of the same chunk, smaller
        assert read_golden(newer)[1].size < written.size


@pytest.mark.parametrize("name", SECOND)
def test_frames_of_the_second_writer_decode(name: str, coder: str) -> None:
    """It gave tables by place: each to 32 segments in a row."""
    header, written, raw = read_golden(name)
    directory = unpack_layout(header, written).directory
    by_place = np.arange(directory.num_segments) // 32
    assert np.array_equal(directory.table, np.where(directory.kind == SegmentKind.CODED, by_place, 0))
    newer = name.replace("-second", "")
    assert hashlib.sha256(raw).hexdigest() == INDEX[name]["sha256"] == INDEX[newer]["sha256"]
    assert read_golden(newer)[1].tobytes() != written.tobytes()


FLOATS = pytest.mark.parametrize("word", [word for word in WordType if word.is_float and word.itemsize > 1], ids=str)


@FLOATS
@pytest.mark.parametrize("share", [0.04, 0.1, 0.5, 0.98])
@pytest.mark.parametrize("num_bytes", [80_008, 4_000_024], ids=["counted", "sampled"])
def test_scattered_zeros_cost_no_raw_field(
    word: WordType, share: float, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(11)
    normal = CONTENTS["normal-floats"](word, num_bytes // word.itemsize, rng)
    raw = scattered(normal, word, rng, share)
    raw[5 * TILE_BYTES : 9 * TILE_BYTES] = 0
    bodies = []
    for name in CODERS:
        use_coder(name, monkeypatch)
        bodies.append(check(raw, word))
    assert bodies[0].tobytes() == bodies[1].tobytes()
    directory = layout_of(raw, word, bodies[0]).directory
    assert directory.sparse[:-1].all(), "the last may be a few units"
    units = raw.view(f"<u{word.itemsize}")
    whole = (directory.kind.size - 1) * SHAPES[word].segment_tiles * SHAPES[word].units_per_tile
    assert directory.num_fields[:-1].sum() == np.count_nonzero(units[:whole])
    dense = encoded(normal, word)
    assert dense is not None
    saved_bits = (normal.size // word.itemsize - np.count_nonzero(units)) * (8 * word.itemsize - 8)
    assert dense.size - bodies[0].size > saved_bits / 8 - 0.08 * dense.size


@FLOATS
def test_what_looks_like_zero_but_is_not(word: WordType, coder: str) -> None:
    """Denormals and negative zeros keep their fields; a segment with a symbol of 255 has no flag E."""
    rng = np.random.default_rng(12)
    width = 8 * word.itemsize
    raw = scattered(CONTENTS["normal-floats"](word, 40_000, rng), word, rng)
    units = raw.view(f"<u{word.itemsize}")
    places = rng.integers(0, units.size, 2000)
    units[places[:1000]] = units.dtype.type(1 << (width - 1))
    units[places[1000:]] = rng.integers(1, 128, 1000).astype(units.dtype)
    assert layout_of(raw, word, check(raw, word)).directory.sparse.all()
    last = units[-1:]
    last[:] = np.iinfo(units.dtype).max >> 1
    if SHAPES[word].high_bits:
        last[:] = units.dtype.type(1150 << 52)  # 2**127, whose exponent has 255 in its low byte
    sparse = layout_of(raw, word, check(raw, word)).directory.sparse
    assert sparse[:-1].all()
    assert not sparse[-1]
