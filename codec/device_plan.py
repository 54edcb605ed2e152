"""How a chunk is cut for the GPU codecs, and how much device memory that takes. Plain numbers: needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from .base import FRAME_ALIGNMENT_BYTES, frame_bound_bytes
from .blocked import BLOCK_ALIGNMENT_BYTES, blocks_start
from .device_report import report_words
from .nvcomp_codecs import nvcomp_codec
from .words import WordType

BUFFER_ALIGNMENT_BYTES = 256
"""Where buffers and planes start: whole memory transactions."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Candidates first … first + count - 1, and the blocks low … high - 1 that are settled once they are coded."""

    first: int
    count: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How one chunk is cut. Blocks are numbered plane by plane, candidates (blocks that nvCOMP gets) likewise.

    Attributes:
        raw_bytes: Length of the chunk; more than 0.
        num_planes: Planes that it is split into.
        plane_stride: Bytes from one plane to the next in the planes buffer.
        block_bytes: Raw bytes of a block; the last of a plane may be shorter.
        coded_planes: The first planes, which nvCOMP gets; the others are only looked at for constant blocks.
        coded_per_plane: How many blocks of each such plane nvCOMP gets.
    """

    raw_bytes: int
    num_planes: int
    plane_stride: int
    block_bytes: int
    coded_planes: int
    coded_per_plane: int

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane."""
        return self.raw_bytes // self.num_planes

    @property
    def blocks_per_plane(self) -> int:
        """Blocks of one plane."""
        return -(-self.plane_bytes // self.block_bytes)

    @property
    def num_blocks(self) -> int:
        """Blocks of the chunk."""
        return self.num_planes * self.blocks_per_plane

    @property
    def num_candidates(self) -> int:
        """Blocks that nvCOMP gets."""
        return self.coded_planes * self.coded_per_plane

    @property
    def max_block_bytes(self) -> int:
        """Raw bytes of the longest block."""
        return min(self.block_bytes, self.plane_bytes)

    @property
    def can_shrink(self) -> bool:
        """Whether a body could be shorter than the chunk at all: table and one padded byte a block."""
        return blocks_start(self.num_blocks) + BLOCK_ALIGNMENT_BYTES * self.num_blocks < self.raw_bytes

    def batches(self, max_candidates: int) -> Iterator[Batch]:
        """Yield the batches in order; together they cover every block once. There is always at least one."""
        low = 0
        for first in range(0, max(self.num_candidates, 1), max_candidates):
            end = min(first + max_candidates, self.num_candidates)
            high = self.num_blocks if end == self.num_candidates else self._block_of(end)
            yield Batch(first, end - first, low, high)
            low = high

    def _block_of(self, candidate: int) -> int:
        plane, index = divmod(candidate, self.coded_per_plane)
        return plane * self.blocks_per_plane + index


def lay_out(codec: str, word: WordType, raw_bytes: int, block_bytes: int) -> BlockLayout:
    """Decide how a chunk is cut.

    Args:
        codec: A codec of nvCOMP.
        word: What one value is.
        raw_bytes: Length of the chunk; a positive multiple of the itemsize.
        block_bytes: Raw bytes of a block.
    """
    nvcomp = nvcomp_codec(codec)
    num_planes = word.itemsize if nvcomp.splits_planes else 1
    plane_bytes = raw_bytes // num_planes
    whole, rest = divmod(plane_bytes, block_bytes)
    return BlockLayout(
        raw_bytes=raw_bytes,
        num_planes=num_planes,
        plane_stride=round_up(plane_bytes, BUFFER_ALIGNMENT_BYTES),
        block_bytes=block_bytes,
        coded_planes=_coded_planes(word, num_planes),
        coded_per_plane=whole + (rest >= nvcomp.min_candidate_bytes),
    )


def _coded_planes(word: WordType, num_planes: int) -> int:
    """Of a float, only the planes that hold exponent bits: the mantissa is noise, and nvCOMP's Zstd is slow."""
    if not word.is_float or num_planes == 1:
        return num_planes
    return 2 if word is WordType.F64 else 1


@dataclass(frozen=True, slots=True)
class EncoderMemory:
    """Bytes of each device buffer of one encoder; all start at multiples of BUFFER_ALIGNMENT_BYTES.

    Attributes:
        planes: The chunk, split.
        slots: What nvCOMP writes, a slot a candidate of the batch.
        temp: nvCOMP's own scratch.
        arrays: Five arrays of one 8-byte item a candidate of the batch.
        offsets: uint64[blocks]
        constant: uint8[blocks]
        report: One report, per slot.
        frame: One padded frame, per slot, at a multiple of FRAME_ALIGNMENT_BYTES.
    """

    planes: int
    slots: int
    temp: int
    arrays: int
    offsets: int
    constant: int
    report: int
    frame: int

    def total_bytes(self, num_slots: int) -> int:
        """Return the bytes of one allocation that holds all buffers, those of `num_slots` slots included."""
        sizes = {field.name: round_up(getattr(self, field.name), BUFFER_ALIGNMENT_BYTES) for field in fields(self)}
        per_slot = sizes["frame"] + sizes["report"]
        # An allocator need not give a multiple of the frames' alignment.
        return FRAME_ALIGNMENT_BYTES + sum(sizes.values()) + (num_slots - 1) * per_slot


def merged(memories: Iterable[EncoderMemory]) -> EncoderMemory:
    """Return what serves several codecs, one chunk at a time: the most of each."""
    every = list(memories)
    return EncoderMemory(*(max(getattr(memory, field.name) for memory in every) for field in fields(EncoderMemory)))


@dataclass(frozen=True, slots=True)
class NvcompNeeds:
    """What nvCOMP asks for one batch: bytes of one output slot, and of scratch."""

    slot_bytes: int
    temp_bytes: int


def max_blocks(chunk_bytes: int, num_planes: int, block_bytes: int) -> int:
    """Return the most blocks that a chunk of up to `chunk_bytes` makes in up to `num_planes` planes."""
    return -(-chunk_bytes // block_bytes) + num_planes


def batch_candidates(codec: str, chunk_bytes: int, block_bytes: int) -> int:
    """Return the most candidates that one batch may have."""
    fitting = max(nvcomp_codec(codec).batch_bytes // block_bytes, 1)
    return min(fitting, max_blocks(chunk_bytes, most_planes(codec), block_bytes))


def most_planes(codec: str) -> int:
    """Return the most planes that a codec splits any word type into."""
    return WordType.F64.itemsize if nvcomp_codec(codec).splits_planes else 1


def encoder_memory(codec: str, chunk_bytes: int, block_bytes: int, needs: NvcompNeeds) -> EncoderMemory:
    """Return what an encoder of a blocked codec needs for chunks of up to `chunk_bytes`."""
    num_planes = most_planes(codec)
    blocks = max_blocks(chunk_bytes, num_planes, block_bytes)
    candidates = batch_candidates(codec, chunk_bytes, block_bytes)
    return EncoderMemory(
        planes=chunk_bytes + num_planes * BUFFER_ALIGNMENT_BYTES if num_planes > 1 else 0,
        slots=candidates * needs.slot_bytes,
        temp=needs.temp_bytes,
        arrays=5 * candidates * 8,
        offsets=blocks * 8,
        constant=blocks,
        report=report_words(chunk_bytes, num_digests=2) * 8,
        frame=frame_bound_bytes(chunk_bytes),
    )


def raw_encoder_memory(chunk_bytes: int) -> EncoderMemory:
    """Return what an encoder that only digests needs."""
    report = report_words(chunk_bytes, num_digests=1) * 8
    return EncoderMemory(0, 0, 0, 0, 0, 0, report=report, frame=frame_bound_bytes(chunk_bytes))


def round_up(num_bytes: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-num_bytes // multiple) * multiple
