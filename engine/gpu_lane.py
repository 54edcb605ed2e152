"""Frames on their way to one GPU: copy, digest and decode of several frames overlap, each on a stream of its own.

A body is copied piece by piece as it is read, or read right into device memory by its store. It is hashed on the GPU
(2.5 TB/s there; on the CPU, xxhash holds the GIL), and decoded once the host has seen that its digest holds, for nvCOMP
trusts its input. Meanwhile the next frames arrive and are hashed. The body of a raw frame goes right to where it
belongs and needs no decoding.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.base import HEADER_BYTES, RAW_CODEC, FrameHeader
from tidegate.codec.device_check import Check, check_body
from tidegate.codec.device_decode import DeviceDecoder, prefix_bytes
from tidegate.codec.host_rooms import HostRooms
from tidegate.codec.kernels import indexed, kernels_of

from .errors import InternalError
from .failure import Failure
from .frames import check_start
from .lane_arrivals import Arrivals
from .lane_frames import LaneFrame
from .load_plan import ReadItem
from .places import Destination
from .plan import Chunk

_MAX_UNCHECKED = 2
_MAX_HASHED = 2


class GpuLane:
    """Takes the frames that one GPU decodes.

    What comes to `arrivals` is decoded by one thread, in `decode_all`.

    Device memory beside the destination: frames (BODIES_BYTES, or three frames), planes (one chunk), packed chunks that
    are being parted (up to three), and nvCOMP's scratch.

    Args:
        device: The GPU.
        items: All frames that it will take.
        places: Where they go.
        failure: Where errors go; once it is set, nothing more is decoded.

    Attributes:
        arrivals: Where the frames come from.
    """

    def __init__(self, device: torch.device, items: Sequence[ReadItem], places: Destination, failure: Failure) -> None:
        self.device = device
        self._places = places
        self._failure = failure
        self._copies, self._digests, self._decodes = _streams(device)
        self.arrivals = Arrivals(device, items, places, self._copies)
        self._kernels = kernels_of(indexed(device))
        self._rooms = HostRooms(self._kernels, self._digests)
        self._decoder = DeviceDecoder(max(item.chunk.num_bytes for item in items), device, self._decodes)

    def decode_all(self) -> None:
        """Hash and decode what arrives until the end, and wait for it. Errors go to `failure`. Blocks."""
        torch.cuda.set_device(self.device)
        hashed: deque[LaneFrame] = deque()
        unchecked: deque[tuple[LaneFrame, Check]] = deque()
        with torch.inference_mode(False), torch.no_grad():
            while (frame := self._next(hashed, unchecked)) is not None:
                self._land(frame, hashed, unchecked)
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
                return self.arrivals.queue.get_nowait()
            except Empty:
                self._decode_next(hashed, unchecked)
        return self.arrivals.queue.get()

    def _land(self, frame: LaneFrame, hashed: deque[LaneFrame], unchecked: deque[tuple[LaneFrame, Check]]) -> None:
        """Wait for a frame that the store reads, after a failure too: until then it writes to that memory."""
        reading = frame.reading
        if reading is None:
            return
        while hashed and not reading.is_done():
            self._decode_next(hashed, unchecked)
        try:
            self.arrivals.land(frame)
        except Exception as exc:  # noqa: BLE001 - the caller's thread raises it
            self._failure.note(exc, frame.item)

    def _hash(self, frame: LaneFrame) -> None:
        header = frame.item.entry.header
        if frame.copied is not None:
            self._digests.wait_event(frame.copied)
        elif frame.slot is not None:
            with self._kernels.on(self._digests):
                frame.head = self._rooms.fetch(frame.slot.memory.data_ptr(), HEADER_BYTES + prefix_bytes(header))
        frame.check = check_body(header, frame.body, self._digests, self._rooms)

    def _decode_next(self, hashed: deque[LaneFrame], unchecked: deque[tuple[LaneFrame, Check]]) -> None:
        frame = hashed.popleft()
        self._guard(frame, self._decode, frame, unchecked)
        while len(unchecked) > _MAX_UNCHECKED:
            self._check(*unchecked.popleft())

    def synchronize(self) -> None:
        """Wait for all that was queued. Blocks."""
        for stream in (self._copies, self._digests, self._decodes):
            stream.synchronize()

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
        if frame.check is None:
            raise InternalError("a frame was passed on before all of it was there")
        frame.check.wait()
        if frame.slot is None:
            return
        header, chunk = frame.item.entry.header, frame.item.chunk
        prefix = self._prefix(frame, header)
        with torch.cuda.stream(self._decodes):
            self._decodes.wait_event(frame.ready)
            decoded = self._decoded(frame, header, prefix, unchecked)
            if decoded is not None:
                self._place(chunk, decoded)
            frame.slot.free_at = torch.cuda.Event()
            frame.slot.free_at.record(self._decodes)
        self.arrivals.slots.give_back(frame.slot)

    def _prefix(self, frame: LaneFrame, header: FrameHeader) -> NDArray[np.uint8]:
        """The start of a frame's body on the host: of the very bytes that were hashed. The digest is there already."""
        if frame.head is not None:
            start = frame.head.octets[: HEADER_BYTES + prefix_bytes(header)].copy()
            self._rooms.give_back(frame.head)
            check_start(header, start.data)
            frame.prefix = start[HEADER_BYTES:]
        if frame.prefix is None:
            raise InternalError("a frame was passed on before all of it was there")
        return frame.prefix

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
        out = self.arrivals.direct(frame.item.chunk)
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
