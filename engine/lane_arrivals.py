"""How frames get into the memory of one GPU: piece by piece through host memory, or right from their store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import torch

from tidegate.codec.base import HEADER_BYTES, RAW_CODEC
from tidegate.codec.device_decode import prefix_bytes
from tidegate.codec.kernels import indexed, kernels_of
from tidegate.storage.errors import StorageError

from .direct_read import DirectRead
from .frames import check_start
from .lane_frames import LaneFrame, Slots
from .load_plan import ReadItem
from .open_objects import OpenObjects
from .places import Destination
from .plan import Chunk

_MAX_READS = 32
"""Frames that the store may be reading: after a failure all of them are waited for."""

_ALIGNMENT_BYTES = 16


class Arrivals:
    """Finds memory for frames and has it filled. What is there, or on its way from its store, is passed on.

    One thread calls `open` or `read`, in the order of the plan, and `end`; any threads call `copy`.

    Args:
        device: The GPU.
        items: All frames that will come.
        places: Where they go.
        stream: Where pieces are copied.

    Attributes:
        queue: The frames that have been passed on, and None at the end.
        not_direct: Why the store could not read right into device memory the first time that it could not.
        slots: Memory for those that do not go right to where they belong; whoever has decoded one gives it back.
    """

    def __init__(
        self, device: torch.device, items: Sequence[ReadItem], places: Destination, stream: torch.cuda.Stream
    ) -> None:
        self._device = device
        self._places = places
        self._kernels = kernels_of(indexed(device))
        self._home = torch.cuda.current_stream(device)
        self._copies = stream
        self.slots = Slots(max(item.entry.header.frame_bytes for item in items), device, self._home)
        self.queue: SimpleQueue[LaneFrame | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._reads = threading.Semaphore(_MAX_READS)
        self.not_direct: StorageError | None = None

    def open(self, item: ReadItem, num_pieces: int) -> LaneFrame | None:
        """Find memory for a frame and for its chunk. Blocks until a slot is free; None if the load has failed."""
        frame = self._open(item)
        if frame is None:
            return None
        self._copies.wait_event(frame.ready)
        if frame.slot is not None and frame.slot.free_at is not None:
            self._copies.wait_event(frame.slot.free_at)
        frame.num_left = num_pieces
        frame.copied = torch.cuda.Event()
        frame.copied.record(self._copies)  # PyTorch makes an event when it is recorded
        return frame

    def read(self, item: ReadItem, objects: OpenObjects) -> None:
        """Find memory for a frame and for its chunk, have the store fill it, and pass it on.

        Blocks until memory is free and few enough frames are on their way. Does nothing if the load has failed.

        Raises:
            CorruptionError: The frame does not start with its header.
            StorageError: That cannot be read.
        """
        frame = self._open(item)
        if frame is None:
            return
        # A store waits for no stream. What the caller has queued on a slot's memory was over before its first use; to
        # wait for the caller's stream, where it is the default one, is to wait for all copies under way too.
        free_at = frame.ready if frame.slot is None else frame.slot.free_at or frame.ready
        free_at.synchronize()
        header, offset = item.entry.header, item.entry.offset
        if frame.slot is None:
            start = bytearray(HEADER_BYTES)
            objects.read_into(item.key, offset, memoryview(start))
            check_start(header, start)
        self._reads.acquire()
        try:
            if frame.slot is None:
                frame.reading = DirectRead(objects, item.key, offset + HEADER_BYTES, frame.body)
            else:
                frame.reading = DirectRead(objects, item.key, offset, frame.slot.memory[: header.frame_bytes])
        finally:  # whatever interrupts this thread: what has begun is waited for
            if frame.reading is not None:
                self.queue.put(frame)
            else:
                self._reads.release()

    def copy(self, frame: LaneFrame, start: int, piece: memoryview, address: int, copied: torch.cuda.Event) -> None:
        """Queue the copy of a piece, and with the last one of a frame pass that on.

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
                if frame.copied is not None:
                    self._kernels.driver.record(frame.copied.cuda_event, stream)
                frame.num_left -= 1
                is_whole = frame.num_left == 0
        if is_whole:
            self.queue.put(frame)

    def land(self, frame: LaneFrame) -> None:
        """Wait for a frame that the store reads, after a failure too: until then that memory is written to. Blocks.

        Raises:
            StorageError: It cannot be read.
        """
        if frame.reading is not None:
            try:
                frame.reading.wait()
            finally:
                self._reads.release()
            self.not_direct = self.not_direct or frame.reading.failure

    def end(self) -> None:
        """Say that nothing more comes."""
        self.queue.put(None)

    def direct(self, chunk: Chunk) -> torch.Tensor | None:
        """Return where on this GPU a chunk belongs in one row; None if there is no such place."""
        out = self._places.direct(chunk)
        return out if out is not None and out.device == self._device else None

    def _open(self, item: ReadItem) -> LaneFrame | None:
        self._places.prepare(item.chunk)
        body, slot = self._row(item), None
        if body is None:
            slot = self.slots.take()
            if slot is None:
                return None
            body = slot.memory[HEADER_BYTES : item.entry.header.frame_bytes]
        ready = torch.cuda.Event()
        ready.record(self._home)
        return LaneFrame(item, body, slot, ready)

    def _row(self, item: ReadItem) -> torch.Tensor | None:
        """Where the body of a raw frame can go at once."""
        if item.entry.header.codec != RAW_CODEC:
            return None
        out = self.direct(item.chunk)
        return out if out is not None and out.data_ptr() % _ALIGNMENT_BYTES == 0 else None
