"""The blocked body on a CUDA device: planes, nvCOMP, table and gather, in buffers that are allocated once."""

from __future__ import annotations

import torch

from .base import ANS_CODEC, RAW_CODEC, ZSTD_CODEC
from .device_plan import (
    BUFFER_ALIGNMENT_BYTES,
    Batch,
    BlockLayout,
    EncoderMemory,
    NvcompNeeds,
    batch_candidates,
    default_block_bytes,
    encoder_memory,
    lay_out,
    raw_encoder_memory,
    round_up,
)
from .errors import UnknownCodecError
from .kernels import kernels_of
from .nvcomp import AnsTuning, BatchedCodec, NvcompBatch, load_nvcomp
from .words import WordType

DEVICE_CODEC_NUMBERS = {"raw": RAW_CODEC, "zstd": ZSTD_CODEC, "ans": ANS_CODEC}
"""The codecs that can run on a GPU, with their numbers in the frame header."""

ANS_TUNING = AnsTuning(states_per_lane=1)
"""One rANS state a lane costs 7 % of the speed and saves 128 bytes a sub-chunk: 0.4 % of a block of 256 KiB."""

ADDRESS_ALIGNMENT_BYTES = 16
"""What nvCOMP and the kernels want of every address."""


class Arena:
    """One allocation, handed out from the front."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return the next `num_bytes`, uint8, from a multiple of BUFFER_ALIGNMENT_BYTES on."""
        start = self._used
        self._used += round_up(num_bytes, BUFFER_ALIGNMENT_BYTES)
        return self._memory[start : start + num_bytes]


class BlockEncoder:
    """Makes the bodies of one blocked codec. Planes, nvCOMP's slots and scratch are shared: one stream, one at a time.

    Args:
        codec: `zstd` or `ans`.
        chunk_bytes: The longest chunk.
        block_bytes: Raw bytes of a block; None for what suits the codec.
        device: A CUDA device with an index.
        memory: What `memory_of` returns for the above.
        arena: Where the buffers come from.
    """

    def __init__(
        self,
        codec: str,
        chunk_bytes: int,
        block_bytes: int | None,
        device: torch.device,
        memory: EncoderMemory,
        arena: Arena,
    ) -> None:
        self._codec = codec
        self._block_bytes = block_bytes or default_block_bytes(codec)
        self._kernels = kernels_of(device)
        self._coders = {word: _coder(codec, word) for word in WordType}
        self._candidates = batch_candidates(codec, chunk_bytes, self._block_bytes)
        self._slot_bytes = _needs(codec, min(self._block_bytes, chunk_bytes), self._candidates).slot_bytes
        self._planes = arena.take(memory.planes)
        self._nvcomp_slots = arena.take(memory.slots)
        self._temp = arena.take(memory.temp)
        arrays = arena.take(memory.arrays).data_ptr()
        size = memory.arrays // 5
        self._inputs, self._input_bytes, self._outputs, self._output_bytes, self._statuses = (
            arrays + i * size for i in range(5)
        )
        self._offsets = arena.take(memory.offsets).data_ptr()
        self._constant = arena.take(memory.constant).data_ptr()

    def enqueue(
        self, raw: int, raw_bytes: int, word: WordType, body: int, report: int, stream: torch.cuda.Stream
    ) -> bool:
        """Enqueue all that makes a body, inside `Kernels.on(stream)` and with `stream` current in PyTorch.

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
        if not raw_bytes:
            return False
        layout = lay_out(self._codec, word, raw_bytes, self._block_bytes)
        if not layout.can_shrink:
            return False
        planes = raw
        if layout.num_planes > 1:
            planes = self._planes.data_ptr()
            self._kernels.split_planes(raw, planes, layout, rotate=word.is_float)
        self._kernels.find_constant_blocks(planes, layout, self._constant)
        for batch in layout.batches(self._candidates):
            if batch.count:
                self._compress(planes, layout, batch, self._coders[word], stream)
            self._kernels.append_blocks(
                report, body, self._offsets, self._constant, self._output_bytes, self._statuses, layout, batch
            )
            self._kernels.gather_blocks(
                body, self._offsets, planes, self._nvcomp_slots.data_ptr(), self._slot_bytes, layout, batch
            )
        return True

    def _compress(
        self, planes: int, layout: BlockLayout, batch: Batch, coder: BatchedCodec, stream: torch.cuda.Stream
    ) -> None:
        slots = self._nvcomp_slots
        if self._codec == "ans":
            # nvCOMP's ANS leaves bytes of its output unwritten (6.0.0 does, in most chunks): without this, stale memory
            # would reach the file, and the same chunk would not always give the same frame.
            slots[: batch.count * self._slot_bytes].zero_()
        arrays = (self._inputs, self._input_bytes, self._outputs)
        self._kernels.lay_out_candidates(planes, layout, batch, slots.data_ptr(), self._slot_bytes, arrays)
        coder.compress(
            NvcompBatch(
                num_blocks=batch.count,
                max_block_bytes=layout.max_block_bytes,
                inputs=self._inputs,
                input_bytes=self._input_bytes,
                outputs=self._outputs,
                output_bytes=self._output_bytes,
                statuses=self._statuses,
                temp=self._temp.data_ptr(),
                temp_bytes=self._temp.numel(),
            ),
            stream.cuda_stream,
        )


def memory_of(codec: str, chunk_bytes: int, block_bytes: int | None, device: torch.device) -> EncoderMemory:
    """Return what an encoder needs on a device.

    Raises:
        UnknownCodecError: If there is no such codec on the GPU.
        CodecUnavailableError: If nvCOMP is needed and not installed.
    """
    if codec not in DEVICE_CODEC_NUMBERS:
        raise UnknownCodecError(f"the GPU has no codec {codec!r}; it has {', '.join(DEVICE_CODEC_NUMBERS)}")
    if codec == "raw":
        return raw_encoder_memory(chunk_bytes)
    size = block_bytes or default_block_bytes(codec)
    candidates = batch_candidates(codec, chunk_bytes, size)
    torch.cuda.mem_get_info(device)  # makes the device's context current in this thread, as nvCOMP needs it
    with torch.cuda.device(device):
        return encoder_memory(codec, chunk_bytes, size, _needs(codec, min(size, chunk_bytes), candidates))


def _needs(codec: str, max_block_bytes: int, candidates: int) -> NvcompNeeds:
    coders = [_coder(codec, word) for word in WordType]
    slot_bytes = max(coder.max_output_bytes(max_block_bytes) for coder in coders)
    temp_bytes = max(coder.compress_temp_bytes(candidates, max_block_bytes) for coder in coders)
    return NvcompNeeds(round_up(slot_bytes, ADDRESS_ALIGNMENT_BYTES), temp_bytes)


def _coder(codec: str, word: WordType) -> BatchedCodec:
    return load_nvcomp().ans(word, ANS_TUNING) if codec == "ans" else load_nvcomp().zstd()
