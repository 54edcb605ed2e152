"""Turn staged chunks into frames: what encoders have in common, and the one that encodes on the CPU."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from tidegate.codec.base import HEADER_BYTES, Codec, FrameHeader, frame_bound_bytes
from tidegate.codec.errors import CorruptionError
from tidegate.codec.frame import decode_frame, encode_frame
from tidegate.storage.base import DeviceBytes
from tidegate.storage.workers import WorkerPool

from .buffers import BufferPool, HostBuffer
from .delta_save import Coded
from .device_layout import copy_live_chunk
from .errors import InternalError
from .job import SaveJob, StagedChunk
from .plan import Chunk
from .sources import gather


class Room(Protocol):
    """The place that a frame will be made in."""

    def release(self) -> None:
        """Give it back, once."""
        ...


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A frame ready to be written.

    Attributes:
        chunk: The chunk that it holds.
        header: Its header.
        content: Header, body and zero padding, in host memory or on a device.
        room: Where that is; release it when the frame is written.
    """

    chunk: Chunk
    header: FrameHeader
    content: memoryview | DeviceBytes
    room: Room


class Ticket(Protocol):
    """A frame in the making."""

    @property
    def waits_for_room(self) -> bool:
        """Whether the frame has been encoded, and there was no room for it."""
        ...

    def advance(self, *, may_take_room: bool) -> bool:
        """Begin the next step if the one before it has ended. Never blocks, never raises for the frame.

        Args:
            may_take_room: Whether those before it have theirs.

        Returns:
            Whether those behind it may take room.
        """
        ...

    def await_read(self) -> None:
        """Block until the chunk has been read, if nothing but a GPU has to be waited for. Never raises."""
        ...

    def finish(self) -> EncodedFrame | None:
        """Block until the frame is ready; None for a chunk that need not be stored. In this case, and where it raises
        what went wrong, the room is released."""
        ...


class ChunkEncoder(Protocol):
    """Encodes several chunks at once.

    Attributes:
        depth: How many may be started and not finished.
        takes_room_late: Whether frames get host memory only when they are encoded, not before they are started.
    """

    depth: int
    takes_room_late: bool

    def try_reserve(self, job: SaveJob, num_bytes: int) -> Room | None:
        """Take room for the frame of a chunk of `num_bytes`, if there is some now."""
        ...

    def reserve(self, job: SaveJob, num_bytes: int) -> Room | None:
        """Take room; block until there is some. None if the job has failed."""
        ...

    def start(self, job: SaveJob, staged: StagedChunk, room: Room) -> Ticket:
        """Begin; `room`, from this encoder, is its own until `finish` returns."""
        ...


class HostEncoder:
    """Encodes on the CPU: each thread of a pool takes a chunk at a time; the codec drops the GIL.

    Args:
        codec: The codec.
        workers: The threads; not closed here.
        num_threads: How many they are.
        scratch: Where packed chunks that are read in place are gathered first.
        outputs: Where frames are made.
        verify: Decode each frame and compare it with its chunk before it is written.
        small_codec: The codec for chunks of less than `small_bytes`; None: the same.
        small_bytes: Their bound.
    """

    takes_room_late = False

    def __init__(
        self,
        codec: Codec,
        workers: WorkerPool,
        num_threads: int,
        scratch: BufferPool,
        outputs: BufferPool,
        *,
        verify: bool,
        small_codec: Codec | None = None,
        small_bytes: int = 0,
    ) -> None:
        self.depth = num_threads + 1
        self._codec = codec
        self._small_codec = small_codec or codec
        self._small_bytes = small_bytes
        self._workers = workers
        self._scratch = scratch
        self._outputs = outputs
        self._verify = verify

    def try_reserve(self, job: SaveJob, num_bytes: int) -> HostBuffer | None:
        """Take a buffer, if the budget allows one now."""
        return self._outputs.try_acquire(output_bytes(num_bytes))

    def reserve(self, job: SaveJob, num_bytes: int) -> HostBuffer | None:
        """Take a buffer; block until the budget allows one. None if the job has failed."""
        return self._outputs.acquire(output_bytes(num_bytes), job.failed)

    def start(self, job: SaveJob, staged: StagedChunk, room: Room) -> Ticket:
        """Queue the chunk for the next free thread."""
        output = host_buffer(room)
        return _HostTicket(self._workers.submit(self._encode, job, staged, output), output)

    def _encode(self, job: SaveJob, staged: StagedChunk, output: HostBuffer) -> EncodedFrame | None:
        start_s = job.timeline.now()
        scratch = staged.buffer
        try:
            if staged.ready is not None:
                staged.ready.synchronize()
            raw = _in_place(staged)
            if raw is None:
                scratch = self._scratch.borrow(staged.chunk.num_bytes + HEADER_BYTES)
                raw = copied_bytes(scratch, staged.chunk.num_bytes)
                read_chunk(staged, raw)
            job.derived.offer(staged.chunk.index, raw)
            if job.derived.follows(staged.chunk.index, raw):
                return None
            codec = self._codec if raw.numel() >= self._small_bytes else self._small_codec
            with _coded(job, staged.chunk, raw, codec) as coded:
                header = encode_frame(coded.codec, coded.octets, coded.word, output.tensor)
                if self._verify:
                    _check_decodes(output.tensor[: header.frame_bytes], coded.octets)
        finally:
            job.derived.let_go(staged.chunk.index)
            if staged.is_live:
                job.live_chunk_was_read()
            if scratch is not None:
                scratch.release()
        job.timeline.add(staged.chunk.index, "encode", start_s)
        return EncodedFrame(staged.chunk, header, output.view[: header.padded_bytes], output)


def _coded(job: SaveJob, chunk: Chunk, raw: torch.Tensor, codec: Codec) -> AbstractContextManager[Coded]:
    """Lend what is to be encoded for a chunk."""
    return nullcontext(Coded(raw, chunk.word, codec)) if job.delta is None else job.delta.coded(chunk, raw, codec)


def _in_place(staged: StagedChunk) -> torch.Tensor | None:
    """Return the chunk's bytes if they lie in a row in host memory already."""
    chunk = staged.chunk
    if staged.buffer is not None:
        return copied_bytes(staged.buffer, chunk.num_bytes)
    if staged.device_bytes is None and chunk.is_piece and staged.sources[0].device.type == "cpu":
        whole = staged.sources[0].as_bytes()
        if whole is not None:
            return whole[chunk.offset : chunk.offset + chunk.num_bytes]
    return None


def copied_bytes(buffer: HostBuffer, num_bytes: int) -> torch.Tensor:
    """The part of a staging buffer that holds a chunk: shape (num_bytes,), uint8, behind room for a frame header."""
    return buffer.tensor[HEADER_BYTES : HEADER_BYTES + num_bytes]


def read_chunk(staged: StagedChunk, out: torch.Tensor) -> None:
    """Copy a staged chunk that is not in a host buffer into `out` (uint8, any device), on the current CUDA stream.

    Blocks where `out` is pageable host memory.
    """
    if staged.device_bytes is not None:
        out.copy_(staged.device_bytes)
    elif staged.chunk.is_piece:
        staged.sources[0].copy_to(out, staged.chunk.offset)
    elif not copy_live_chunk(staged.table, staged.chunk, out):
        gather(staged.sources, out)


@dataclass(slots=True)
class _HostTicket:
    _future: Future[EncodedFrame | None]
    _output: HostBuffer

    waits_for_room = False

    def advance(self, *, may_take_room: bool) -> bool:
        """Do nothing: the thread goes on by itself, and has its room."""
        return may_take_room

    def await_read(self) -> None:
        """Do nothing: the thread reads by itself."""

    def finish(self) -> EncodedFrame | None:
        frame = None
        try:
            frame = self._future.result()
        finally:
            if frame is None:
                self._output.release()
        return frame


def _check_decodes(frame: torch.Tensor, raw: torch.Tensor) -> None:
    out = torch.empty_like(raw)
    decode_frame(frame, out)
    if not torch.equal(out, raw):
        raise CorruptionError("a frame does not decode to its chunk; this is a bug of the codec or a failing machine")


def host_buffer(room: Room) -> HostBuffer:
    """Return a room that is a host buffer as that."""
    if not isinstance(room, HostBuffer):
        raise InternalError(f"a host buffer was expected as room for a frame, not {room!r:.60}")
    return room


def output_bytes(num_bytes: int) -> int:
    """Host bytes that a chunk of `num_bytes` needs for its frame."""
    return frame_bound_bytes(num_bytes)
