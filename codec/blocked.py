"""The blocked body of FRAME.md: planes cut into blocks, listed in one table. Shared by the codecs of CPU and GPU."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from .base import SPLIT_CODECS, FrameHeader
from .errors import CorruptionError, TruncatedError

BLOCK_ALIGNMENT_BYTES = 16
MIN_BLOCK_BYTES = 4096
MAX_BLOCK_BYTES = 1 << 24

_PREAMBLE = struct.Struct("<IIII")
_ENTRY_BYTES = 4
_KIND_SHIFT = 30
_STORED_MASK = (1 << _KIND_SHIFT) - 1


class BlockKind(IntEnum):
    """How a block is stored. The number is part of the format; never renumber."""

    STORED = 0
    CODED = 1
    CONSTANT = 2


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """A checked table: every block lies inside the body, in order, without overlap.

    Attributes:
        block_bytes: Raw bytes of every block except the last of each plane.
        num_planes: Number of planes; the blocks of plane 0 come first.
        kinds: uint8[num_blocks], BlockKind of each block.
        stored_bytes: int64[num_blocks], bytes of each block in the body, without its padding.
        offsets: int64[num_blocks], where each block starts, from the start of the body; multiples of 16.
        raw_sizes: int64[num_blocks], bytes that each block decodes to.
    """

    block_bytes: int
    num_planes: int
    kinds: NDArray[np.uint8]
    stored_bytes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    raw_sizes: NDArray[np.int64]


def num_planes_of(header: FrameHeader) -> int:
    """Return the number of planes that the header's codec splits its word type into."""
    return header.word.itemsize if header.codec in SPLIT_CODECS else 1


def count_blocks(raw_bytes: int, num_planes: int, block_bytes: int) -> int:
    """Return how many blocks a chunk is cut into, over all planes."""
    return num_planes * -(-(raw_bytes // num_planes) // block_bytes)


def raw_block_sizes(raw_bytes: int, num_planes: int, block_bytes: int) -> NDArray[np.int64]:
    """Return the raw bytes of each block, plane by plane: int64[num_blocks]."""
    plane_bytes = raw_bytes // num_planes
    per_plane = -(-plane_bytes // block_bytes)
    sizes = np.full((num_planes, per_plane), block_bytes, dtype=np.int64)
    if per_plane:
        sizes[:, -1] = plane_bytes - (per_plane - 1) * block_bytes
    return sizes.reshape(-1)


def blocks_start(num_blocks: int) -> int:
    """Return the offset of the first block in the body: the bytes of preamble, table and its padding."""
    return padded_bytes(_PREAMBLE.size + _ENTRY_BYTES * num_blocks)


def block_offsets(stored_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each block starts, from the start of the body: int64[num_blocks]."""
    ends = blocks_start(stored_bytes.size) + np.cumsum(_padded(stored_bytes))
    return ends - _padded(stored_bytes)


def packed_body_bytes(stored_bytes: NDArray[np.int64]) -> int:
    """Return the length of a body whose blocks take `stored_bytes` (int64[num_blocks]) each."""
    return blocks_start(stored_bytes.size) + int(_padded(stored_bytes).sum())


def pack_table(
    block_bytes: int, num_planes: int, kinds: NDArray[np.uint8], stored_bytes: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return the start of a body, up to its first block.

    Args:
        block_bytes: Raw bytes of a full block; a power of two.
        num_planes: Number of planes.
        kinds: uint8[num_blocks], BlockKind of each.
        stored_bytes: int64[num_blocks], bytes of each without padding.

    Returns:
        uint8[blocks_start(num_blocks)].
    """
    table = np.zeros(blocks_start(kinds.size), dtype=np.uint8)
    _PREAMBLE.pack_into(table.data, 0, block_bytes, num_planes, kinds.size, 0)
    entries = (kinds.astype(np.uint32) << np.uint32(_KIND_SHIFT)) | stored_bytes.astype(np.uint32)
    table[_PREAMBLE.size : _PREAMBLE.size + _ENTRY_BYTES * kinds.size] = entries.astype("<u4").view(np.uint8)
    return table


def table_bytes(header: FrameHeader, start: NDArray[np.uint8]) -> int:
    """Check the preamble of a body and return how long its start is, up to the first block.

    Args:
        header: The frame's header; its raw_bytes must have been checked against what the caller expects.
        start: uint8[at least 16], the start of the body.

    Raises:
        TruncatedError: If `start` or the whole body is too short for it.
        CorruptionError: If a field is not what the header calls for.
    """
    if start.size < _PREAMBLE.size:
        raise TruncatedError(f"the body ends after {start.size} bytes, inside its {_PREAMBLE.size}-byte preamble")
    block_bytes, num_planes, num_blocks, reserved = _PREAMBLE.unpack_from(start.data)
    if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes & (block_bytes - 1):
        raise CorruptionError(
            f"the body gives blocks of {block_bytes} bytes, no power of two from {MIN_BLOCK_BYTES} to {MAX_BLOCK_BYTES}"
        )
    if num_planes != num_planes_of(header):
        raise CorruptionError(f"the body gives {num_planes} planes; {header.word.name} has {num_planes_of(header)}")
    if reserved:
        raise CorruptionError("the body's preamble has bits set where this version has zeros")
    expected = count_blocks(header.raw_bytes, num_planes, block_bytes)
    if num_blocks != expected:
        raise CorruptionError(f"the body lists {num_blocks} blocks where {header.raw_bytes} raw bytes make {expected}")
    if blocks_start(num_blocks) > header.body_bytes:
        raise TruncatedError(f"the table of {num_blocks} blocks is longer than the body of {header.body_bytes} bytes")
    return blocks_start(num_blocks)


def parse_body(header: FrameHeader, start: NDArray[np.uint8]) -> BlockTable:
    """Read and check the table of a blocked body. Allocates no more than a small multiple of the table's own bytes.

    Args:
        header: The frame's header; its raw_bytes must have been checked against what the caller expects.
        start: uint8[at least table_bytes(header, start)], the start of the body, or all of it.

    Raises:
        TruncatedError: If `start` or the body is too short.
        CorruptionError: If a field, a kind or a length does not hold.
    """
    first = table_bytes(header, start)
    if start.size < first:
        raise TruncatedError(f"the body ends after {start.size} bytes, inside its table of {first} bytes")
    block_bytes, num_planes, num_blocks, _ = _PREAMBLE.unpack_from(start.data)
    entries_end = _PREAMBLE.size + _ENTRY_BYTES * num_blocks
    entries = start[_PREAMBLE.size : entries_end].copy().view("<u4").astype(np.uint32)
    kinds = (entries >> np.uint32(_KIND_SHIFT)).astype(np.uint8)
    stored_bytes = (entries & np.uint32(_STORED_MASK)).astype(np.int64)
    raw_sizes = raw_block_sizes(header.raw_bytes, num_planes, block_bytes)
    _check_entries(kinds, stored_bytes, raw_sizes)
    if start[entries_end:first].any():
        raise CorruptionError("the padding behind the block table is not zero")
    if packed_body_bytes(stored_bytes) != header.body_bytes:
        raise CorruptionError(
            f"the blocks fill {packed_body_bytes(stored_bytes)} bytes and the header promises {header.body_bytes}"
        )
    return BlockTable(block_bytes, num_planes, kinds, stored_bytes, block_offsets(stored_bytes), raw_sizes)


def check_padding(table: BlockTable, body: NDArray[np.uint8]) -> None:
    """Raise CorruptionError unless the bytes between the blocks are zero.

    Args:
        table: The body's table.
        body: uint8[body_bytes], the whole body.
    """
    ends = table.offsets + table.stored_bytes
    gaps = _padded(table.stored_bytes) - table.stored_bytes
    steps = np.arange(BLOCK_ALIGNMENT_BYTES - 1, dtype=np.int64)
    places = (ends[:, None] + steps)[steps < gaps[:, None]]
    if body[places].any():
        raise CorruptionError("the padding behind a block is not zero")


def _check_entries(kinds: NDArray[np.uint8], stored_bytes: NDArray[np.int64], raw_sizes: NDArray[np.int64]) -> None:
    good = np.select(
        [kinds == BlockKind.STORED, kinds == BlockKind.CODED, kinds == BlockKind.CONSTANT],
        [stored_bytes == raw_sizes, (stored_bytes >= 1) & (stored_bytes < raw_sizes), stored_bytes == 1],
        False,
    )
    if not good.all():
        bad = int(np.argmin(good))
        raise CorruptionError(
            f"block {bad} of {kinds.size} has kind {kinds[bad]} and {stored_bytes[bad]} stored bytes "
            f"for {raw_sizes[bad]} raw bytes, which no writer makes"
        )


def _padded(stored_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    return (stored_bytes + (BLOCK_ALIGNMENT_BYTES - 1)) & ~(BLOCK_ALIGNMENT_BYTES - 1)


def padded_bytes(num_bytes: int) -> int:
    """Return the bytes that a block of `num_bytes` takes in the body, its padding included."""
    return -(-num_bytes // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
