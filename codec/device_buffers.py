"""The device memory of an encoder: one allocation, cut into buffers, and what is known of nvCOMP's output slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import FRAME_ALIGNMENT_BYTES
from .cuda_driver import CudaDriver
from .device_plan import BUFFER_ALIGNMENT_BYTES, EncoderMemory, round_up


class Arena:
    """One allocation, handed out from the front, from a multiple of FRAME_ALIGNMENT_BYTES on."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory[-memory.data_ptr() % FRAME_ALIGNMENT_BYTES :]
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return the next `num_bytes`, uint8, from a multiple of BUFFER_ALIGNMENT_BYTES on."""
        start = self._used
        self._used += round_up(num_bytes, BUFFER_ALIGNMENT_BYTES)
        return self._memory[start : start + num_bytes]


class OutputSlots:
    """Where nvCOMP writes, and how much of it may hold something. Known as of the end of all work enqueued so far.

    Args:
        memory: uint8[bytes of all slots] on the device; what it holds does not matter.

    Attributes:
        memory: As given.
        address: Its address.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self._dirty_bytes = memory.numel()  # all behind the first so many bytes are zero

    def clear(self, driver: CudaDriver, stream: int) -> None:
        """Enqueue setting all to zero that may be anything else: nothing, where the last gather cleared the slots."""
        if self._dirty_bytes:
            driver.fill(self.address, 0, self._dirty_bytes, stream)
            self._dirty_bytes = 0

    def mark_written(self, num_bytes: int) -> None:
        """Note that work to be enqueued may write to the first `num_bytes`."""
        self._dirty_bytes = max(self._dirty_bytes, num_bytes)

    def mark_clear(self) -> None:
        """Note that the work enqueued leaves zeros in all that was written since `clear`."""
        self._dirty_bytes = 0


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """What all codecs of an encoder share, since one stream runs chunk after chunk: addresses, but for the slots.

    The attributes are those of `EncoderMemory`; `arrays` are nvCOMP's inputs, input lengths, outputs, output lengths
    and statuses.
    """

    planes: int
    slots: OutputSlots
    temp: int
    arrays: tuple[int, int, int, int, int]
    offsets: int
    constant: int

    @classmethod
    def take(cls, arena: Arena, memory: EncoderMemory) -> SharedBuffers:
        """Take them from an arena, which whoever calls keeps alive."""
        arrays = arena.take(memory.arrays).data_ptr()
        size = memory.arrays // 5
        return cls(
            planes=arena.take(memory.planes).data_ptr(),
            slots=OutputSlots(arena.take(memory.slots)),
            temp=arena.take(memory.temp).data_ptr(),
            arrays=(arrays, arrays + size, arrays + 2 * size, arrays + 3 * size, arrays + 4 * size),
            offsets=arena.take(memory.offsets).data_ptr(),
            constant=arena.take(memory.constant).data_ptr(),
        )
