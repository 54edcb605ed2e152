"""The rans codec on the CPU: rANS over exponents, everything else packed raw. RANS.md gives the bytes."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from . import rans_numpy
from .base import CODEC_VERSIONS, RANS_CODEC, FrameHeader
from .errors import CorruptionError
from .rans_format import LOG2_SUM, pack_start, plan_layout
from .rans_ready import LOOPS
from .rans_start import unpack_layout
from .rans_survey import survey
from .rans_tables import quantise
from .rans_units import SHAPES, UnitShape
from .words import WordType


class RansCodec:
    """rANS in segments. See `tidegate.codec.base.Codec` for the methods.

    With numba installed, compiled loops do the work as soon as they are ready (rans_ready.py); until then, and without
    it, NumPy does, at a fifth of the speed. Both write the same bytes.

    Args:
        coder: rans_numba or rans_numpy; None: the faster of what is ready.
    """

    name = "rans"
    number = RANS_CODEC
    version = CODEC_VERSIONS[RANS_CODEC]

    def __init__(self, coder: ModuleType | None = None) -> None:
        self._coder = coder

    def encode_body(self, raw: NDArray[np.uint8], word: WordType, out: NDArray[np.uint8]) -> int | None:
        """Write a body, or return None where it would be as long as the chunk or longer."""
        if not raw.size:
            return None
        chunk, body = _aligned(raw), _aligned(out)
        body_bytes = encode_chunk(chunk, word, body, SHAPES[word], LOG2_SUM, self._coder)
        if body_bytes is not None and body is not out:
            out[:body_bytes] = body[:body_bytes]
        return body_bytes

    def decode_body(self, header: FrameHeader, body: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Check everything that RANS.md asks to check, then decode."""
        if not out.size:
            raise CorruptionError("a rans body stands for no bytes, which no writer makes")
        octets, chunk = _aligned(body), _aligned(out)
        (self._coder or _coder()).decode_segments(unpack_layout(header, octets), octets, chunk)
        if chunk is not out:
            np.copyto(out, chunk)


def encode_chunk(
    chunk: NDArray[np.uint8],
    word: WordType,
    body: NDArray[np.uint8],
    shape: UnitShape,
    log2_sum: int,
    coder: ModuleType | None = None,
) -> int | None:
    """Write the body of a chunk that is not empty; return its length, or None where it would be no shorter.

    Args:
        chunk: uint8[raw_bytes], at an address that is a multiple of 8, as `body` is.
        word: What one value is.
        body: uint8[raw_bytes].
        shape: The word's, with any number of tiles a segment that RANS.md allows.
        log2_sum: n.
        coder: As for `RansCodec`.
    """
    coder = coder or _coder()
    found = survey(chunk, shape, coder.count_symbols)
    frequencies = np.stack([quantise(row, shape.spread, found.sampled, log2_sum) for row in found.counts])
    layout = plan_layout(shape, found.tiles, frequencies, log2_sum, found.directory)
    if layout.raw_end >= chunk.size or not coder.encode_segments(chunk, found.coded, layout, body):
        return None
    if layout.body_bytes >= chunk.size:
        return None
    start = pack_start(word, frequencies, layout)
    body[: start.size] = start
    return layout.body_bytes


def _coder() -> ModuleType:
    """Return the module that codes segments: the compiled one once it is ready."""
    return LOOPS.coder() or rans_numpy


def _aligned(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the array, or a copy of it where its address is no multiple of 8, or where it cannot be written to.

    The loops are compiled for arrays that can; for others they would be compiled again, here and now.
    """
    return octets if octets.ctypes.data % 8 == 0 and octets.flags.writeable else octets.copy()
