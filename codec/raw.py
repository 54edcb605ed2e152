"""The raw codec: the chunk as it is. Every other codec falls back to it where it would not save bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import CODEC_VERSIONS, RAW_CODEC, FrameHeader
from .words import WordType


class RawCodec:
    """Stores the chunk itself. See `tidegate.codec.base.Codec` for the methods."""

    name = "raw"
    number = RAW_CODEC
    version = CODEC_VERSIONS[RAW_CODEC]

    def encode_body(self, raw: NDArray[np.uint8], word: WordType, out: NDArray[np.uint8]) -> int | None:
        """Return None: the caller stores the chunk."""
        return None

    def decode_body(self, header: FrameHeader, body: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Copy the body, whose length unpack_header has found equal to the chunk's."""
        np.copyto(out, body)
