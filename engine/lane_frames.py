"""Frames on their way through a GpuLane, and the device memory for those that must be decoded."""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.base import FRAME_ALIGNMENT_BYTES
from tidegate.codec.device_check import BodyCheck
from tidegate.codec.host_rooms import HostRoom
from tidegate.storage.base import ALIGNMENT_BYTES

from .direct_read import DirectRead
from .load_plan import ReadItem

BODIES_BYTES = 1 << 30
"""Device memory for coded frames in flight; more only where three frames are more."""

_MIN_SLOTS = 3  # one arrives, one waits to be decoded, one is decoded
_MAX_SLOTS = 16


class Slot:
    """Device memory for one frame, and when what was decoded from it last is over.

    Attributes:
        memory: uint8, its address a multiple of ALIGNMENT_BYTES.
        free_at: None while nothing was decoded from it.
    """

    __slots__ = ("free_at", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.free_at: torch.cuda.Event | None = None


class Slots:
    """The slots of a lane, made as they are needed. One thread takes them; any gives them back.

    Args:
        frame_bytes: The longest frame, with its header.
        device: Where they are.
        home: The stream that their memory belongs to.
    """

    def __init__(self, frame_bytes: int, device: torch.device, home: torch.cuda.Stream) -> None:
        self._slot_bytes = -(-frame_bytes // FRAME_ALIGNMENT_BYTES) * FRAME_ALIGNMENT_BYTES
        self._device = device
        self._home = home
        self._most = max(_MIN_SLOTS, min(_MAX_SLOTS, BODIES_BYTES // self._slot_bytes))
        self._num_made = 0
        self._free: SimpleQueue[Slot | None] = SimpleQueue()

    def take(self) -> Slot | None:
        """Return a slot. Blocks until there is one; None after `wake`."""
        if self._free.empty() and self._num_made < self._most:
            try:
                slot = Slot(self._memory())
            except torch.OutOfMemoryError:
                if not self._num_made:
                    raise
                self._most = self._num_made  # slower, with those that there are
            else:
                self._num_made += 1
                return slot
        return self._free.get()

    def give_back(self, slot: Slot) -> None:
        """Let it be taken again."""
        self._free.put(slot)

    def wake(self) -> None:
        """Let a `take` that waits give up."""
        self._free.put(None)

    def _memory(self) -> torch.Tensor:
        with torch.cuda.stream(self._home):
            memory = torch.empty(self._slot_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=self._device)
        start = -memory.data_ptr() % ALIGNMENT_BYTES
        return memory[start : start + self._slot_bytes]


@dataclass(slots=True, eq=False)
class LaneFrame:
    """One frame on its way.

    Attributes:
        item: The frame.
        body: uint8[body_bytes] on the GPU: in a slot, or where the chunk of a raw frame belongs.
        slot: The slot, if it is one; its memory begins with the frame's header, where that is read too.
        ready: When the memory that the frame ends up in may be written.
        copied: When the pieces are there that have been queued so far.
        num_left: Pieces that are not queued yet.
        reading: What the store is doing, where it reads right into device memory.
        head: The frame's start, header included, on its way to the host, from when such a frame is there.
        prefix: The start of the body on the host, from when its first piece is there.
        check: The body's digest, from when it is queued.
    """

    item: ReadItem
    body: torch.Tensor
    slot: Slot | None
    ready: torch.cuda.Event
    copied: torch.cuda.Event | None = None
    num_left: int = 0
    reading: DirectRead | None = None
    head: HostRoom | None = None
    prefix: NDArray[np.uint8] | None = None
    check: BodyCheck | None = None
