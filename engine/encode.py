"""Turn staged chunks into frames in host memory: on the CPU by a pool of threads, on a GPU on a side stream."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from tidegate.codec.base import HEADER_BYTES, Codec, FrameHeader, frame_bound_bytes
from tidegate.codec.errors import CorruptionError
from tidegate.codec.frame import decode_frame, encode_frame
from tidegate.storage.workers import WorkerPool

from .buffers import BufferPool, HostBuffer
from .job import SaveJob, StagedChunk
from .sources import gather


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A frame ready to be written.

    Attributes:
        staged: The chunk that it holds.
        header: Its header.
        buffer: Holds header, body and zero padding; release it when the frame is written.
    """

    staged: StagedChunk
    header: FrameHeader
    buffer: HostBuffer

    @property
    def view(self) -> memoryview:
        """The padded frame."""
        return self.buffer.view[: self.header.padded_bytes]


class Ticket(Protocol):
    """A frame in the making."""

    def finish(self) -> EncodedFrame:
        """Block until the frame is ready. Raises what went wrong, its buffers released."""
        ...


class ChunkEncoder(Protocol):
    """Encodes several chunks at once.

    Attributes:
        depth: How many may be started and not finished.
    """

    depth: int

    def start(self, job: SaveJob, staged: StagedChunk, output: HostBuffer) -> Ticket:
        """Begin; `output` has room for the frame and is the encoder's until `finish` returns."""
        ...


class HostEncoder:
    """Encodes on the CPU: each thread of a pool takes a chunk at a time; the codec drops the GIL.

    Args:
        codec: The codec.
        workers: The threads; not closed here.
        num_threads: How many they are.
        scratch: Where packed chunks that are read in place are gathered first.
        verify: Decode each frame and compare it with its chunk before it is written.
    """

    def __init__(
        self, codec: Codec, workers: WorkerPool, num_threads: int, scratch: BufferPool, *, verify: bool
    ) -> None:
        self.depth = num_threads + 1
        self._codec = codec
        self._workers = workers
        self._scratch = scratch
        self._verify = verify

    def start(self, job: SaveJob, staged: StagedChunk, output: HostBuffer) -> Ticket:
        """Queue the chunk for the next free thread."""
        return _HostTicket(self._workers.submit(self._encode, job, staged, output), output)

    def _encode(self, job: SaveJob, staged: StagedChunk, output: HostBuffer) -> EncodedFrame:
        start_s = job.timeline.now()
        scratch = staged.buffer
        try:
            if staged.ready is not None:
                staged.ready.synchronize()
            raw = _in_place(staged)
            if raw is None:
                scratch = self._scratch.acquire(staged.chunk.num_bytes + HEADER_BYTES)
                if scratch is None:
                    raise RuntimeError("a buffer pool gave up without being asked to")
                raw = copied_bytes(scratch, staged.chunk.num_bytes)
                read_chunk(staged, raw)
            header = encode_frame(self._codec, raw, staged.chunk.word, output.tensor)
            if self._verify:
                _check_decodes(output.tensor[: header.frame_bytes], raw)
        finally:
            if staged.is_live:
                job.live_chunk_was_read()
            if scratch is not None:
                scratch.release()
        job.timeline.add(staged.chunk.index, "encode", start_s)
        return EncodedFrame(staged, header, output)


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
    else:
        gather(staged.sources, out)


@dataclass(slots=True)
class _HostTicket:
    _future: Future[EncodedFrame]
    _output: HostBuffer

    def finish(self) -> EncodedFrame:
        try:
            return self._future.result()
        except BaseException:
            self._output.release()
            raise


def _check_decodes(frame: torch.Tensor, raw: torch.Tensor) -> None:
    out = torch.empty_like(raw)
    decode_frame(frame, out)
    if not torch.equal(out, raw):
        raise CorruptionError("a frame does not decode to its chunk; this is a bug of the codec or a failing machine")


def output_bytes(num_bytes: int) -> int:
    """Host bytes that a chunk of `num_bytes` needs for its frame."""
    return frame_bound_bytes(num_bytes)
