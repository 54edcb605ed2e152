"""CUDA streams that belong to one object as long as it lives, and to the next one afterwards.

PyTorch keeps freed memory by the stream that it was allocated on. An encoder with new streams would leave its memory
where no later one could use it, until the device has no room left.
"""

from __future__ import annotations

import weakref

import torch

_idle: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}


def own_streams(owner: object, device: torch.device, count: int, *, priority: int = 0) -> list[torch.cuda.Stream]:
    """Return streams that nobody else gets until `owner` is gone.

    Args:
        owner: Whose they are. What it has queued still comes before what the next one queues.
        device: The CUDA device, with its index.
        count: How many.
        priority: As for torch.cuda.Stream: lower numbers go first.
    """
    idle = _idle.setdefault((device, priority), [])
    streams = []
    for _ in range(count):
        try:
            streams.append(idle.pop())
        except IndexError:
            streams.append(torch.cuda.Stream(device, priority=priority))
    weakref.finalize(owner, idle.extend, streams).atexit = False
    return streams
