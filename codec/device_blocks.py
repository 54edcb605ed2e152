"""The blocked body on a CUDA device: planes, nvCOMP, table and gather, in buffers that are allocated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .base import FRAME_ALIGNMENT_BYTES, PLANES_CODEC, RANS_CODEC, RAW_CODEC
from .blocked import MIN_BLOCK_BYTES
from .device_plan import (
    BUFFER_ALIGNMENT_BYTES,
    Batch,
    BlockLayout,
    EncoderMemory,
    NvcompNeeds,
    batch_candidates,
    encoder_memory,
    lay_out,
    merged,
    raw_encoder_memory,
    round_up,
)
from .errors import CodecError, UnknownCodecError
from .kernels import Kernels
from .nvcomp import BatchedCodec, NvcompBatch, load_nvcomp
from .nvcomp_codecs import NVCOMP_CODECS, nvcomp_codec
from .planes_plan import PLANES_ON_GPU, planes_encoder_memory
from .rans_plan import rans_encoder_memory
from .words import WordType

DEVICE_CODEC_NUMBERS = {
    "raw": RAW_CODEC,
    **{name: codec.number for name, codec in NVCOMP_CODECS.items()},
    "rans": RANS_CODEC,
    **dict.fromkeys(PLANES_ON_GPU, PLANES_CODEC),
}
"""The codecs that can run on a GPU, with their numbers in the frame header."""

ADDRESS_ALIGNMENT_BYTES = 16
"""What nvCOMP and the kernels want of every address."""

_MAX_RECIPES = 256
# Kept per codec: a save has chunks of few lengths, and comes back to them.


class Arena:
    """One allocation, handed out from the front, from a multiple of FRAME_ALIGNMENT_BYTES on."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory[-memory.data_ptr() % FRAME_ALIGNMENT_BYTES :]
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return the next `num_bytes`, uint8, from a multiple of BUFFER_ALIGNMENT_BYTES on."""
        start = self._used
        self._used += round_up(num_bytes, BUFFER_ALIGNMENT_BYTES)
        return self._memory[start : start + num_bytes]


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """Addresses of what all codecs of an encoder share, since one stream runs chunk after chunk.

    The attributes are those of `EncoderMemory`; `arrays` are nvCOMP's inputs, input lengths, outputs, output lengths
    and statuses.
    """

    planes: int
    slots: int
    temp: int
    arrays: tuple[int, int, int, int, int]
    offsets: int
    constant: int

    @classmethod
    def take(cls, arena: Arena, memory: EncoderMemory) -> SharedBuffers:
        """Take them from an arena, which whoever calls keeps alive."""
        arrays = arena.take(memory.arrays).data_ptr()
        size = memory.arrays // 5
        return cls(
            planes=arena.take(memory.planes).data_ptr(),
            slots=arena.take(memory.slots).data_ptr(),
            temp=arena.take(memory.temp).data_ptr(),
            arrays=(arrays, arrays + size, arrays + 2 * size, arrays + 3 * size, arrays + 4 * size),
            offsets=arena.take(memory.offsets).data_ptr(),
            constant=arena.take(memory.constant).data_ptr(),
        )


@dataclass(frozen=True, slots=True)
class _Recipe:
    """All that is settled for chunks of one word type and length, so that the next of them costs little host time."""

    layout: BlockLayout
    coder: BatchedCodec
    slot_bytes: int
    steps: tuple[tuple[Batch, NvcompBatch], ...]


class BlockEncoder:
    """Makes the bodies of one blocked codec.

    Args:
        codec: A codec of nvCOMP.
        chunk_bytes: The longest chunk.
        block_bytes: Raw bytes of a block, by codec; by default what suits the codec.
        kernels: Those of the device, which is the current one here.
        buffers: As large as `memory_of` says for this codec.
    """

    def __init__(
        self,
        codec: str,
        chunk_bytes: int,
        block_bytes: Mapping[str, int] | None,
        kernels: Kernels,
        buffers: SharedBuffers,
    ) -> None:
        self._codec = codec
        self._clears_outputs = nvcomp_codec(codec).clears_outputs
        self._block_bytes = _block_bytes(codec, block_bytes)
        self._kernels = kernels
        self._buffers = buffers
        self._candidates = batch_candidates(codec, chunk_bytes, self._block_bytes)
        longest = min(self._block_bytes, chunk_bytes)
        self._coders = {word: (coder, _needs(coder, longest, self._candidates)) for word, coder in _coders(codec)}
        self._recipes: dict[tuple[WordType, int], _Recipe | None] = {}

    def enqueue(self, raw: int, raw_bytes: int, word: WordType, body: int, report: int, stream: int) -> bool:
        """Enqueue all that makes a body, inside `Kernels.on(stream)`.

        Args:
            raw: Address of the chunk.
            raw_bytes: Its length.
            word: What one value is.
            body: Address of raw_bytes, rounded up to 16, for the body.
            report: Address of the report, whose first words tell how long the body became.
            stream: Where it runs.

        Returns:
            False where no body could be shorter than the chunk; nothing is enqueued then.
        """
        recipe = self._recipe(word, raw_bytes)
        if recipe is None:
            return False
        kernels, buffers, layout = self._kernels, self._buffers, recipe.layout
        planes = raw
        if layout.num_planes > 1:
            planes = buffers.planes
            kernels.split_planes(raw, planes, layout, rotate=word.is_float)
        kernels.find_constant_blocks(planes, layout, buffers.constant)
        _, _, _, coded_bytes, statuses = buffers.arrays
        for batch, nvcomp_batch in recipe.steps:
            if batch.count:
                self._compress(planes, recipe, batch, nvcomp_batch, stream)
            kernels.append_blocks(report, body, buffers.offsets, buffers.constant, coded_bytes, statuses, layout, batch)
            kernels.gather_blocks(body, buffers.offsets, planes, buffers.slots, recipe.slot_bytes, layout, batch)
        return True

    def _compress(self, planes: int, recipe: _Recipe, batch: Batch, nvcomp_batch: NvcompBatch, stream: int) -> None:
        kernels, buffers = self._kernels, self._buffers
        if self._clears_outputs:
            # nvCOMP's ANS leaves bytes of its output unwritten (6.0.0 does, in most chunks): without this, stale memory
            # would reach the file, and the same chunk would not always give the same frame.
            kernels.driver.fill(buffers.slots, 0, batch.count * recipe.slot_bytes, stream)
        arrays = buffers.arrays[:3]
        kernels.lay_out_candidates(planes, recipe.layout, batch, buffers.slots, recipe.slot_bytes, arrays)
        recipe.coder.compress(nvcomp_batch, stream)

    def _recipe(self, word: WordType, raw_bytes: int) -> _Recipe | None:
        """Return how a chunk is encoded, None where that cannot make it shorter."""
        key = (word, raw_bytes)
        if key not in self._recipes:
            if len(self._recipes) == _MAX_RECIPES:
                self._recipes.clear()
            self._recipes[key] = self._make_recipe(word, raw_bytes)
        return self._recipes[key]

    def _make_recipe(self, word: WordType, raw_bytes: int) -> _Recipe | None:
        layout = lay_out(self._codec, word, raw_bytes, self._block_bytes) if raw_bytes else None
        if layout is None or not layout.can_shrink:
            return None
        coder, needs = self._coders[word]
        inputs, input_bytes, outputs, output_bytes, statuses = self._buffers.arrays
        steps = tuple(
            (
                batch,
                NvcompBatch(
                    num_blocks=batch.count,
                    max_block_bytes=layout.max_block_bytes,
                    inputs=inputs,
                    input_bytes=input_bytes,
                    outputs=outputs,
                    output_bytes=output_bytes,
                    statuses=statuses,
                    temp=self._buffers.temp,
                    temp_bytes=needs.temp_bytes,
                ),
            )
            for batch in layout.batches(self._candidates)
        )
        return _Recipe(layout, coder, needs.slot_bytes, steps)


def memory_of(
    codecs: Sequence[str], chunk_bytes: int, block_bytes: Mapping[str, int] | None, device: torch.device
) -> EncoderMemory:
    """Return what an encoder of some codecs needs on a device.

    Raises:
        UnknownCodecError: If there is no such codec on the GPU.
        CodecUnavailableError: If nvCOMP is needed and not installed.
        CodecError: If no codec is named, or a block size is not one that the codec takes.
    """
    if not codecs:
        raise CodecError(f"name at least one codec; the GPU has {', '.join(DEVICE_CODEC_NUMBERS)}")
    memories = [raw_encoder_memory(chunk_bytes)]
    for codec in codecs:
        if codec not in DEVICE_CODEC_NUMBERS:
            raise UnknownCodecError(f"the GPU has no codec {codec!r}; it has {', '.join(DEVICE_CODEC_NUMBERS)}")
        if codec == "rans":
            memories.append(rans_encoder_memory(chunk_bytes))
        elif codec in PLANES_ON_GPU:
            memories.append(planes_encoder_memory(codec, chunk_bytes))
        elif codec != "raw":
            memories.append(_memory_of_one(codec, chunk_bytes, _block_bytes(codec, block_bytes), device))
    return merged(memories)


def _memory_of_one(codec: str, chunk_bytes: int, block_bytes: int, device: torch.device) -> EncoderMemory:
    candidates = batch_candidates(codec, chunk_bytes, block_bytes)
    torch.cuda.mem_get_info(device)  # makes the device's context current in this thread, as nvCOMP needs it
    with torch.cuda.device(device):
        needs = [_needs(coder, min(block_bytes, chunk_bytes), candidates) for _, coder in _coders(codec)]
    most = NvcompNeeds(max(need.slot_bytes for need in needs), max(need.temp_bytes for need in needs))
    return encoder_memory(codec, chunk_bytes, block_bytes, most)


def _block_bytes(codec: str, block_bytes: Mapping[str, int] | None) -> int:
    nvcomp = nvcomp_codec(codec)
    size = (block_bytes or {}).get(codec, nvcomp.block_bytes)
    if not MIN_BLOCK_BYTES <= size <= nvcomp.max_block_bytes or size & (size - 1):
        raise CodecError(
            f"blocks of {size} bytes do not suit {codec}; choose a power of two from {MIN_BLOCK_BYTES} to "
            f"{nvcomp.max_block_bytes}"
        )
    return size


def _needs(coder: BatchedCodec, max_block_bytes: int, candidates: int) -> NvcompNeeds:
    slot_bytes = round_up(coder.max_output_bytes(max_block_bytes), ADDRESS_ALIGNMENT_BYTES)
    return NvcompNeeds(slot_bytes, coder.compress_temp_bytes(candidates, max_block_bytes))


def _coders(codec: str) -> list[tuple[WordType, BatchedCodec]]:
    nvcomp = load_nvcomp()
    return [(word, nvcomp.coder(nvcomp_codec(codec), word)) for word in WordType]
