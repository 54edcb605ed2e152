"""The page-locked memory through which one reading thread sends bytes to GPUs."""

from __future__ import annotations

import torch

from tidegate.codec.cuda_driver import cuda_driver
from tidegate.storage.aligned import aligned_buffer

_NUM_BUFFERS = 2


class Landing:
    """Two buffers in turn: while one is copied to a GPU, the other is read into. Used by one thread.

    Memory is mapped at the first use of a buffer, touched by what is read into it, and page-locked afterwards: to lock
    pages that are there takes a fraction of the time, and every thread does it for its own.

    Args:
        num_bytes: Length of each buffer.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._buffers: list[_Buffer] = []
        self._num_taken = 0

    def take(self) -> memoryview:
        """Return the buffer whose turn it is, once the copy out of it is over. Blocks."""
        place = self._num_taken % _NUM_BUFFERS
        if place == len(self._buffers):
            self._buffers.append(_Buffer(self._num_bytes))
        self._num_taken += 1
        buffer = self._buffers[place]
        buffer.wait()
        return buffer.view

    def locked(self, device: torch.device) -> tuple[int, torch.cuda.Event]:
        """Page-lock the buffer that was taken last.

        Args:
            device: The GPU that it will be copied to.

        Returns:
            Its address, and the event to record behind the copy out of it: the buffer is not taken again before that.
        """
        return self._buffers[(self._num_taken - 1) % _NUM_BUFFERS].locked(device)

    def close(self) -> None:
        """Wait for all copies and free the memory. Blocks."""
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()


class _Buffer:
    def __init__(self, num_bytes: int) -> None:
        self.view = aligned_buffer(num_bytes)
        self._tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        self._is_locked = False
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._copied: torch.cuda.Event | None = None

    def locked(self, device: torch.device) -> tuple[int, torch.cuda.Event]:
        address = self._tensor.data_ptr()
        if not self._is_locked:
            _check(torch.cuda.cudart().cudaHostRegister(address, self._tensor.numel(), 0))
            self._is_locked = True
        if device not in self._events:
            self._events[device] = torch.cuda.Event(blocking=True)
            self._events[device].record(torch.cuda.current_stream(device))  # PyTorch makes an event when it is recorded
        self._copied = self._events[device]
        return address, self._copied

    def wait(self) -> None:
        copied, self._copied = self._copied, None
        # Asked of the driver, which keeps the GIL: PyTorch would give it up, and another reading thread would take it.
        if copied is not None and not cuda_driver().is_done(copied.cuda_event):
            copied.synchronize()

    def free(self) -> None:
        self.wait()
        if self._is_locked:
            self._is_locked = False
            _check(torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr()))


def _check(code: object) -> None:
    status = int(code)  # type: ignore[call-overload]
    if status != 0:
        raise RuntimeError(f"page-locking host memory failed with CUDA error {status}")
