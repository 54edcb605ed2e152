"""Encode chunks that lie on a CUDA device into frames, on one stream, in buffers that are allocated once.

The work of a chunk: digest of the chunk; split into planes; which blocks are constant; nvCOMP on the candidates; table
and offsets; gather; digest of the body; report to the host. All of it is enqueued at once; the host only reads the
report. Planes, nvCOMP's slots and scratch are shared by all slots, since one stream runs chunk after chunk.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .base import CODEC_VERSIONS, RAW_CODEC, FrameHeader
from .device_blocks import ADDRESS_ALIGNMENT_BYTES, DEVICE_CODEC_NUMBERS, Arena, BlockEncoder, memory_of
from .device_plan import EncoderMemory
from .device_report import BODY_BYTES_WORD, REFUSED_WORD, STATE_WORDS, WORD_BYTES, digest_words, read_digest
from .errors import CodecError
from .kernels import indexed, kernels_of
from .nvcomp import load_nvcomp
from .words import WordType


def device_encoder_bytes(
    codec: str,
    chunk_bytes: int,
    num_slots: int = 2,
    *,
    device: torch.device | None = None,
    block_bytes: int | None = None,
) -> int:
    """Return the device memory that a DeviceEncoder of these arguments takes. Allocates nothing.

    Args:
        codec: `raw`, `zstd` or `ans`.
        chunk_bytes: The longest chunk.
        num_slots: How many chunks may be open at once.
        device: A CUDA device; the current one by default. nvCOMP's scratch depends on it.
        block_bytes: As for DeviceEncoder.

    Raises:
        UnknownCodecError: If there is no such codec on the GPU.
        CodecUnavailableError: If nvCOMP is needed and not installed.
    """
    where = indexed(device or torch.device("cuda"))
    return memory_of(codec, chunk_bytes, block_bytes, where).total_bytes(num_slots)


class DeviceEncoder:
    """Encodes chunks of at most `chunk_bytes` on one CUDA device. Used by one thread at a time.

    Args:
        codec: `raw`, `zstd` or `ans`.
        chunk_bytes: The longest chunk; a multiple of 16, at most 1 GiB.
        device: A CUDA device.
        stream: The stream of that device on which all work runs.
        num_slots: How many tickets may be open at once.
        block_bytes: Raw bytes of a block, a power of two from 4 KiB to 16 MiB; by default what suits the codec.

    Attributes:
        codec: As given.
        device_bytes: Device memory that it holds, all of it allocated here.

    Raises:
        UnknownCodecError: If there is no such codec on the GPU.
        CodecUnavailableError: If CuPy or nvCOMP is needed and missing.
        torch.OutOfMemoryError: If the device has less memory left than device_encoder_bytes says.
    """

    def __init__(
        self,
        codec: str,
        chunk_bytes: int,
        device: torch.device,
        stream: torch.cuda.Stream,
        *,
        num_slots: int = 2,
        block_bytes: int | None = None,
    ) -> None:
        self.codec = codec
        self._chunk_bytes = chunk_bytes
        self._device = device = indexed(device)
        self._stream = stream
        self._kernels = kernels_of(device)
        memory = memory_of(codec, chunk_bytes, block_bytes, device)
        self.device_bytes = memory.total_bytes(num_slots)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            arena = Arena(torch.empty(self.device_bytes, dtype=torch.uint8, device=device))
            self._blocks = (
                None if codec == "raw" else BlockEncoder(codec, chunk_bytes, block_bytes, device, memory, arena)
            )
            self._slots = [_Slot(arena, memory) for _ in range(num_slots)]

    def start(self, raw: torch.Tensor, word: WordType) -> Ticket:
        """Enqueue the encoding of a chunk. Never waits for the device, allocates no memory.

        Args:
            raw: uint8[raw_bytes] on the encoder's device, contiguous, its address a multiple of 16; a whole number of
                values, at most chunk_bytes. The stream must already wait for whoever wrote it. It must stay unchanged
                until the ticket is finished, and, where the body is `raw` itself, until that has been copied.
            word: What one value is.

        Returns:
            The ticket; it holds a slot until it is released.

        Raises:
            CodecError: If `raw` is not such a tensor, or all slots are taken.
            NvcompError: If nvCOMP refuses the whole batch.
        """
        self._check(raw, word)
        slot = next((slot for slot in self._slots if not slot.taken), None)
        if slot is None:
            raise CodecError(f"all {len(self._slots)} slots of this encoder are taken; release a ticket first")
        slot.taken = True
        try:
            self._enqueue(slot, raw, word)
        except BaseException:
            slot.taken = False
            raise
        return Ticket(slot, raw, word, self._header_codec())

    def _enqueue(self, slot: _Slot, raw: torch.Tensor, word: WordType) -> None:
        stream, source, raw_bytes = self._stream, raw.data_ptr(), raw.numel()
        with torch.cuda.stream(stream), self._kernels.on(stream):
            if slot.after is not None:
                stream.wait_event(slot.after)
                slot.after = None
            slot.started.record(stream)
            self._kernels.piece_digests(source, raw_bytes, slot.raw_digest)
            body, report = slot.body.data_ptr(), slot.report.data_ptr()
            slot.blocked = self._blocks is not None and self._blocks.enqueue(
                source, raw_bytes, word, body, report, stream
            )
            if slot.blocked:
                length_at = report + BODY_BYTES_WORD * WORD_BYTES
                self._kernels.piece_digests(body, raw_bytes, slot.body_digest, length_at=length_at)
            slot.host_report.copy_(slot.report, non_blocking=True)
            slot.finished.record(stream)

    def _check(self, raw: torch.Tensor, word: WordType) -> None:
        if raw.device != self._device or raw.dtype is not torch.uint8 or raw.dim() != 1 or not raw.is_contiguous():
            raise CodecError(
                f"a chunk must be a contiguous 1-D uint8 tensor on {self._device}; "
                f"this is {raw.dtype} of shape {tuple(raw.shape)} on {raw.device}"
            )
        if raw.data_ptr() % ADDRESS_ALIGNMENT_BYTES:
            raise CodecError(
                f"the chunk starts at address {raw.data_ptr():#x}, no multiple of {ADDRESS_ALIGNMENT_BYTES}; "
                "copy it into an aligned buffer first"
            )
        if raw.numel() > self._chunk_bytes or raw.numel() % word.itemsize:
            raise CodecError(
                f"the chunk has {raw.numel()} bytes; this encoder takes up to {self._chunk_bytes}, "
                f"and whole {word.name} values of {word.itemsize} bytes"
            )

    def _header_codec(self) -> tuple[int, int]:
        parameter = load_nvcomp().version[0] if self.codec == "ans" else 0
        return DEVICE_CODEC_NUMBERS[self.codec], parameter


class Ticket:
    """One chunk on its way. Made by DeviceEncoder.start.

    Attributes:
        encode_s: Seconds that the GPU took, set by `finish`; waiting behind earlier work of the stream is not included.
        refused_blocks: Blocks that nvCOMP refused and that were stored instead, set by `finish`.
    """

    def __init__(self, slot: _Slot, raw: torch.Tensor, word: WordType, codec: tuple[int, int]) -> None:
        self.encode_s = 0.0
        self.refused_blocks = 0
        self._slot: _Slot | None = slot
        self._raw = raw
        self._word = word
        self._codec = codec

    def finish(self) -> tuple[FrameHeader, torch.Tensor]:
        """Wait for this chunk, without the GIL.

        Returns:
            The frame's header and its body, uint8[body_bytes] on the device: a view of the slot, valid until
            `release`, or `raw` itself where it did not shrink.

        Raises:
            CodecError: If the ticket is released already.
        """
        slot, raw, raw_bytes = self._open_slot(), self._raw, self._raw.numel()
        slot.finished.synchronize()
        self.encode_s = slot.started.elapsed_time(slot.finished) / 1e3
        raw_digest = read_digest(slot.words_of(slot.raw_digest), raw_bytes)
        body_bytes = int(slot.host_words[BODY_BYTES_WORD]) if slot.blocked else 0
        if not body_bytes:
            header = FrameHeader(
                RAW_CODEC, CODEC_VERSIONS[RAW_CODEC], self._word, raw_bytes, raw_bytes, raw_digest, raw_digest
            )
            return header, raw
        self.refused_blocks = int(slot.host_words[REFUSED_WORD])
        body_digest = read_digest(slot.words_of(slot.body_digest), body_bytes)
        number, parameter = self._codec
        version = CODEC_VERSIONS[number]
        header = FrameHeader(number, version, self._word, raw_bytes, body_bytes, raw_digest, body_digest, parameter)
        return header, slot.body[:body_bytes]

    def release(self, after: torch.cuda.Event | None = None) -> None:
        """Give the slot back. Does not wait; a second call does nothing.

        Args:
            after: An event that the encoder's stream waits for before it overwrites the slot: the end of a copy of the
                body on another stream.
        """
        if self._slot is not None:
            self._slot.after = after
            self._slot.taken = False
            self._slot = None

    def _open_slot(self) -> _Slot:
        if self._slot is None:
            raise CodecError("this ticket is released; finish it before")
        return self._slot


class _Slot:
    """What one open chunk has for itself: a body, a report on the device and on the host, and its events."""

    def __init__(self, arena: Arena, memory: EncoderMemory) -> None:
        self.taken = False
        self.blocked = False
        self.after: torch.cuda.Event | None = None
        self.body = arena.take(memory.body)
        self.report = arena.take(memory.report).zero_()  # copied whole, even where a short chunk leaves words unused
        self.host_report = torch.empty(memory.report, dtype=torch.uint8, pin_memory=True)
        self.host_words: NDArray[np.uint64] = self.host_report.numpy().view(np.uint64)
        self.started = torch.cuda.Event(enable_timing=True)
        self.finished = torch.cuda.Event(enable_timing=True, blocking=True)
        self.raw_digest = self.report.data_ptr() + STATE_WORDS * WORD_BYTES
        self.body_digest = self.raw_digest + digest_words(memory.body) * WORD_BYTES

    def words_of(self, address: int) -> NDArray[np.uint64]:
        """Return the host's copy of the report from the device address on."""
        return self.host_words[(address - self.report.data_ptr()) // WORD_BYTES :]
