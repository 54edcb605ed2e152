"""The deflate codec on the CPU: planes, cut into blocks, each a raw Deflate stream. FRAME.md gives the bytes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .base import CODEC_VERSIONS, DEFLATE_CODEC, FrameHeader
from .errors import CorruptionError
from .plane_decode import decode_planes
from .plane_encode import Compress, encode_planes
from .words import WordType

BLOCK_BYTES = 1 << 16
"""Raw bytes of a block that this codec writes: what nvCOMP decodes best. It reads any that FRAME.md allows."""

_RAW_WINDOW_BITS = -15  # negative: no header and no checksum around the stream


class DeflateCodec:
    """Entropy-only Deflate on byte planes. See `tidegate.codec.base.Codec` for the methods."""

    name = "deflate"
    number = DEFLATE_CODEC
    version = CODEC_VERSIONS[DEFLATE_CODEC]

    def encode_body(self, raw: NDArray[np.uint8], word: WordType, out: NDArray[np.uint8]) -> int | None:
        """Write a blocked body, or return None where it would be as long as the chunk or longer."""
        return encode_planes(raw, word, out, BLOCK_BYTES, _compress_of)

    def decode_body(self, header: FrameHeader, body: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Check the whole table and all padding, then decode."""
        decode_planes(header, body, out, _decode_block)


def _compress_of(word: WordType, plane: int) -> Compress:
    # Exponents have few values and hardly a repeat, so zlib's search for matches takes time and gains nothing there.
    # What is worth a search are integers and the mantissas that are not noise (noise is stored without asking zlib).
    skewed = word.is_float and plane == 0
    return _compress_skewed if skewed else _compress_any


def _compress_skewed(blocks: Sequence[memoryview]) -> list[memoryview]:
    return [memoryview(_compress(block, zlib.Z_HUFFMAN_ONLY)) for block in blocks]


def _compress_any(blocks: Sequence[memoryview]) -> list[memoryview]:
    return [memoryview(_compress(block, zlib.Z_DEFAULT_STRATEGY)) for block in blocks]


def _compress(block: memoryview, strategy: int) -> bytes:
    compressor = zlib.compressobj(1, zlib.DEFLATED, _RAW_WINDOW_BITS, zlib.DEF_MEM_LEVEL, strategy)
    return compressor.compress(block) + compressor.flush()


def _decode_block(coded: memoryview, raw_bytes: int, index: int) -> bytes:
    decompressor = zlib.decompressobj(_RAW_WINDOW_BITS)
    try:
        # One byte more than there should be: a stream that goes on shows, and none can take more memory than that.
        decoded = decompressor.decompress(coded, raw_bytes + 1)
    except zlib.error as exc:
        raise CorruptionError(f"block {index} is no Deflate stream of {raw_bytes} bytes: {exc}") from exc
    if len(decoded) != raw_bytes or not decompressor.eof:
        raise CorruptionError(f"block {index} does not decode to exactly {raw_bytes} bytes")
    return decoded
