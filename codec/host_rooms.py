"""Page-locked memory for the small copies between the host and a stream that come with every frame, used over and over.

PyTorch keeps such memory too, but asks the driver for every block of it whether it is free again, and makes events
anew. Beside threads that bring files to the same device, each of these calls waits for theirs.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from .kernels import Kernels

_LEAST_BYTES = 16 << 10
_MAX_ROOMS = 32


class HostRoom:
    """Some page-locked memory, and an event.

    Args:
        num_bytes: How much.
        stream: The stream that copies to or from it.

    Attributes:
        octets: uint8[num_bytes], the memory.
        address: Where it begins.
        done: Recorded behind the copy.
    """

    def __init__(self, num_bytes: int, stream: torch.cuda.Stream) -> None:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.octets: NDArray[np.uint8] = tensor.numpy()
        self.address = tensor.data_ptr()
        self.done = torch.cuda.Event(blocking=True)
        self.done.record(stream)  # PyTorch makes an event when it is recorded


class HostRooms:
    """The rooms of one stream. Used by one thread at a time, but for `give_back`. Dropped, it waits for its copies.

    Args:
        kernels: Those of the stream's device; every method but `give_back` is called inside of `Kernels.on`.
        stream: The stream.
    """

    def __init__(self, kernels: Kernels, stream: torch.cuda.Stream) -> None:
        self._kernels = kernels
        self._stream = stream
        self._all: list[HostRoom] = []  # so that none is freed, and taken by others, under a copy
        self._free: deque[HostRoom] = deque()
        weakref.finalize(self, _wait, self._all).atexit = False

    def send(self, array: NDArray[np.generic]) -> torch.Tensor:
        """Enqueue the copy of an array to the device. Does not wait, unless 32 copies are under way.

        Args:
            array: Any dtype and shape.

        Returns:
            uint8[array.nbytes], in the caller's current PyTorch stream, which must be this one.
        """
        target = torch.empty(array.nbytes, dtype=torch.uint8, device=self._stream.device)
        room = self._take(array.nbytes)
        room.octets[: array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        driver, handle = self._kernels.driver, self._stream.cuda_stream
        driver.copy_to_device(target.data_ptr(), room.address, array.nbytes, handle)
        driver.record(room.done.cuda_event, handle)
        self._free.append(room)
        return target

    def fetch(self, source: int, num_bytes: int) -> HostRoom:
        """Enqueue the copy of device memory to the host.

        Returns:
            Where it goes; valid once its event is done. Give it back when it has been read.
        """
        room = self._take(num_bytes)
        self._kernels.copy_to_host(room.address, source, num_bytes)
        self._kernels.driver.record(room.done.cuda_event, self._stream.cuda_stream)
        return room

    def give_back(self, room: HostRoom) -> None:
        """Let a fetched room be used again."""
        self._free.append(room)

    def _take(self, num_bytes: int) -> HostRoom:
        """Find a room that no copy uses, or make one."""
        for _ in range(len(self._free)):
            room = self._free.popleft()
            if not self._kernels.driver.is_done(room.done.cuda_event):
                if len(self._all) < _MAX_ROOMS:
                    self._free.append(room)
                    continue
                room.done.synchronize()
            if room.octets.size >= num_bytes:
                return room
            self._all.remove(room)
        room = HostRoom(max(_LEAST_BYTES, 1 << num_bytes.bit_length()), self._stream)
        self._all.append(room)
        return room


def _wait(rooms: list[HostRoom]) -> None:
    for room in rooms:
        room.done.synchronize()
