"""Encode chunks that lie on a CUDA device into frames, on one stream, in buffers that are allocated once.

The work of a chunk: digest of the chunk; split into planes; which blocks are constant; nvCOMP on the candidates; table
and offsets; gather; digest of the body; report to the host. (For rans, the kernels of rans_device.py stand between the
digests; for planes, those of planes_device.py and of rans.) All of it is enqueued at once; the host only reads the
report. Planes, nvCOMP's slots and scratch are shared by all slots and codecs, since one stream runs chunk after chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .base import PLANES_CODEC, RANS_CODEC, RAW_CODEC, ZSTD_CODEC
from .device_blocks import (
    ADDRESS_ALIGNMENT_BYTES,
    DEVICE_CODEC_NUMBERS,
    Arena,
    BlockEncoder,
    SharedBuffers,
    memory_of,
)
from .device_report import BODY_BYTES_WORD, WORD_BYTES
from .device_ticket import Slot, Ticket
from .errors import CodecError
from .kernels import indexed, kernels_of
from .nvcomp import load_nvcomp
from .planes_device import PlanesEncoder
from .planes_plan import PLANES_ON_GPU
from .rans_device import RansEncoder
from .words import WordType


def device_encoder_bytes(
    codecs: Sequence[str],
    chunk_bytes: int,
    num_slots: int = 2,
    *,
    device: torch.device | None = None,
    block_bytes: Mapping[str, int] | None = None,
) -> int:
    """Return the device memory that a DeviceEncoder of these arguments takes. Allocates nothing.

    Args:
        codecs: Names of the codecs; `DEVICE_CODEC_NUMBERS` lists them.
        chunk_bytes: The longest chunk.
        num_slots: How many chunks may be open at once.
        device: A CUDA device; the current one by default. nvCOMP's scratch depends on it.
        block_bytes: As for DeviceEncoder.

    Raises:
        UnknownCodecError: If there is no such codec on the GPU.
        CodecUnavailableError: If nvCOMP is needed and not installed.
        CodecError: If no codec is named, or a block size is not one that the codec takes.
    """
    where = indexed(device or torch.device("cuda"))
    return memory_of(codecs, chunk_bytes, block_bytes, where).total_bytes(num_slots)


class DeviceEncoder:
    """Encodes chunks of at most `chunk_bytes` on one CUDA device. Used by one thread at a time.

    Args:
        codecs: Names of the codecs that chunks may be encoded by; `DEVICE_CODEC_NUMBERS` lists them. They share all
            memory.
        chunk_bytes: The longest chunk; a multiple of 16, at most 1 GiB.
        device: A CUDA device.
        stream: The stream of that device on which all work runs.
        num_slots: How many tickets may be open at once.
        block_bytes: Raw bytes of a block by codec, a power of two from 4 KiB to 16 MiB (of gdeflate and deflate, to 64
            KiB); by default what suits the codec.

    Attributes:
        codecs: As given.
        device_bytes: Device memory that it holds, all of it allocated here.

    Raises:
        UnknownCodecError: If there is no such codec on the GPU.
        CodecUnavailableError: If CuPy, the driver or nvCOMP is needed and missing.
        CodecError: If no codec is named, or a block size is not one that the codec takes.
        torch.OutOfMemoryError: If the device has less memory left than device_encoder_bytes says.
    """

    def __init__(
        self,
        codecs: Sequence[str],
        chunk_bytes: int,
        device: torch.device,
        stream: torch.cuda.Stream,
        *,
        num_slots: int = 2,
        block_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self.codecs = tuple(codecs)
        self._chunk_bytes = chunk_bytes
        self._device = device = indexed(device)
        self._stream = stream.cuda_stream
        self._kernels = kernels_of(device)
        memory = memory_of(codecs, chunk_bytes, block_bytes, device)
        self.device_bytes = memory.total_bytes(num_slots)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            arena = Arena(torch.empty(self.device_bytes, dtype=torch.uint8, device=device))
            frames = [arena.take(memory.frame) for _ in range(num_slots)]
            self._slots = [Slot(frame, arena, memory, chunk_bytes, stream) for frame in frames]
            buffers = SharedBuffers.take(arena, memory)
            self._makers: dict[str, BlockEncoder | RansEncoder | PlanesEncoder] = {
                codec: BlockEncoder(codec, chunk_bytes, block_bytes, self._kernels, buffers)
                for codec in self.codecs
                if codec not in ("raw", "rans", *PLANES_ON_GPU)
            }
            planes = [codec for codec in self.codecs if codec in PLANES_ON_GPU]
            if planes or "rans" in self.codecs:
                rans = RansEncoder(chunk_bytes, self._kernels, buffers.slots, buffers.temp)
                self._makers["rans"] = rans
                for codec in planes:
                    self._makers[codec] = PlanesEncoder(codec, self._kernels, buffers.planes, rans)
        self._header_fields = {codec: _header_fields(codec) for codec in self.codecs}

    @property
    def num_free(self) -> int:
        """How many more tickets may be open now."""
        return sum(not slot.taken for slot in self._slots)

    def start(self, raw: torch.Tensor, word: WordType, codec: str) -> Ticket:
        """Enqueue the encoding of a chunk. Never waits for the device, allocates no device memory, keeps the GIL.

        Args:
            raw: uint8[raw_bytes] on the encoder's device, contiguous, its address a multiple of 16; a whole number of
                values, at most chunk_bytes. The stream must already wait for whoever wrote it. It must stay unchanged
                until the ticket is finished, and, where the body is `raw` itself, until that has been copied.
            word: What one value is.
            codec: One of the encoder's codecs.

        Returns:
            The ticket; it holds a slot until it is released.

        Raises:
            CodecError: If `raw` is not such a tensor, the codec is none of the encoder's, or all slots are taken.
            NvcompError: If nvCOMP refuses the whole batch.
            CudaError: If the driver refuses to enqueue something.
        """
        self._check(raw, word, codec)
        slot = next((slot for slot in self._slots if not slot.taken), None)
        if slot is None:
            raise CodecError(f"all {len(self._slots)} slots of this encoder are taken; release a ticket first")
        slot.taken = True
        try:
            self._enqueue(slot, raw.data_ptr(), raw.numel(), word, codec)
        except BaseException:
            slot.taken = False
            raise
        return Ticket(self._kernels, slot, raw, word, self._header_fields[codec])

    def _enqueue(self, slot: Slot, raw: int, raw_bytes: int, word: WordType, codec: str) -> None:
        stream, kernels, driver = self._stream, self._kernels, self._kernels.driver
        with kernels.on(stream):
            if slot.after is not None:
                driver.wait(stream, slot.after.cuda_event)
                slot.after = None
            driver.record(slot.started.cuda_event, stream)
            kernels.piece_digests(raw, raw_bytes, slot.raw_digest)
            maker = self._makers.get(codec)
            slot.has_body = maker is not None and maker.enqueue(raw, raw_bytes, word, slot.body, slot.report, stream)
            if slot.has_body:
                length_at = slot.report + BODY_BYTES_WORD * WORD_BYTES
                kernels.piece_digests(slot.body, raw_bytes, slot.body_digest, length_at=length_at)
            kernels.copy_to_host(slot.host_report, slot.report, slot.report_bytes)
            driver.record(slot.finished.cuda_event, stream)

    def _check(self, raw: torch.Tensor, word: WordType, codec: str) -> None:
        if codec not in self._header_fields:
            raise CodecError(f"this encoder was made for {', '.join(self.codecs)}, not for {codec!r}")
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


def _header_fields(codec: str) -> tuple[int, int]:
    """Return a codec's number and its parameter in the frame header."""
    number = DEVICE_CODEC_NUMBERS[codec]
    return number, 0 if number in (RAW_CODEC, ZSTD_CODEC, RANS_CODEC, PLANES_CODEC) else load_nvcomp().version[0]
