"""The CPU side of the ans codec: there is none. nvCOMP codes and decodes it on an NVIDIA GPU only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import ANS_CODEC, CODEC_VERSIONS, FrameHeader
from .errors import CodecUnavailableError
from .extras import install_hint
from .words import WordType


class AnsCodec:
    """Says what is missing. See `tidegate.codec.base.Codec` for the methods."""

    name = "ans"
    number = ANS_CODEC
    version = CODEC_VERSIONS[ANS_CODEC]

    def encode_body(self, raw: NDArray[np.uint8], word: WordType, out: NDArray[np.uint8]) -> int | None:
        """Raise CodecUnavailableError."""
        raise CodecUnavailableError(
            f"codec 'ans' encodes on an NVIDIA GPU with nvCOMP only: {install_hint()}; for host memory use codec='zstd'"
        )

    def decode_body(self, header: FrameHeader, body: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Raise CodecUnavailableError."""
        raise CodecUnavailableError(
            f"this chunk was written by codec 'ans' of nvCOMP {header.parameter}, which decodes on an NVIDIA GPU with "
            f"nvCOMP only: {install_hint()}. To read it elsewhere, load it on such a machine and save it again with "
            "codec='zstd'"
        )
