"""The stream on which frames leave a device. Its calls keep the GIL, which the driver thread shares with the training.

PyTorch's calls give the GIL up for a moment each; beside a thread that runs Python without pause every one of them
takes 5 ms then, the interpreter's switch interval, until it is had back. So what is done for every chunk goes through
the CUDA driver, and only what really waits lets go of the GIL.
"""

from __future__ import annotations

import itertools

import torch

from tidegate.codec.kernels import indexed, kernels_of


class CopyStream:
    """A stream for copies, and events that say when they are done.

    Args:
        device: The CUDA device.
        depth: How many copies may be under way. An event is used again after four times as many.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.device_index = indexed(device).index
        self._kernels = kernels_of(indexed(device))
        stream = torch.cuda.Stream(device)
        self._stream = stream
        self.handle = stream.cuda_stream
        events = [torch.cuda.Event(blocking=True) for _ in range(4 * depth)]
        for event in events:
            event.record(stream)  # PyTorch makes an event when it is first recorded
        self._events = itertools.cycle(events)

    def next_event(self) -> torch.cuda.Event:
        """Return an event for the next copy."""
        return next(self._events)

    def copy_to_host(self, target: int, source: int, num_bytes: int) -> None:
        """Queue a copy from device memory to page-locked host memory."""
        with self._kernels.on(self.handle):
            self._kernels.driver.copy_to_host(target, source, num_bytes, self.handle)

    def record(self, event: torch.cuda.Event) -> None:
        """Record an event behind what is queued."""
        with self._kernels.on(self.handle):
            self._kernels.driver.record(event.cuda_event, self.handle)

    def is_done(self, event: torch.cuda.Event) -> bool:
        """Whether the stream has passed an event."""
        with self._kernels.on(self.handle):
            return self._kernels.driver.is_done(event.cuda_event)

    def let_wait(self, stream: int, event: torch.cuda.Event) -> None:
        """Let another stream of the device, given by its handle, wait for an event."""
        with self._kernels.on(stream):
            self._kernels.driver.wait(stream, event.cuda_event)
