"""The zstd codec on the CPU: planes, cut into blocks, each one standard Zstandard frame. FRAME.md gives the bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from .base import CODEC_VERSIONS, ZSTD_CODEC, FrameHeader
from .blocked import (
    BlockKind,
    blocks_start,
    check_padding,
    pack_table,
    padded_bytes,
    parse_body,
    raw_block_sizes,
)
from .planes import extract_plane
from .words import WordType
from .zstd_decode import decode_blocks

BLOCK_BYTES = 1 << 18
"""Raw bytes of a block that this codec writes; it reads any that FRAME.md allows."""

# A plane is extracted this many blocks at a time.
_STRIP_BYTES = 4 * BLOCK_BYTES
_SAMPLE_PIECES = 32
_SAMPLE_PIECE_BYTES = 256
_MIN_PROBED_BYTES = 1 << 16


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
    """The compressors of one thread; they cannot be shared."""

    def __init__(self) -> None:
        # Exponents have few values and no repeats: the matches that a larger table finds are short, cost more than
        # their literals and slow the search down (a table of 2**14 gives ratio 2.8 at 260 MB/s, 2**6 3.07 at 640).
        self.exponents = zstandard.ZstdCompressor(compression_params=_parameters(6, 7))
        self.mantissas = zstandard.ZstdCompressor(compression_params=_parameters(14, 7))
        self.integers = zstandard.ZstdCompressor(compression_params=_parameters(10, 7))
        self.octets = zstandard.ZstdCompressor(compression_params=_parameters(14, 6))

    def compressor(self, word: WordType, plane: int) -> zstandard.ZstdCompressor:
        if word.itemsize == 1:
            return self.octets
        if not word.is_float:
            return self.integers
        return self.mantissas if plane else self.exponents


_contexts = _Contexts()


@dataclass(slots=True)
class _Body:
    """A body being written: the bytes up to `end` are final, and so is the table up to `num_blocks`."""

    out: NDArray[np.uint8]
    kinds: NDArray[np.uint8]
    stored_bytes: NDArray[np.int64]
    end: int
    num_blocks: int = 0

    def put(self, kind: BlockKind, block: NDArray[np.uint8]) -> bool:
        """Append a block and its padding, or return False where there is no room for it."""
        block_end = self.end + block.size
        padded_end = self.end + padded_bytes(block.size)
        if padded_end >= self.out.size:
            return False
        place = self.out[self.end : block_end]
        if place.ctypes.data != block.ctypes.data:
            np.copyto(place, block)
        self.out[block_end:padded_end] = 0
        self.kinds[self.num_blocks] = kind
        self.stored_bytes[self.num_blocks] = block.size
        self.num_blocks += 1
        self.end = padded_end
        return True


class ZstdCodec:
    """Zstandard on byte planes. See `tidegate.codec.base.Codec` for the methods."""

    name = "zstd"
    number = ZSTD_CODEC
    version = CODEC_VERSIONS[ZSTD_CODEC]

    def encode_body(self, raw: NDArray[np.uint8], word: WordType, out: NDArray[np.uint8]) -> int | None:
        """Write a blocked body, or return None where it would be as long as the chunk or longer."""
        num_planes = word.itemsize
        plane_bytes = raw.size // num_planes
        num_blocks = raw_block_sizes(raw.size, num_planes, BLOCK_BYTES).size
        kinds = np.zeros(num_blocks, dtype=np.uint8)
        body = _Body(out, kinds, np.zeros(num_blocks, dtype=np.int64), blocks_start(num_blocks))
        scratch = np.empty(min(_STRIP_BYTES, plane_bytes), dtype=np.uint8)
        for plane in range(num_planes):
            for begin in range(0, plane_bytes, _STRIP_BYTES):
                values = raw[begin * num_planes : (begin + _STRIP_BYTES) * num_planes]
                num_values = values.size // num_planes
                # A plane that will be stored is extracted to where it will be stored, if that much room is left.
                # No block is overwritten before it is read: what is put before it is never longer than it was.
                place = out[body.end : body.end + num_values]
                strip = extract_plane(values, word, plane, place if place.size == num_values else scratch[:num_values])
                if not _put_strip(body, strip, word, plane):
                    return None
        table = pack_table(BLOCK_BYTES, num_planes, body.kinds, body.stored_bytes)
        out[: table.size] = table
        return body.end

    def decode_body(self, header: FrameHeader, body: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Check the whole table and all padding, then decode."""
        table = parse_body(header, body)
        check_padding(table, body)
        decode_blocks(table, header.word, body, out)


def _put_strip(body: _Body, strip: NDArray[np.uint8], word: WordType, plane: int) -> bool:
    compressor = _contexts.compressor(word, plane)
    incompressible = word.is_float and plane > 0 and _looks_random(strip)
    for begin in range(0, strip.size, BLOCK_BYTES):
        block = strip[begin : begin + BLOCK_BYTES]
        kind, stored = BlockKind.STORED, block
        if not incompressible:
            kind, stored = _encode_block(block, compressor)
        if not body.put(kind, stored):
            return False
    return True


def _encode_block(
    block: NDArray[np.uint8], compressor: zstandard.ZstdCompressor
) -> tuple[BlockKind, NDArray[np.uint8]]:
    # Three values first: almost all blocks that vary are told apart by them.
    if block[0] == block[-1] == block[block.size // 2] and not (block != block[0]).any():
        return BlockKind.CONSTANT, block[:1]
    coded = compressor.compress(block.data)
    if padded_bytes(len(coded)) < padded_bytes(block.size):
        return BlockKind.CODED, np.frombuffer(coded, dtype=np.uint8)
    return BlockKind.STORED, block


def _looks_random(strip: NDArray[np.uint8]) -> bool:
    """Return whether 8 KiB taken evenly from a strip show no skew at all: sign and mantissa bits of dense values.

    The chi-squared statistic of 256 equally likely bytes is 255 ± 23. Zeros in 1 % of the values raise it by 210, more
    by the square. Asking zstd instead takes five times as long.
    """
    if strip.size < _MIN_PROBED_BYTES:
        return False
    step = strip.size // _SAMPLE_PIECES
    sample = strip[: step * _SAMPLE_PIECES].reshape(_SAMPLE_PIECES, step)[:, :_SAMPLE_PIECE_BYTES]
    counts = np.bincount(sample.ravel(), minlength=256)
    expected = sample.size / 256
    return float(np.square(counts - expected).sum()) / expected < 400
