"""The CPU side of the codecs that have none: nvCOMP codes and decodes them on an NVIDIA GPU only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import CODEC_VERSIONS, FrameHeader
from .errors import CodecUnavailableError
from .extras import install_hint
from .words import WordType


class GpuOnlyCodec:
    """Says what is missing. See `tidegate.codec.base.Codec` for the methods.

    Args:
        name: What the caller calls the codec.
        number: What the frame header calls it.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.version = CODEC_VERSIONS[number]

    def encode_body(self, raw: NDArray[np.uint8], word: WordType, out: NDArray[np.uint8]) -> int | None:
        """Raise CodecUnavailableError."""
        raise CodecUnavailableError(
            f"codec {self.name!r} encodes on an NVIDIA GPU with nvCOMP only: {install_hint()}; for host memory use "
            "codec='zstd'"
        )

    def decode_body(self, header: FrameHeader, body: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Raise CodecUnavailableError."""
        raise CodecUnavailableError(
            f"this chunk was written by codec {self.name!r} of nvCOMP {header.parameter}, which decodes on an NVIDIA "
            f"GPU with nvCOMP only: {install_hint()}. To read it elsewhere, load it on such a machine and save it "
            "again with codec='zstd'"
        )
