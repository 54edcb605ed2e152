"""nvCOMP by itself: its batched C API on the blocks that tidegate gives it, with all arrays made once.

This is the ceiling for tidegate's codecs: no digest, no planes, no table, no gathering into a frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidegate.codec.nvcomp import NvcompBatch, load_nvcomp
from tidegate.codec.nvcomp_codecs import nvcomp_codec
from tidegate.codec.words import WordType

_ALIGNMENT_BYTES = 256
_WORD_BYTES = 8


class NvcompAlone:
    """One codec over fixed regions of device memory, cut into blocks.

    Args:
        name: A codec of nvCOMP, as tidegate calls it.
        word: What one value is; WordType.U8 for bytes.
        regions: uint8, 1-D, contiguous, on one CUDA device; what is compressed.
        batch_bytes: The most raw bytes that one call of nvCOMP gets.
        block_bytes: Raw bytes of a block; by default those of tidegate's frames.

    Attributes:
        raw_bytes: How many bytes are compressed: `regions` without tails too short to be worth it.
    """

    def __init__(
        self,
        name: str,
        word: WordType,
        regions: Sequence[torch.Tensor],
        *,
        batch_bytes: int,
        block_bytes: int | None = None,
    ) -> None:
        codec = nvcomp_codec(name)
        block_bytes = block_bytes or codec.block_bytes
        device = regions[0].device
        torch.cuda.synchronize(device)  # makes the device's context current in this thread, as nvCOMP needs it
        self._coder = load_nvcomp().coder(codec, word)
        self._regions = regions
        self._places: list[tuple[int, int]] = []  # of each region in the decoded copy: offset, bytes
        rows = self._cut(block_bytes, codec.min_candidate_bytes)
        self.raw_bytes = sum(num_bytes for _, num_bytes in self._places)
        self._max_block_bytes = max(row[1] for row in rows)
        slot_bytes = -(-self._coder.max_output_bytes(self._max_block_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._slots = torch.empty(len(rows) * slot_bytes, dtype=torch.uint8, device=device)
        self._decoded = torch.empty(rows[-1][2] + block_bytes, dtype=torch.uint8, device=device)
        table = torch.tensor(rows, dtype=torch.int64).T.contiguous().to(device)
        self._inputs, self._sizes, self._targets = table[0], table[1], table[2] + self._decoded.data_ptr()
        self._outputs = torch.arange(len(rows), device=device) * slot_bytes + self._slots.data_ptr()
        self._output_bytes = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self._actual_bytes = torch.zeros_like(self._output_bytes)
        self._statuses = torch.zeros(2, len(rows), dtype=torch.int32, device=device)
        self._num_blocks = len(rows)
        self._per_batch = max(1, batch_bytes // block_bytes)
        count = min(self._per_batch, len(rows))
        needs = (self._coder.compress_temp_bytes, self._coder.decompress_temp_bytes)
        temp_bytes = max(need(count, self._max_block_bytes) for need in needs)
        self._temp = torch.empty(max(temp_bytes, _ALIGNMENT_BYTES), dtype=torch.uint8, device=device)
        self._to_compress = [self._batch(first, to_compress=True) for first in range(0, len(rows), self._per_batch)]
        self._to_decompress = [self._batch(first, to_compress=False) for first in range(0, len(rows), self._per_batch)]
        torch.cuda.synchronize(device)

    def compress(self, stream: torch.cuda.Stream) -> None:
        """Queue the compression of all blocks."""
        for batch in self._to_compress:
            self._coder.compress(batch, stream.cuda_stream)

    def decompress(self, stream: torch.cuda.Stream) -> None:
        """Queue the decompression of what `compress` made."""
        for batch in self._to_decompress:
            self._coder.decompress(batch, stream.cuda_stream)

    def stored_bytes(self) -> int:
        """Sum of the compressed blocks; one that grew counts as stored. Waits for the device."""
        self._check(0)
        return int(torch.minimum(self._output_bytes, self._sizes).sum())

    def check(self) -> None:
        """Compare what `decompress` made with the regions. Waits for the device.

        Raises:
            RuntimeError: A block failed, or came back changed.
        """
        self._check(1)
        for region, (offset, num_bytes) in zip(self._regions, self._places, strict=True):
            if not torch.equal(region[:num_bytes], self._decoded[offset : offset + num_bytes]):
                raise RuntimeError("what nvCOMP decoded is not what it was given")

    def _check(self, row: int) -> None:
        torch.cuda.synchronize(self._statuses.device)
        failed = int(torch.count_nonzero(self._statuses[row]))
        if failed:
            raise RuntimeError(f"nvCOMP failed on {failed} of {self._num_blocks} blocks")

    def _cut(self, block_bytes: int, least_bytes: int) -> list[tuple[int, int, int]]:
        """Cut the regions into blocks: address, bytes, and offset in the decoded copy of each."""
        rows: list[tuple[int, int, int]] = []
        start = 0
        for region in self._regions:
            address, end = region.data_ptr(), region.numel()
            if 0 < end % block_bytes < least_bytes:
                end -= end % block_bytes
            rows += [
                (address + offset, min(block_bytes, end - offset), start + offset)
                for offset in range(0, end, block_bytes)
            ]
            self._places.append((start, end))
            start += -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if not rows:
            raise ValueError("the regions are too short to be cut into blocks")
        return rows

    def _batch(self, first: int, *, to_compress: bool) -> NvcompBatch:
        at = first * _WORD_BYTES
        raw, coded = (self._inputs, self._sizes), (self._outputs, self._output_bytes)
        (inputs, input_bytes), (outputs, output_bytes) = (raw, coded) if to_compress else (coded, raw)
        if not to_compress:
            outputs, output_bytes = self._targets, self._actual_bytes
        return NvcompBatch(
            num_blocks=min(self._per_batch, self._num_blocks - first),
            max_block_bytes=self._max_block_bytes,
            inputs=inputs.data_ptr() + at,
            input_bytes=input_bytes.data_ptr() + at,
            outputs=outputs.data_ptr() + at,
            output_bytes=output_bytes.data_ptr() + at,
            statuses=self._statuses[0 if to_compress else 1].data_ptr() + first * self._statuses.element_size(),
            temp=self._temp.data_ptr(),
            temp_bytes=self._temp.numel(),
            capacities=self._sizes.data_ptr() + at,
        )


def exponent_plane(chunk: torch.Tensor, word: WordType) -> torch.Tensor:
    """The bytes that codecs which split a chunk into planes give to nvCOMP: the exponents.

    Args:
        chunk: uint8, 1-D, contiguous, a whole number of values.
        word: F16, BF16 or F32.

    Returns:
        uint8[values].
    """
    if word is WordType.F32:
        return ((chunk.view(torch.int32) >> 23) & 0xFF).to(torch.uint8)
    if word in (WordType.F16, WordType.BF16):
        return ((chunk.view(torch.int16) >> 7) & 0xFF).to(torch.uint8)
    raise ValueError(f"{word.name} values are not split into an exponent plane here")
