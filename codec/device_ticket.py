"""One chunk on its way through a DeviceEncoder, and the slot that it holds until it is released."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .base import CODEC_VERSIONS, HEADER_BYTES, RAW_CODEC, FrameHeader
from .device_blocks import Arena
from .device_plan import EncoderMemory
from .device_report import BODY_BYTES_WORD, REFUSED_WORD, STATE_WORDS, WORD_BYTES, digest_words, read_digest
from .errors import CodecError
from .kernels import Kernels
from .words import WordType


class Slot:
    """What one open chunk has for itself: a frame, a report on the device and on the host, and its events.

    Args:
        frame: uint8[frame_bound_bytes(chunk_bytes)] on the device, its address a multiple of FRAME_ALIGNMENT_BYTES.
        arena: Where the report comes from.
        memory: The encoder's memory.
        chunk_bytes: The longest chunk.
        stream: The encoder's stream, which is PyTorch's current one here.
    """

    def __init__(
        self, frame: torch.Tensor, arena: Arena, memory: EncoderMemory, chunk_bytes: int, stream: torch.cuda.Stream
    ) -> None:
        self.taken = False
        self.has_body = False
        self.after: torch.cuda.Event | None = None
        self.frame = frame
        self.body = frame.data_ptr() + HEADER_BYTES
        self.report_bytes = memory.report
        self._report = arena.take(memory.report).zero_()  # copied whole, even where a short chunk leaves words unused
        self.report = self._report.data_ptr()
        self._host_report = torch.empty(memory.report, dtype=torch.uint8, pin_memory=True)
        self.host_report = self._host_report.data_ptr()
        self.host_words: NDArray[np.uint64] = self._host_report.numpy().view(np.uint64)
        self._host_header = torch.empty(HEADER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.host_header: NDArray[np.uint8] = self._host_header.numpy()
        self.host_header_at = self._host_header.data_ptr()
        self.started = torch.cuda.Event(enable_timing=True)
        self.finished = torch.cuda.Event(enable_timing=True, blocking=True)
        for event in (self.started, self.finished):
            event.record(stream)  # PyTorch makes an event when it is first recorded; from then on it has a handle
        self.raw_digest = self.report + STATE_WORDS * WORD_BYTES
        self.body_digest = self.raw_digest + digest_words(chunk_bytes) * WORD_BYTES

    def words_of(self, address: int) -> NDArray[np.uint64]:
        """Return the host's copy of the report from the device address on."""
        return self.host_words[(address - self.report) // WORD_BYTES :]


class Ticket:
    """One chunk on its way. Made by DeviceEncoder.start; used by one thread at a time.

    Attributes:
        encode_s: Seconds that the GPU took, set by `finish`; waiting behind earlier work of the stream is not included.
        refused_blocks: Blocks that nvCOMP refused and that were stored instead, set by `finish`.
    """

    def __init__(self, kernels: Kernels, slot: Slot, raw: torch.Tensor, word: WordType, codec: tuple[int, int]) -> None:
        self.encode_s = 0.0
        self.refused_blocks = 0
        self._kernels = kernels
        self._slot: Slot | None = slot
        self._raw = raw
        self._word = word
        self._codec = codec
        self._header: FrameHeader | None = None

    def is_done(self) -> bool:
        """Say whether `finish` would return at once. Does not wait.

        Raises:
            CodecError: If the ticket is released already.
        """
        slot = self._open_slot()
        return self._header is not None or self._kernels.driver.is_done(slot.finished.cuda_event)

    def finish(self) -> tuple[FrameHeader, torch.Tensor]:
        """Wait for this chunk, without the GIL. May be called again.

        Returns:
            The frame's header and its body, uint8[body_bytes] on the device: a view of the slot, valid until
            `release`, or `raw` itself where it did not shrink.

        Raises:
            CodecError: If the ticket is released already.
        """
        header, _ = self.finish_at()
        if header.codec == RAW_CODEC:
            return header, self._raw
        return header, self._open_slot().frame[HEADER_BYTES : header.frame_bytes]

    def finish_at(self) -> tuple[FrameHeader, int]:
        """As `finish`, but return the body's address. Gives up the GIL only to wait."""
        slot, driver = self._open_slot(), self._kernels.driver
        if self._header is None:
            # PyTorch's own calls all give up the GIL for a moment, and beside a busy thread that is not had back soon.
            if not driver.is_done(slot.finished.cuda_event):
                slot.finished.synchronize()
            self.encode_s = driver.seconds_between(slot.started.cuda_event, slot.finished.cuda_event)
            self._header = self._read_header(slot)
        return self._header, self._raw.data_ptr() if self._header.codec == RAW_CODEC else slot.body

    def frame(self, stream: torch.cuda.Stream | int) -> torch.Tensor:
        """Put the whole padded frame together in device memory, by work enqueued on a stream. Does not wait.

        `finish` must have been called.

        Args:
            stream: A stream of the device, or its handle. Where the chunk did not shrink, it must already wait for
                whoever wrote the chunk, and the chunk must stay unchanged until the stream has passed.

        Returns:
            uint8[header.padded_bytes], its address a multiple of 4,096: header, body, zero bytes. A view of the slot,
            valid until `release`, which is then to be given an event behind this work and what reads the frame.

        Raises:
            CodecError: If the ticket is not finished yet, or released already.
        """
        header, _ = self.frame_at(stream)
        return self._open_slot().frame[: header.padded_bytes]

    def frame_at(self, stream: torch.cuda.Stream | int) -> tuple[FrameHeader, int]:
        """As `frame`, but return the frame's header and its address. Keeps the GIL."""
        slot, header = self._open_slot(), self._header
        if header is None:
            raise CodecError("this ticket is not finished; call finish before frame")
        handle: int = stream if isinstance(stream, int) else stream.cuda_stream
        # The copy of this slot's last header has run: the encoder's stream waited for it, and `finish` for that stream.
        slot.host_header[:] = np.frombuffer(header.pack(), dtype=np.uint8)
        start, driver = slot.frame.data_ptr(), self._kernels.driver
        with self._kernels.on(handle):
            driver.copy_to_device(start, slot.host_header_at, HEADER_BYTES, handle)
            if header.codec == RAW_CODEC and header.raw_bytes:
                driver.copy_on_device(slot.body, self._raw.data_ptr(), header.raw_bytes, handle)
            if header.padded_bytes > header.frame_bytes:
                driver.fill(start + header.frame_bytes, 0, header.padded_bytes - header.frame_bytes, handle)
        return header, start

    def release(self, after: torch.cuda.Event | None = None) -> None:
        """Give the slot back. Does not wait; a second call does nothing.

        Args:
            after: An event that the encoder's stream waits for before it overwrites the slot: the end of a copy of the
                body, or of the frame, on another stream. None where all such work is done, or on the encoder's stream.
        """
        if self._slot is not None:
            self._slot.after = after
            self._slot.taken = False
            self._slot = None

    def _read_header(self, slot: Slot) -> FrameHeader:
        raw_bytes = self._raw.numel()
        raw_digest = read_digest(slot.words_of(slot.raw_digest), raw_bytes)
        body_bytes = int(slot.host_words[BODY_BYTES_WORD]) if slot.has_body else 0
        if not body_bytes:
            version = CODEC_VERSIONS[RAW_CODEC]
            return FrameHeader(RAW_CODEC, version, self._word, raw_bytes, raw_bytes, raw_digest, raw_digest)
        self.refused_blocks = int(slot.host_words[REFUSED_WORD])
        body_digest = read_digest(slot.words_of(slot.body_digest), body_bytes)
        number, parameter = self._codec
        version = CODEC_VERSIONS[number]
        return FrameHeader(number, version, self._word, raw_bytes, body_bytes, raw_digest, body_digest, parameter)

    def _open_slot(self) -> Slot:
        if self._slot is None:
            raise CodecError("this ticket is released; finish it before")
        return self._slot
