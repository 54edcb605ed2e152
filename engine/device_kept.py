"""The chunks of the last checkpoint, kept on the device that their tensors are on: the bases of the next one's."""

from __future__ import annotations

import torch


class DeviceKept:
    """Copies of chunks on one device, as many as a budget holds, each allocated once. Used by one thread at a time.

    A copy knows the attempt that it belongs to, and its sum (residual.cu): one that was made for a save that failed is
    never taken for the one before it, and one that something has written to is found out.

    Args:
        limit_bytes: The most that all copies may take.
        device: Where they are.
        stream: The stream that memory is taken from PyTorch's allocator for.
    """

    def __init__(self, limit_bytes: int, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._device = device
        self._stream = stream
        self._copies: dict[int, torch.Tensor] = {}
        self._owners: dict[int, tuple[str, int]] = {}
        self.held_bytes = 0

    def has(self, attempt: str, chunk: int) -> bool:
        """Whether there is a copy of that chunk of that attempt."""
        return self._owners.get(chunk, ("", 0))[0] == attempt

    def may_hold(self, chunk: int, num_bytes: int) -> bool:
        """Whether there is room for a chunk, or a copy of an earlier one in its place."""
        copy = self._copies.get(chunk)
        mine_bytes = copy.numel() if copy is not None else 0
        return mine_bytes == num_bytes or self.held_bytes - mine_bytes + num_bytes <= self._limit_bytes

    def take(self, chunk: int, num_bytes: int) -> tuple[torch.Tensor, int] | None:
        """Take the memory of a chunk's copy, which belongs to nobody until `give`.

        Returns:
            uint8[num_bytes], and the sum of what it holds where that is a copy; None if there is no room.
        """
        _, summed = self._owners.pop(chunk, ("", 0))
        copy = self._copies.get(chunk)
        if copy is None or copy.numel() != num_bytes:
            copy = self._allocate(chunk, num_bytes)
        return None if copy is None else (copy, summed)

    def give(self, attempt: str, chunk: int, summed: int) -> None:
        """Say whose copy a chunk's memory holds now, and its sum."""
        if chunk in self._copies:
            self._owners[chunk] = (attempt, summed)

    def distrust(self) -> None:
        """Take none of the copies for anything any more; their memory stays for new ones."""
        self._owners.clear()

    def drop(self, chunk: int) -> None:
        """Free a copy; nothing may use it any more."""
        self._owners.pop(chunk, None)
        copy = self._copies.pop(chunk, None)
        self.held_bytes -= 0 if copy is None else copy.numel()

    def _allocate(self, chunk: int, num_bytes: int) -> torch.Tensor | None:
        self.drop(chunk)
        if self.held_bytes + num_bytes > self._limit_bytes:
            return None
        try:
            with torch.cuda.stream(self._stream):
                made = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            self._limit_bytes = self.held_bytes  # so that nothing more is tried
            return None
        self._copies[chunk] = made
        self.held_bytes += num_bytes
        return made
