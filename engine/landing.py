"""The page-locked memory through which one reading thread sends bytes to GPUs."""

from __future__ import annotations

import torch

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

    def locked(self) -> torch.Tensor:
        """Return the buffer that was taken last, shape (num_bytes,), uint8, page-locked from here on."""
        return self._latest.locked()

    def copied_at(self, event: torch.cuda.Event) -> None:
        """Say when the copy out of that buffer is over."""
        self._latest.event = event

    def close(self) -> None:
        """Wait for all copies and free the memory. Blocks."""
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()

    @property
    def _latest(self) -> _Buffer:
        return self._buffers[(self._num_taken - 1) % _NUM_BUFFERS]


class _Buffer:
    def __init__(self, num_bytes: int) -> None:
        self.view = aligned_buffer(num_bytes)
        self.event: torch.cuda.Event | None = None
        self._tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        self._is_locked = False

    def locked(self) -> torch.Tensor:
        if not self._is_locked:
            _check(torch.cuda.cudart().cudaHostRegister(self._tensor.data_ptr(), self._tensor.numel(), 0))
            self._is_locked = True
        return self._tensor

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
            self.event = None

    def free(self) -> None:
        self.wait()
        if self._is_locked:
            self._is_locked = False
            _check(torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr()))


def _check(code: object) -> None:
    status = int(code)  # type: ignore[call-overload]
    if status != 0:
        raise RuntimeError(f"page-locking host memory failed with CUDA error {status}")
