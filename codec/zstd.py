"""The zstd codec on the CPU: planes, cut into blocks, each one standard Zstandard frame. FRAME.md gives the bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import zstandard
from numpy.typing import NDArray

from .base import CODEC_VERSIONS, ZSTD_CODEC, FrameHeader
from .blocked import MAX_BLOCK_BYTES
from .errors import CorruptionError
from .plane_decode import decode_planes
from .plane_encode import Compress, encode_planes
from .words import WordType

BLOCK_BYTES = 1 << 18
"""Raw bytes of a block that this codec writes; it reads any that FRAME.md allows."""


def _parameters(hash_log: int, min_match: int) -> zstandard.ZstdCompressionParameters:
    return zstandard.ZstdCompressionParameters(
        window_log=18,
        hash_log=hash_log,
        chain_log=6,
        search_log=1,
        min_match=min_match,
        target_length=0,
        strategy=zstandard.STRATEGY_FAST,
    )


class _Contexts(threading.local):
    """The compressors and the decompressor of one thread; they cannot be shared."""

    def __init__(self) -> None:
        # Exponents have few values and no repeats: the matches that a larger table finds are short, cost more than
        # their literals and slow the search down (a table of 2**14 gives ratio 2.8 at 260 MB/s, 2**6 3.07 at 640).
        self.exponents = zstandard.ZstdCompressor(compression_params=_parameters(6, 7))
        self.mantissas = zstandard.ZstdCompressor(compression_params=_parameters(14, 7))
        self.integers = zstandard.ZstdCompressor(compression_params=_parameters(10, 7))
        self.octets = zstandard.ZstdCompressor(compression_params=_parameters(14, 6))
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_BLOCK_BYTES)

    def compressor(self, word: WordType, plane: int) -> zstandard.ZstdCompressor:
        if word.itemsize == 1:
            return self.octets
        if not word.is_float:
            return self.integers
        return self.mantissas if plane else self.exponents


_contexts = _Contexts()


class ZstdCodec:
    """Zstandard on byte planes. See `tidegate.codec.base.Codec` for the methods."""

    name = "zstd"
    number = ZSTD_CODEC
    version = CODEC_VERSIONS[ZSTD_CODEC]

    def encode_body(self, raw: NDArray[np.uint8], word: WordType, out: NDArray[np.uint8]) -> int | None:
        """Write a blocked body, or return None where it would be as long as the chunk or longer."""
        return encode_planes(raw, word, out, BLOCK_BYTES, _compress_of)

    def decode_body(self, header: FrameHeader, body: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Check the whole table and all padding, then decode."""
        decode_planes(header, body, out, _decode_block)


def _compress_of(word: WordType, plane: int) -> Compress:
    return partial(_compress, _contexts.compressor(word, plane))


def _compress(compressor: zstandard.ZstdCompressor, blocks: Sequence[memoryview]) -> list[memoryview]:
    # All in one call, which gives up the GIL once; only zstandard's own C backend has it.
    if len(blocks) == 1 or "multi_compress_to_buffer" not in zstandard.backend_features:
        return [memoryview(compressor.compress(block)) for block in blocks]
    coded = compressor.multi_compress_to_buffer(list(blocks), threads=0)
    return [memoryview(coded[i]) for i in range(len(coded))]  # type: ignore[arg-type]  # as its stubs do not say


def _decode_block(coded: memoryview, raw_bytes: int, index: int) -> bytes:
    # One call a block: zstandard's call for many is no faster once its output is copied, and does not say whether
    # anything follows a frame.
    try:
        # zstandard allocates what the frame says, so ask that first; -1 is a frame that does not say.
        promised = zstandard.frame_content_size(coded)
        if promised not in (-1, raw_bytes):
            raise CorruptionError(f"block {index} would decode to {promised} bytes instead of {raw_bytes}")
        decoded = _contexts.decompressor.decompress(coded, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise CorruptionError(f"block {index} is no Zstandard frame of {raw_bytes} bytes: {exc}") from exc
    if len(decoded) != raw_bytes:
        raise CorruptionError(f"block {index} decodes to {len(decoded)} bytes instead of {raw_bytes}")
    return decoded
