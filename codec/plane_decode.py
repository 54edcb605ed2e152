"""Reading a body of planes on the CPU, strip by strip, however short its blocks are. FRAME.md gives the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .base import FrameHeader
from .blocked import BlockKind, BlockTable, check_padding, parse_body
from .planes import join_planes

Decode: TypeAlias = Callable[[memoryview, int, int], bytes]
"""Decodes one block, given its raw bytes and, for error messages, its index. Raises CorruptionError."""

# Bytes of every plane that are joined at a time: what NumPy costs a call does not add up over the short blocks that a
# GPU writes, and a strip stays in the caches between its decoding and its joining.
_STRIP_BYTES = 1 << 18


def decode_planes(header: FrameHeader, body: NDArray[np.uint8], out: NDArray[np.uint8], decode: Decode) -> None:
    """Check the whole table and all padding, then decode all blocks and join their planes.

    Blocks; the heavy part runs without the GIL.

    Args:
        header: The frame's header.
        body: uint8[body_bytes], contiguous.
        out: uint8[raw_bytes], contiguous, not overlapping `body`; undefined after an error.
        decode: What decodes a coded block.

    Raises:
        CorruptionError: If the table does not hold, or a coded block is not what the codec makes of the block.
    """
    table = parse_body(header, body)
    check_padding(table, body)
    num_planes = table.num_planes
    per_plane = table.kinds.size // num_planes
    step = max(_STRIP_BYTES // table.block_bytes, 1)
    stride = table.block_bytes * num_planes
    # A longer block is a strip of its own and needs no room.
    scratch = np.empty((num_planes, min(_STRIP_BYTES, out.size // num_planes)), dtype=np.uint8)
    for begin in range(0, per_plane, step):
        strip = out[begin * stride : (begin + step) * stride]
        num_values = strip.size // num_planes
        rooms = [strip] if num_planes == 1 else list(scratch[:, :num_values])
        planes = []
        for plane, room in enumerate(rooms):
            first = plane * per_plane + begin
            last = min(first + step, (plane + 1) * per_plane)
            planes.append(_gather(_pieces(table, body, first, last, decode), num_values, room))
        if planes[0] is not strip:
            join_planes(planes, header.word, strip)


def _gather(pieces: Iterator[bytes | NDArray[np.uint8]], num_bytes: int, room: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return all pieces in a row: the only one as it lies; if there are more, `room`, which they fill."""
    place, copied = room.data, 0
    for piece in pieces:
        if len(piece) == num_bytes:
            return np.frombuffer(piece, dtype=np.uint8) if isinstance(piece, bytes) else piece
        end = copied + len(piece)
        if isinstance(piece, bytes):
            # Short, and many: a memoryview copies one in the time that NumPy takes to start.
            place[copied:end] = piece
        else:
            room[copied:end] = piece
        copied = end
    return room


def _pieces(
    table: BlockTable, body: NDArray[np.uint8], first: int, last: int, decode: Decode
) -> Iterator[bytes | NDArray[np.uint8]]:
    """Yield what the blocks first … last - 1 decode to: bytes for each coded one, an array for each run of others."""
    columns = (table.kinds, table.offsets, table.stored_bytes, table.raw_sizes)
    rows = zip(*(column[first:last].tolist() for column in columns), strict=True)
    index = first
    for kind, run in groupby(rows, key=itemgetter(0)):
        blocks = list(run)
        _, start, _, _ = blocks[0]
        if kind == BlockKind.STORED:
            # They lie back to back: none but the last of a plane has padding.
            _, offset, stored_bytes, _ = blocks[-1]
            yield body[start : offset + stored_bytes]
        elif kind == BlockKind.CODED:
            for i, (_, offset, stored_bytes, raw_bytes) in enumerate(blocks, index):
                yield decode(body.data[offset : offset + stored_bytes], raw_bytes, i)
        else:
            yield _repeat(body[[offset for _, offset, _, _ in blocks]], [raw_bytes for *_, raw_bytes in blocks])
        index += len(blocks)


def _repeat(octets: NDArray[np.uint8], counts: list[int]) -> NDArray[np.uint8]:
    if (octets == octets[0]).all():
        return np.broadcast_to(octets[:1], sum(counts))
    return np.repeat(octets, counts)
