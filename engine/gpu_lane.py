"""Frames on their way to one GPU: copy, digest and decode of several frames overlap, each on a stream of its own.

A body is copied piece by piece as it is read, hashed on the GPU (2.5 TB/s there; on the CPU, xxhash holds the GIL), and
decoded once the host has seen that its digest holds, for nvCOMP trusts its input. Meanwhile the next frames are copied
and hashed. The body of a raw frame is copied to where it belongs and needs no decoding.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.base import FRAME_ALIGNMENT_BYTES, HEADER_BYTES, RAW_CODEC, FrameHeader
from tidegate.codec.device_check import BodyCheck, Check, check_body
from tidegate.codec.device_decode import DeviceDecoder, prefix_bytes
from tidegate.codec.kernels import indexed, kernels_of

from .errors import InternalError
from .failure import Failure
from .frames import check_start
from .load_plan import ReadItem
from .places import Destination
from .plan import Chunk

BODIES_BYTES = 512 << 20
"""Device memory for the bodies of coded frames in flight; more only where two bodies are more."""

_MAX_BODIES = 16
_MAX_UNCHECKED = 2
_MAX_HASHED = 2
_ALIGNMENT_BYTES = 16


class _Slot:
    """Device memory for one body, and when what was decoded from it last is over."""

    __slots__ = ("free_at", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.free_at: torch.cuda.Event | None = None


@dataclass(slots=True, eq=False)
class LaneFrame:
    """One frame on its way.

    Attributes:
        item: The frame.
        body: uint8[body_bytes] on the GPU: a slot, or where the chunk of a raw frame belongs.
        slot: The slot, if it is one.
        ready: When the memory that the frame ends up in may be written.
        copied: When the pieces are there that have been queued so far.
        num_left: Pieces that are not queued yet.
        prefix: The start of the body on the host, from when its first piece is there.
        check: The body's digest, from when it is queued.
    """

    item: ReadItem
    body: torch.Tensor
    slot: _Slot | None
    ready: torch.cuda.Event
    copied: torch.cuda.Event
    num_left: int
    prefix: NDArray[np.uint8] | None = None
    check: BodyCheck | None = None


class GpuLane:
    """Takes the frames that one GPU decodes.

    One thread calls `open`, in the order of the plan; any threads call `copy`; one thread runs `decode_all`.

    Device memory beside the destination: bodies (BODIES_BYTES, or two bodies), planes (one chunk), packed chunks that
    are being parted (up to three), and nvCOMP's scratch.

    Args:
        device: The GPU.
        items: All frames that it will take.
        places: Where they go.
        failure: Where errors go; once it is set, nothing more is decoded.
    """

    def __init__(self, device: torch.device, items: Sequence[ReadItem], places: Destination, failure: Failure) -> None:
        self.device = device
        self._places = places
        self._failure = failure
        self._kernels = kernels_of(indexed(device))
        self._home = torch.cuda.current_stream(device)
        self._copies, self._digests, self._decodes = _streams(device)
        longest = max(item.entry.header.body_bytes for item in items)
        self._slot_bytes = -(-longest // FRAME_ALIGNMENT_BYTES) * FRAME_ALIGNMENT_BYTES
        self._max_slots = max(2, min(_MAX_BODIES, BODIES_BYTES // self._slot_bytes))
        self._num_slots = 0
        self._decoder = DeviceDecoder(max(item.chunk.num_bytes for item in items), device, self._decodes)
        self._free: SimpleQueue[_Slot | None] = SimpleQueue()
        self._arrived: SimpleQueue[LaneFrame | None] = SimpleQueue()
        self._lock = threading.Lock()

    def open(self, item: ReadItem, num_pieces: int) -> LaneFrame | None:
        """Find memory for a frame and for its chunk. Blocks until a slot is free; None if the load has failed."""
        self._places.prepare(item.chunk)
        body, slot = self._direct(item), None
        if body is None:
            slot = self._take_slot()
            if slot is None:
                return None
            body = slot.memory[: item.entry.header.body_bytes]
        ready = torch.cuda.Event()
        ready.record(self._home)
        self._copies.wait_event(ready)
        if slot is not None and slot.free_at is not None:
            self._copies.wait_event(slot.free_at)
        copied = torch.cuda.Event()
        copied.record(self._copies)  # PyTorch makes an event when it is recorded
        return LaneFrame(item, body, slot, ready, copied, num_pieces)

    def copy(
        self, frame: LaneFrame, start: int, piece: memoryview, address: int, copied: torch.cuda.Event
    ) -> None:
        """Queue the copy of a piece, and with the last one of a frame pass that on to `decode_all`.

        Through the CUDA driver, as every call of PyTorch's gives up the GIL, for which eight threads compete.

        Args:
            frame: The frame.
            start: Where in it the piece begins, its header counted.
            piece: The piece, in page-locked memory.
            address: Where that begins.
            copied: Recorded behind the copy: the piece may change once it has happened.

        Raises:
            CorruptionError: The frame does not start with its header.
        """
        header = frame.item.entry.header
        if start == 0:
            check_start(header, piece)
            prefix = piece[HEADER_BYTES : HEADER_BYTES + prefix_bytes(header)]
            frame.prefix = np.frombuffer(prefix, dtype=np.uint8).copy()
        skip = max(HEADER_BYTES - start, 0)
        num_bytes, stream = len(piece) - skip, self._copies.cuda_stream
        with self._kernels.on(stream):
            if num_bytes:
                target = frame.body.data_ptr() + start + skip - HEADER_BYTES
                self._kernels.driver.copy_to_device(target, address + skip, num_bytes, stream)
            self._kernels.driver.record(copied.cuda_event, stream)
            with self._lock:
                self._kernels.driver.record(frame.copied.cuda_event, stream)
                frame.num_left -= 1
                is_whole = frame.num_left == 0
        if is_whole:
            self._arrived.put(frame)

    def decode_all(self) -> None:
        """Hash and decode what arrives until `end`, and wait for it. Errors go to `failure`. Blocks."""
        torch.cuda.set_device(self.device)
        hashed: deque[LaneFrame] = deque()
        unchecked: deque[tuple[LaneFrame, Check]] = deque()
        with torch.inference_mode(False), torch.no_grad():
            while (frame := self._next(hashed, unchecked)) is not None:
                self._guard(frame, self._hash, frame)
                hashed.append(frame)
                if len(hashed) > _MAX_HASHED:
                    self._decode_next(hashed, unchecked)
            while hashed:
                self._decode_next(hashed, unchecked)
            while unchecked:
                self._check(*unchecked.popleft())

    def _next(self, hashed: deque[LaneFrame], unchecked: deque[tuple[LaneFrame, Check]]) -> LaneFrame | None:
        """Return what has arrived, and decode what is hashed until something has. None at the end."""
        while hashed:
            try:
                return self._arrived.get_nowait()
            except Empty:
                self._decode_next(hashed, unchecked)
        return self._arrived.get()

    def _hash(self, frame: LaneFrame) -> None:
        self._digests.wait_event(frame.copied)
        frame.check = check_body(frame.item.entry.header, frame.body, self._digests)

    def _decode_next(self, hashed: deque[LaneFrame], unchecked: deque[tuple[LaneFrame, Check]]) -> None:
        frame = hashed.popleft()
        self._guard(frame, self._decode, frame, unchecked)
        while len(unchecked) > _MAX_UNCHECKED:
            self._check(*unchecked.popleft())

    def end(self) -> None:
        """Say that nothing more arrives."""
        self._arrived.put(None)

    def wake(self) -> None:
        """Let an `open` that waits for a slot give up."""
        self._free.put(None)

    def synchronize(self) -> None:
        """Wait for all that was queued. Blocks."""
        for stream in (self._copies, self._digests, self._decodes):
            stream.synchronize()

    def _direct(self, item: ReadItem) -> torch.Tensor | None:
        """Where the body of a raw frame can be copied to at once."""
        if item.entry.header.codec != RAW_CODEC:
            return None
        out = self._out(item.chunk)
        return out if out is not None and out.data_ptr() % _ALIGNMENT_BYTES == 0 else None

    def _out(self, chunk: Chunk) -> torch.Tensor | None:
        """Where on this GPU the chunk belongs in one row."""
        out = self._places.direct(chunk)
        return out if out is not None and out.device == self.device else None

    def _take_slot(self) -> _Slot | None:
        if self._free.empty() and self._num_slots < self._max_slots:
            try:
                with torch.cuda.stream(self._home):
                    memory = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                if not self._num_slots:
                    raise
                self._max_slots = self._num_slots  # slower, with those that there are
            else:
                self._num_slots += 1
                return _Slot(memory)
        return self._free.get()

    def _guard(self, frame: LaneFrame, work: Callable[..., None], *args: object) -> None:
        if self._failure.is_set:
            return
        try:
            work(*args)
        except Exception as exc:  # noqa: BLE001 - the caller's thread raises it
            self._failure.note(exc, frame.item)

    def _check(self, frame: LaneFrame, check: Check) -> None:
        self._guard(frame, check.wait)

    def _decode(self, frame: LaneFrame, unchecked: deque[tuple[LaneFrame, Check]]) -> None:
        if frame.check is None or frame.prefix is None:
            raise InternalError("a frame was passed on before all of it was copied")
        frame.check.wait()
        if frame.slot is None:
            return
        header, chunk = frame.item.entry.header, frame.item.chunk
        with torch.cuda.stream(self._decodes):
            self._decodes.wait_event(frame.ready)
            decoded = self._decoded(frame, header, frame.prefix, unchecked)
            if decoded is not None:
                self._place(chunk, decoded)
            frame.slot.free_at = torch.cuda.Event()
            frame.slot.free_at.record(self._decodes)
        self._free.put(frame.slot)

    def _decoded(
        self,
        frame: LaneFrame,
        header: FrameHeader,
        prefix: NDArray[np.uint8],
        unchecked: deque[tuple[LaneFrame, Check]],
    ) -> torch.Tensor | None:
        """Queue the decoding; return what is still to be placed, None if it is decoded to where it belongs."""
        if header.codec == RAW_CODEC:
            return frame.body
        out = self._out(frame.item.chunk)
        target = torch.empty(header.raw_bytes, dtype=torch.uint8, device=self.device) if out is None else out
        check = self._decoder.decode(header, frame.body, prefix, target, body_verified=True)
        unchecked.append((frame, check))
        return target if out is None else None

    def _place(self, chunk: Chunk, decoded: torch.Tensor) -> None:
        """Queue the copying of a chunk from this GPU to where it belongs; blocks where that is the CPU."""
        out = self._places.direct(chunk)
        if out is not None:
            out.copy_(decoded)
        elif self._places.device(chunk).type == "cpu":
            self._places.place(chunk, decoded.cpu())
        else:
            self._places.place(chunk, decoded)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams of all lanes of a device: PyTorch keeps freed memory by stream, so these are used again."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)
