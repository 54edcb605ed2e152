"""Encode and decode chunks with one codec after the other, and time it; for codecs.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.base import RAW_CODEC, FrameHeader
from tidegate.codec.device import DeviceDecoder, DeviceEncoder, Ticket
from tidegate.codec.device_decode import prefix_bytes
from tidegate.codec.words import WordType

from .rig import HOLD_UP_CYCLES, TimeBudget, Times

NUM_LANES = 2
NUM_SLOTS = 2
"""As the engine encodes where a GPU has room."""

_HELD_UP_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded chunk: its header, its body on the device, and the start of the body on the host."""

    header: FrameHeader
    body: torch.Tensor
    prefix: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Coding:
    """What one codec made of some chunks.

    Attributes:
        raw_bytes: Bytes of the chunks.
        stored_bytes: Bytes of the frames, headers and padding included.
        num_raw_frames: Chunks that did not shrink.
        refused_blocks: Blocks that nvCOMP refused and that were stored instead.
        encode: GPU time to encode all chunks, one after the other on one stream.
        lanes: The same with NUM_LANES encoders on streams of their own, as the engine does.
        decode: GPU time to decode all frames, one after the other.
    """

    raw_bytes: int
    stored_bytes: int
    num_raw_frames: int
    refused_blocks: int
    encode: Times
    lanes: Times
    decode: Times

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return self.raw_bytes / self.stored_bytes


def chunks_of(tensors: Sequence[torch.Tensor], chunk_bytes: int) -> list[torch.Tensor]:
    """Lay tensors of one dtype one after another and cut them: uint8, 1-D, the last one shorter."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).view(torch.uint8)
    return list(flat.split(chunk_bytes))


class CodingRig:
    """Encoders and a decoder of one device, for chunks of at most `chunk_bytes`. All codecs share their buffers."""

    def __init__(self, codecs: Sequence[str], chunk_bytes: int, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(NUM_LANES)]
        self._encoders = [
            DeviceEncoder(codecs, chunk_bytes, device, stream, num_slots=NUM_SLOTS) for stream in self._streams
        ]
        self._decoder = DeviceDecoder(chunk_bytes, device, self._streams[0])
        self._out = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)

    def measure(
        self, chunks: Sequence[torch.Tensor], word: WordType, codec: str, num: int, budget: TimeBudget
    ) -> Coding:
        """Encode, check that every chunk comes back bit for bit, and time both ways. Blocks.

        Raises:
            RuntimeError: A chunk came back changed.
        """
        torch.cuda.synchronize(self._device)
        frames, refused_blocks = self._encode(chunks, word, codec)
        self._check(frames, chunks, codec)
        encode: list[float] = []
        lanes: list[float] = []
        decode: list[float] = []
        while budget.allows(len(encode), (encode[-1] + lanes[-1] + decode[-1]) if encode else 0.0):
            encode.append(self._time_one_stream(chunks, word, codec))
            lanes.append(self._time_lanes(chunks, word, codec))
            decode.append(self._time_decode(frames))
            if len(encode) == num:
                break
        return Coding(
            raw_bytes=sum(chunk.numel() for chunk in chunks),
            stored_bytes=sum(frame.header.padded_bytes for frame in frames),
            num_raw_frames=sum(frame.header.codec == RAW_CODEC for frame in frames),
            refused_blocks=refused_blocks,
            encode=Times(tuple(encode)),
            lanes=Times(tuple(lanes)),
            decode=Times(tuple(decode)),
        )

    def _encode(self, chunks: Sequence[torch.Tensor], word: WordType, codec: str) -> tuple[list[Frame], int]:
        frames = []
        refused_blocks = 0
        for chunk in chunks:
            ticket = self._encoders[0].start(chunk, word, codec)
            header, body = ticket.finish()
            refused_blocks += ticket.refused_blocks
            body = body.clone()
            frames.append(Frame(header, body, body[: prefix_bytes(header)].cpu().numpy()))  # waits for the copy
            ticket.release()
        return frames, refused_blocks

    def _check(self, frames: Sequence[Frame], chunks: Sequence[torch.Tensor], codec: str) -> None:
        for frame, chunk in zip(frames, chunks, strict=True):
            out = self._out[: chunk.numel()]
            self._decoder.decode(frame.header, frame.body, frame.prefix, out, body_verified=True).wait()
            if not torch.equal(out, chunk):
                raise RuntimeError(f"a chunk of {chunk.numel()} bytes did not come back bit for bit from {codec}")

    def _time_one_stream(self, chunks: Sequence[torch.Tensor], word: WordType, codec: str) -> float:
        open_tickets: deque[Ticket] = deque()
        total_s = 0.0
        self._hold_up(1)
        for chunk in chunks:
            if len(open_tickets) == NUM_SLOTS:
                total_s += _close(open_tickets)
            open_tickets.append(self._encoders[0].start(chunk, word, codec))
        while open_tickets:
            total_s += _close(open_tickets)
        return total_s

    def _time_lanes(self, chunks: Sequence[torch.Tensor], word: WordType, codec: str) -> float:
        start = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in self._streams]
        open_tickets: deque[Ticket] = deque()
        self._hold_up(1)
        start.record(self._streams[0])
        for stream in self._streams[1:]:
            stream.wait_event(start)
        for i, chunk in enumerate(chunks):
            if len(open_tickets) == NUM_LANES * NUM_SLOTS:
                _close(open_tickets)
            open_tickets.append(self._encoders[i % NUM_LANES].start(chunk, word, codec))
        for stream, end in zip(self._streams, ends, strict=True):
            end.record(stream)
        while open_tickets:
            _close(open_tickets)
        torch.cuda.synchronize(self._device)
        return float(max(start.elapsed_time(end) for end in ends)) / 1e3

    def _time_decode(self, frames: Sequence[Frame]) -> float:
        spans, checks = [], []
        for i, frame in enumerate(frames):
            if i % _HELD_UP_TOGETHER == 0:
                self._streams[0].synchronize()
                self._hold_up(_HELD_UP_TOGETHER)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            out = self._out[: frame.header.raw_bytes]
            start.record(self._streams[0])
            checks.append(self._decoder.decode(frame.header, frame.body, frame.prefix, out, body_verified=True))
            end.record(self._streams[0])
            spans.append((start, end))
        for check in checks:
            check.wait()
        torch.cuda.synchronize(self._device)
        return float(sum(start.elapsed_time(end) for start, end in spans)) / 1e3

    def _hold_up(self, num_calls: int) -> None:
        """Keep the stream busy while the host queues so many calls, so that launching is not timed."""
        with torch.cuda.stream(self._streams[0]):
            torch.cuda._sleep(num_calls * HOLD_UP_CYCLES)


def _close(open_tickets: deque[Ticket]) -> float:
    """Finish and release the oldest ticket; return the seconds that the GPU took."""
    ticket = open_tickets.popleft()
    ticket.finish()
    ticket.release()
    return ticket.encode_s
