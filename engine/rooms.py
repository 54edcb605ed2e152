"""Where the frames of a GPU's encoder are kept until they are written."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.codec.device import Ticket as DeviceTicket

from .budget import ByteBudget
from .buffers import BufferPool, HostBuffer
from .encode import Room
from .errors import InternalError
from .job import SaveJob


@dataclass(slots=True)
class DeviceRoom:
    """A slot of an encoder, for a frame that is written from there."""

    slots: ByteBudget
    ticket: DeviceTicket | None = None

    def release(self) -> None:
        """Give the slot back."""
        if self.ticket is not None:
            self.ticket.release()
        self.slots.release(1)


@dataclass(slots=True)
class HostRoom:
    """A host buffer for a frame, taken when that is encoded. Until then it has its slot on the device.

    Attributes:
        outputs: Where it comes from.
        num_bytes: What it has to hold.
        buffer: The buffer, once it has been taken.
    """

    outputs: BufferPool
    num_bytes: int
    buffer: HostBuffer | None = None

    def try_take(self) -> bool:
        """Take the buffer if there is one now. Returns whether it has been taken."""
        if self.buffer is None:
            self.buffer = self.outputs.try_acquire(self.num_bytes)
        return self.buffer is not None

    def take(self, job: SaveJob) -> HostBuffer:
        """Return the buffer; block until there is one. Raises what the job failed with."""
        if self.buffer is None:
            self.buffer = self.outputs.acquire(self.num_bytes, job.failed)
        if self.buffer is None:
            raise job.failure or InternalError("a buffer pool gave up without being asked to")
        return self.buffer

    def release(self) -> None:
        """Give the buffer back, if it has been taken."""
        if self.buffer is not None:
            self.buffer.release()


def room_of(room: Room) -> DeviceRoom | HostRoom:
    """Return the room that a GPU's encoder has given as what it is."""
    if not isinstance(room, DeviceRoom | HostRoom):
        raise InternalError(f"room of a GPU's encoder was expected for a frame, not {room!r:.60}")
    return room
