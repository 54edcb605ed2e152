"""Cut a state's extents into chunks. Pure data: no tensors, no devices, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.codec.words import WordType

from .chunk_sizes import ChunkSizes

MIN_CHUNK_BYTES = 64 << 10
MAX_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [offset, offset + num_bytes) of extents [first_extent, end_extent) laid end to end.

    A chunk is either one piece of one large extent, or several whole small extents (then `offset` is 0). All its
    extents have one word type and one role, and lie on one device.
    """

    index: int
    word: WordType
    first_extent: int
    end_extent: int
    offset: int
    num_bytes: int

    @property
    def is_piece(self) -> bool:
        """Whether the chunk lies inside one extent, so that it can be read and written in place."""
        return self.end_extent - self.first_extent == 1

    @property
    def extents(self) -> range:
        """The extents that it holds, or holds a piece of."""
        return range(self.first_extent, self.end_extent)

    def span(self, extent: int, extent_bytes: Sequence[int]) -> tuple[int, int]:
        """Return which bytes of one of its extents it holds: the first, and how many.

        Args:
            extent: The extent.
            extent_bytes: Length of every extent.
        """
        return (self.offset, self.num_bytes) if self.is_piece else (0, extent_bytes[extent])


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The chunks of a save, in the order of their extents, and the sizes that were asked for."""

    chunks: tuple[Chunk, ...]
    raw_bytes: int
    sizes: ChunkSizes


def plan_save(
    extent_bytes: Sequence[int],
    extent_words: Sequence[WordType],
    extent_devices: Sequence[str],
    extent_roles: Sequence[str],
    sizes: ChunkSizes,
) -> SavePlan:
    """Cut extents into chunks of at most their device's size, less where the state is small: its stages overlap too.

    An extent longer than a chunk is cut into pieces; shorter neighbours of one word type, role and device share one.
    Empty extents need no bytes and may lie in any chunk or in none.

    Args:
        extent_bytes: Length of each extent.
        extent_words: Word type of each extent.
        extent_devices: Device of each extent, such as "cpu" or "cuda:0".
        extent_roles: Role of each extent, such as "exp_avg"; values of one role compress alike.
        sizes: The longest chunks.
    """
    raw_bytes = sum(extent_bytes)
    capped = sizes.for_state(raw_bytes)
    limits = {device: capped.on(device) for device in set(extent_devices)}
    groups = list(zip(extent_words, extent_devices, extent_roles, strict=True))
    chunks: list[Chunk] = []
    first = 0
    filled = 0

    def flush(end: int) -> None:
        nonlocal first, filled
        if filled:
            chunks.append(Chunk(len(chunks), extent_words[first], first, end, 0, filled))
        first, filled = end, 0

    for i, num_bytes in enumerate(extent_bytes):
        chunk_bytes = limits[extent_devices[i]]
        if (i > first and groups[i] != groups[i - 1]) or filled + num_bytes > chunk_bytes:
            flush(i)
        if num_bytes > chunk_bytes:
            for offset in range(0, num_bytes, chunk_bytes):
                size = min(chunk_bytes, num_bytes - offset)
                chunks.append(Chunk(len(chunks), extent_words[i], i, i + 1, offset, size))
            first = i + 1
        else:
            filled += num_bytes
    flush(len(extent_bytes))
    return SavePlan(tuple(chunks), raw_bytes, sizes)
