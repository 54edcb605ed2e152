"""Mutated rans frames: `python -m tests.codec.fuzz_rans [frames] [seed] [numpy|numba]`. The tests do a few of the same.

With NUMBA_BOUNDSCHECK=1 (and a NUMBA_CACHE_DIR of its own) the compiled loops check every index, so that a read out of
bounds ends the run as an IndexError.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.codec.rans_chunks import encoded, every_kind, frame_of, use_coder
from tests.contract.codec_contract import CONTENTS
from tidegate.codec.errors import CodecError
from tidegate.codec.frame import decode_frame
from tidegate.codec.words import WordType

Octets = NDArray[np.uint8]

_GUARD_BYTES = 4096
_PREAMBLE_BYTES = 32


@cache
def small_bodies() -> list[tuple[WordType, Octets, Octets]]:
    """Word type, chunk and body of frames with short segments of every kind. Made once: copy what you change."""
    bodies = []
    for word in (WordType.BF16, WordType.F32, WordType.F64, WordType.F8):
        rng = np.random.default_rng(word)
        raw = every_kind(word, rng, segment_tiles=16)[-9 * 8192 :]
        body = encoded(raw, word, segment_tiles=16)
        assert body is not None
        bodies.append((word, raw, body))
        raw = CONTENTS["zero-runs"](word, 20_000 // word.itemsize, rng)
        body = encoded(raw, word)
        assert body is not None
        bodies.append((word, raw, body))
    return bodies


def mutated(body: Octets, rng: np.random.Generator) -> Octets:
    """A damaged copy of a body: bits, bytes, fields of the start, moved, cut or lengthened pieces."""
    octets = body.copy()
    start = int(np.frombuffer(body[12:16].tobytes(), dtype="<u4")[0]) + _PREAMBLE_BYTES
    num_segments = int(np.frombuffer(body[8:12].tobytes(), dtype="<u4")[0])
    directory_end = start + 8 * num_segments
    begin, end = [
        (0, _PREAMBLE_BYTES),
        (_PREAMBLE_BYTES, start),
        (start, directory_end),
        (start, directory_end),
        (directory_end, octets.size),
        (0, octets.size),
    ][int(rng.integers(6))]
    for _ in range(int(rng.choice([1, 1, 1, 2, 8]))):
        place = int(rng.integers(begin, end))
        way = int(rng.integers(6))
        if way < 2:
            octets[place] ^= 1 << int(rng.integers(8))
        elif way == 2:
            octets[place] = rng.integers(256)
        elif way == 3:
            octets[place : place + 8] = int(rng.choice([0, 255]))
        elif way == 4:
            other = int(rng.integers(begin, end)) & ~7
            piece = octets[other : other + 8].copy()
            octets[place & ~7 : (place & ~7) + piece.size] = piece[: octets.size - (place & ~7)]
        else:
            step = int(rng.integers(-2, 3))
            octets[place] = (int(octets[place]) + step) % 256
    if rng.random() < 0.1:
        length = max(1, octets.size + 16 * int(rng.integers(-4, 5)))
        octets = np.resize(octets, length)
    return octets


def check_mutation(word: WordType, raw: Octets, body: Octets) -> bool:
    """Decode a frame under digests that hold for its bytes; return whether it was refused.

    The chunk lies between guards, so that a write out of bounds shows.
    """
    room = torch.full((raw.size + 2 * _GUARD_BYTES,), 0x5A, dtype=torch.uint8)
    out = room[_GUARD_BYTES : _GUARD_BYTES + raw.size]
    try:
        decode_frame(frame_of(raw, word, body), out)
    except CodecError:
        refused = True
    else:
        refused = False
        assert out.numpy().tobytes() == raw.tobytes(), "a damaged frame decoded to something else"
    assert bool((room[:_GUARD_BYTES] == 0x5A).all()), "written in front of the chunk"
    assert bool((room[-_GUARD_BYTES:] == 0x5A).all()), "written behind the chunk"
    return refused


def mutations(count: int, seed: int) -> Iterator[tuple[WordType, Octets, Octets]]:
    """Yield word type, chunk and damaged body."""
    rng = np.random.default_rng(seed)
    bodies = small_bodies()
    for index in range(count):
        word, raw, body = bodies[index % len(bodies)]
        yield word, raw, mutated(body, rng)


def main() -> None:
    """Decode many mutated frames."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frames", type=int, nargs="?", default=100_000)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    parser.add_argument("coder", nargs="?", default="numba")
    options = parser.parse_args()
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_coder(options.coder, monkeypatch)
        refused = sum(check_mutation(*mutation) for mutation in mutations(options.frames, options.seed))
    print(f"{options.frames} mutated frames, {refused} refused, {options.frames - refused} decoded bit-exact")


if __name__ == "__main__":
    main()
