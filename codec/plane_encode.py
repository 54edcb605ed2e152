"""Writing a body of planes on the CPU: blocks that are constant, coded or stored. FRAME.md gives the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .blocked import BlockKind, blocks_start, pack_table, padded_bytes, raw_block_sizes
from .planes import extract_plane
from .words import WordType

Compress: TypeAlias = Callable[[Sequence[memoryview]], Sequence[memoryview]]
"""Codes some blocks, each by itself."""

# A plane is extracted in strips, multiples of every block size in use. Each call that gives up the GIL has to wait for
# it, up to 5 ms beside a thread that runs Python without pause; so there are few, on long strips, and bytes are moved
# with the GIL, 20 microseconds a block. A strip and its blocks, coded, are memory beyond the host budget.
_MAX_STRIP_BYTES = 8 << 20
_MIN_STRIP_BYTES = 1 << 20
_STRIPS_OF_CHUNK = 8
_SAMPLE_PIECES = 32
_SAMPLE_PIECE_BYTES = 256
_MIN_PROBED_BYTES = 1 << 16


@dataclass(slots=True)
class _Body:
    """A body being written: the bytes up to `end` are final, and so is the table up to `num_blocks`."""

    out: NDArray[np.uint8]
    kinds: NDArray[np.uint8]
    stored_bytes: NDArray[np.int64]
    end: int
    num_blocks: int = 0

    def put(self, kind: BlockKind, block: memoryview, begin: int | None) -> bool:
        """Append a block and its padding, or return False where there is no room for it.

        Args:
            kind: Its kind.
            block: Its bytes.
            begin: Where in `out` they are already; None: they are elsewhere.
        """
        block_end = self.end + block.nbytes
        padded_end = self.end + padded_bytes(block.nbytes)
        if padded_end >= self.out.size:
            return False
        if begin != self.end:
            self.out.data[self.end : block_end] = block
        self.out.data[block_end:padded_end] = bytes(padded_end - block_end)
        self.kinds[self.num_blocks] = kind
        self.stored_bytes[self.num_blocks] = block.nbytes
        self.num_blocks += 1
        self.end = padded_end
        return True


def encode_planes(
    raw: NDArray[np.uint8],
    word: WordType,
    out: NDArray[np.uint8],
    block_bytes: int,
    compress_of: Callable[[WordType, int], Compress],
) -> int | None:
    """Write a blocked body. Blocks; the heavy part runs without the GIL.

    Args:
        raw: uint8[raw_bytes], contiguous, a whole number of values.
        word: What one value is.
        out: uint8[raw_bytes], contiguous, not overlapping `raw`. What lies behind the body afterwards is undefined.
        block_bytes: Raw bytes of a block; a power of two of at most 1 MiB.
        compress_of: Gives what codes the blocks of a plane.

    Returns:
        The body's length, or None where it would be as long as the chunk or longer.
    """
    num_planes = word.itemsize
    plane_bytes = raw.size // num_planes
    num_blocks = raw_block_sizes(raw.size, num_planes, block_bytes).size
    kinds = np.zeros(num_blocks, dtype=np.uint8)
    body = _Body(out, kinds, np.zeros(num_blocks, dtype=np.int64), blocks_start(num_blocks))
    strip_bytes = _strip_bytes(raw.size)
    scratch = np.empty(min(strip_bytes, plane_bytes), dtype=np.uint8)
    for plane in range(num_planes):
        compress = compress_of(word, plane)
        for begin in range(0, plane_bytes, strip_bytes):
            values = raw[begin * num_planes : (begin + strip_bytes) * num_planes]
            num_values = values.size // num_planes
            # A plane that will be stored is extracted to where it will be stored, if that much room is left.
            # No block is overwritten before it is read: what is put before it is never longer than it was.
            place = out[body.end : body.end + num_values]
            is_there = place.size == num_values and num_planes > 1
            begins_at = body.end if is_there else None
            strip = extract_plane(values, word, plane, place if is_there else scratch[:num_values])
            incompressible = word.is_float and plane > 0 and _looks_random(strip)
            if not _put_strip(body, strip, begins_at, block_bytes, None if incompressible else compress):
                return None
    table = pack_table(block_bytes, num_planes, body.kinds, body.stored_bytes)
    out[: table.size] = table
    return body.end


def _strip_bytes(raw_bytes: int) -> int:
    """How much of a plane is worked on at a time: a power of two, no more than a share of the chunk beyond 1 MiB."""
    share = max(raw_bytes // _STRIPS_OF_CHUNK, _MIN_STRIP_BYTES)
    return min(_MAX_STRIP_BYTES, 1 << share.bit_length() - 1)


def _put_strip(
    body: _Body, strip: NDArray[np.uint8], begins_at: int | None, block_bytes: int, compress: Compress | None
) -> bool:
    """Append the blocks of a strip, which is in `body.out` from `begins_at` on, or elsewhere."""
    starts = range(0, strip.size, block_bytes)
    blocks = [strip[start : start + block_bytes] for start in starts]
    varied = [] if compress is None else [i for i, block in enumerate(blocks) if not _is_constant(block)]
    made = compress([blocks[i].data for i in varied]) if compress is not None and varied else ()
    coded = dict(zip(varied, made, strict=True))
    for i, block in enumerate(blocks):
        kind, stored, begin = BlockKind.STORED, block.data, None if begins_at is None else begins_at + starts[i]
        if i in coded and padded_bytes(coded[i].nbytes) < padded_bytes(block.size):
            kind, stored, begin = BlockKind.CODED, coded[i], None
        elif compress is not None and i not in coded:
            kind, stored = BlockKind.CONSTANT, block.data[:1]
        if not body.put(kind, stored, begin):
            return False
    return True


def _is_constant(block: NDArray[np.uint8]) -> bool:
    # Three values first: almost all blocks that vary are told apart by them.
    return bool(block[0] == block[-1] == block[block.size // 2]) and not (block != block[0]).any()


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
