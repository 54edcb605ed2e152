"""The chunks of the last checkpoint, kept in host memory so that the next one can be a difference to it."""

from __future__ import annotations

import threading

import torch

from tidegate.codec.digest import digest


class KeptChunks:
    """Copies of chunks, as many as a budget holds, allocated once. Each thread works on another chunk.

    A copy knows the attempt that it belongs to: one that was made for a save that failed is never taken for the one
    before it.

    Args:
        limit_bytes: The most that all copies may take.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._copies: dict[int, torch.Tensor] = {}
        self._owners: dict[int, tuple[str, int]] = {}
        self._lock = threading.Lock()
        self.held_bytes = 0

    def get(self, attempt: str, chunk: int) -> torch.Tensor | None:
        """Return the chunk of an attempt, uint8 on the CPU, if there is a copy and it is as it was made."""
        owner, digested = self._owners.get(chunk, ("", 0))
        copy = self._copies.get(chunk)
        if copy is None or owner != attempt or digest(copy.numpy()) != digested:
            return None
        return copy

    def has(self, attempt: str, chunk: int) -> bool:
        """Whether there is a copy of that chunk of that attempt."""
        return self._owners.get(chunk, ("", 0))[0] == attempt

    def put(self, attempt: str, chunk: int, raw: torch.Tensor, raw_digest: int) -> None:
        """Copy a chunk, in place of that of an earlier attempt, if there is room."""
        copy = self._copies.get(chunk)
        if copy is None or copy.numel() != raw.numel():
            copy = self._allocate(chunk, raw.numel())
        self._owners.pop(chunk, None)
        if copy is not None:
            copy.copy_(raw)
            self._owners[chunk] = (attempt, raw_digest)

    def clear(self) -> None:
        """Free all of it."""
        with self._lock:
            self._copies.clear()
            self._owners.clear()
            self.held_bytes = 0

    def _allocate(self, chunk: int, num_bytes: int) -> torch.Tensor | None:
        with self._lock:
            old = self._copies.pop(chunk, None)
            self.held_bytes -= 0 if old is None else old.numel()
            if self.held_bytes + num_bytes > self._limit_bytes:
                return None
            self.held_bytes += num_bytes
            made = self._copies[chunk] = torch.empty(num_bytes, dtype=torch.uint8)
            return made
