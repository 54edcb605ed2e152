"""Chunks and bodies for the tests of rans: every kind of segment, and frames with any parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.contract.codec_contract import CONTENTS
from tidegate.codec import rans, rans_numpy
from tidegate.codec.base import RANS_CODEC, FrameHeader
from tidegate.codec.digest import digest
from tidegate.codec.rans_format import LOG2_SUM, BodyLayout
from tidegate.codec.rans_start import unpack_layout
from tidegate.codec.rans_survey import SAMPLED_ABOVE_TILES
from tidegate.codec.rans_units import SHAPES, TILE_BYTES
from tidegate.codec.words import WordType

Octets = NDArray[np.uint8]

CODERS = ("numpy", "numba")


def coder_named(name: str) -> ModuleType:
    """The module that codes segments; skips the test where numba is not installed."""
    if name == "numpy":
        return rans_numpy
    pytest.importorskip("numba", reason="the compiled coder needs numba: pip install 'tidegate[fast]'")
    from tidegate.codec import rans_numba

    return rans_numba


def use_coder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the codec code with NumPy or with numba."""
    module = coder_named(name)
    monkeypatch.setattr(rans, "_coder", lambda: module)


def encoded(raw: Octets, word: WordType, segment_tiles: int | None = None, log2_sum: int = LOG2_SUM) -> Octets | None:
    """The body of a chunk, or None where it is no shorter."""
    shape = SHAPES[word]
    if segment_tiles is not None:
        shape = dataclasses.replace(shape, segment_tiles=segment_tiles)
    out = np.full(raw.size, 0xA5, dtype=np.uint8)
    body_bytes = rans.encode_chunk(raw, word, out, shape, log2_sum) if raw.size else None
    return None if body_bytes is None else out[:body_bytes].copy()


def header_of(raw: Octets, word: WordType, body: Octets) -> FrameHeader:
    """The header of a frame with this body."""
    return FrameHeader(RANS_CODEC, 1, word, raw.size, body.size, digest(raw), digest(body))


def frame_of(raw: Octets, word: WordType, body: Octets) -> torch.Tensor:
    """A frame with this body, whatever it is, under a header that promises the chunk."""
    return torch.frombuffer(bytearray(header_of(raw, word, body).pack() + body.tobytes()), dtype=torch.uint8)


def layout_of(raw: Octets, word: WordType, body: Octets) -> BodyLayout:
    """What the start of a body says."""
    return unpack_layout(header_of(raw, word, body), body)


def decoded(raw: Octets, word: WordType, body: Octets) -> Octets:
    """The chunk that a body of a chunk like `raw` decodes to."""
    out = np.full(raw.size, 0xA5, dtype=np.uint8)
    rans.RansCodec().decode_body(header_of(raw, word, body), body, out)
    return out


def every_kind(word: WordType, rng: np.random.Generator, segment_tiles: int | None = None) -> Octets:
    """Segments that are constant, plain, coded, coded with one sign, short, with tiles left out, with zeros scattered,
    with the wide table; so many zero ones that the histogram is a sample; and an end inside a tile.
    """
    units = (segment_tiles or SHAPES[word].segment_tiles) * TILE_BYTES // word.itemsize
    normal = CONTENTS["normal-floats"](word, 2 * units, rng)
    segment = units * word.itemsize
    one_sign = normal[:segment].copy().reshape(units, word.itemsize)
    one_sign[:, -1] &= 0x7F
    holes = normal[:segment].copy()
    holes[TILE_BYTES : 5 * TILE_BYTES] = 0
    holes[-TILE_BYTES:] = 0
    rare = normal[:segment].copy()
    rare[-word.itemsize :] = 0x70
    return np.concatenate(
        [
            # First, and far from the others, whose table is to lack some symbols.
            rng.integers(0, 256, segment, dtype=np.uint8),
            np.zeros(-(-SAMPLED_ABOVE_TILES * TILE_BYTES // segment) * segment, dtype=np.uint8),
            np.tile(np.arange(1, 9, dtype=np.uint8), segment // 8),
            normal[:segment],
            one_sign.reshape(-1),
            _short(normal[:segment], word),
            holes,
            scattered(holes, word, rng),
            rare,
            normal[segment : segment + 3 * TILE_BYTES + 5 * word.itemsize],
        ]
    )


def of_scales(word: WordType, exponents: Sequence[int], rng: np.random.Generator) -> Octets:
    """A segment for each exponent, of normal values times two to its power; of bytes a value 8 greater for each."""
    shape = SHAPES[word]
    normal = rng.standard_normal((len(exponents), shape.segment_tiles * TILE_BYTES // shape.unit_bytes))
    powers = np.asarray(exponents)[:, None]
    if not shape.has_sign:
        return np.clip(128 + 4 * normal + 8 * powers, 0, 255).astype(np.uint8).reshape(-1)
    values = np.ldexp(0.02 * normal, powers)
    if word is WordType.BF16:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8).reshape(-1)
    return values.astype(f"<f{word.itemsize}").view(np.uint8).reshape(-1)


def scattered(octets: Octets, word: WordType, rng: np.random.Generator, share: float = 0.3) -> Octets:
    """Values of which a share is 0, here and there."""
    values = octets.copy().view(f"<u{word.itemsize}")
    values[rng.random(values.size) < share] = 0
    return values.view(np.uint8)


def _short(octets: Octets, word: WordType) -> Octets:
    """Values whose low bits are zero, as those of a narrower type are."""
    short_bits = SHAPES[word].short_bits
    values = octets.view(f"<u{word.itemsize}")
    return (values >> values.dtype.type(short_bits) << values.dtype.type(short_bits)).view(np.uint8)
