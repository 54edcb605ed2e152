"""Encode chunks of CUDA tensors on a side stream; only the compressed bytes come to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.codec.base import HEADER_BYTES, FrameHeader
from tidegate.codec.device import DeviceEncoder
from tidegate.codec.device import Ticket as DeviceTicket

from .buffers import HostBuffer
from .encode import EncodedFrame, copied_bytes, read_chunk
from .job import SaveJob, StagedChunk

_POINTER_ALIGNMENT_BYTES = 16


class SideStreamEncoder:
    """Encodes on one CUDA device. While one frame comes to the host, the next chunk is encoded.

    Every device buffer is allocated in the constructor.

    Args:
        codec: Name of the codec.
        chunk_bytes: The longest chunk.
        device: The CUDA device.
        num_slots: Chunks in flight.
    """

    def __init__(self, codec: str, chunk_bytes: int, device: torch.device, *, num_slots: int = 3) -> None:
        self.depth = num_slots
        self.device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._copy_stream = torch.cuda.Stream(device)
            self._encoder = DeviceEncoder(codec, chunk_bytes, device, self._stream, num_slots=num_slots)
            self._inputs = [torch.empty(chunk_bytes, dtype=torch.uint8, device=device) for _ in range(num_slots)]
        self._num_started = 0

    @property
    def device_bytes(self) -> int:
        """Device memory that it holds."""
        return self._encoder.device_bytes + sum(buffer.numel() for buffer in self._inputs)

    def start(self, job: SaveJob, staged: StagedChunk, output: HostBuffer) -> _SideStreamTicket:
        """Queue the chunk on the side stream. Does not wait for the GPU."""
        start_s = job.timeline.now()
        slot = self._inputs[self._num_started % self.depth]
        self._num_started += 1
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if staged.ready is not None:
                self._stream.wait_event(staged.ready)
            ticket = self._encoder.start(self._device_bytes(staged, slot), staged.chunk.word)
        return _SideStreamTicket(self, job, staged, output, ticket, start_s)

    def _device_bytes(self, staged: StagedChunk, slot: torch.Tensor) -> torch.Tensor:
        """The chunk's bytes in device memory: where they are if they can be read there, else copied to the slot."""
        chunk = staged.chunk
        raw = slot[: chunk.num_bytes]
        if staged.buffer is not None:
            raw.copy_(copied_bytes(staged.buffer, chunk.num_bytes), non_blocking=True)
            return raw
        found = staged.device_bytes
        if found is None and chunk.is_piece:
            whole = staged.sources[0].as_bytes()
            found = None if whole is None else whole[chunk.offset : chunk.offset + chunk.num_bytes]
        if found is not None and found.data_ptr() % _POINTER_ALIGNMENT_BYTES == 0:
            return found
        read_chunk(staged, raw)
        return raw

    def bring_to_host(self, ticket: DeviceTicket, output: HostBuffer) -> FrameHeader:
        """Wait for the frame's size, copy its body behind a header in `output`, and free the slot."""
        header, body = ticket.finish()
        with torch.cuda.device(self.device), torch.cuda.stream(self._copy_stream):
            output.tensor[HEADER_BYTES : header.frame_bytes].copy_(body, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._copy_stream)
        output.view[:HEADER_BYTES] = header.pack()
        output.tensor[header.frame_bytes : header.padded_bytes].zero_()
        copied.synchronize()
        ticket.release(copied)
        return header


@dataclass(frozen=True, slots=True)
class _SideStreamTicket:
    _encoder: SideStreamEncoder
    _job: SaveJob
    _staged: StagedChunk
    _output: HostBuffer
    _ticket: DeviceTicket
    _start_s: float

    def finish(self) -> EncodedFrame:
        try:
            header = self._encoder.bring_to_host(self._ticket, self._output)
        except BaseException:
            self._ticket.release()
            self._output.release()
            raise
        finally:
            if self._staged.is_live:
                self._job.live_chunk_was_read()
            elif self._staged.buffer is not None:
                self._staged.buffer.release()
        self._job.timeline.add(self._staged.chunk.index, "encode", self._start_s)
        return EncodedFrame(self._staged, header, self._output)
