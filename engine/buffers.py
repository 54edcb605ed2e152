"""Host memory of the pipeline: page-aligned buffers, allocated once, kept, and counted against a byte budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tidegate.storage.aligned import aligned_buffer, touch
from tidegate.storage.base import ALIGNMENT_BYTES

from .budget import ByteBudget
from .errors import InternalError

_SMALLEST_BYTES = 64 << 10


class HostBuffer:
    """A page-aligned uint8 buffer on loan from a pool. Call `release` exactly once.

    Attributes:
        tensor: Shape (capacity,), uint8, on the CPU; page-locked if the pool pins.
        view: The same memory.
        address: Where it begins.
    """

    __slots__ = ("_pool", "address", "is_pinned", "tensor", "view")

    def __init__(self, pool: BufferPool, capacity: int, pin: bool) -> None:
        self._pool = pool
        self.view = aligned_buffer(capacity)
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.is_pinned = pin
        if pin:
            touch(self.view)
            _check_cuda(torch.cuda.cudart().cudaHostRegister(self.address, capacity, 0))

    @property
    def capacity(self) -> int:
        """Bytes that it holds."""
        return self.tensor.numel()

    def release(self) -> None:
        """Give the buffer back to its pool."""
        self._pool._put_back(self)

    def free(self) -> None:
        """Unlock the pages; the memory itself goes with the last reference."""
        if self.is_pinned:
            self.is_pinned = False
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(self.address))


class BufferPool:
    """Buffers by size class under one budget. What is idle is reused; where there is no room for one more, a larger one
    is lent, or idle ones of other sizes make room.

    Idle and lent bytes together never pass the budget (a single larger buffer passes alone). To page-lock a buffer, or
    to unlock it, holds up the training's own calls of the CUDA driver: so what is there is kept for the next save.

    Args:
        budget: Counts the bytes on loan.
        unit_bytes: The usual size, that of a whole chunk's frame. Requests for more than half of it get one of these.
            There may be more such sizes: see `add_unit`.
        pin: Page-lock the buffers, so that copies to and from a GPU run at full speed and without the host.
    """

    def __init__(self, budget: ByteBudget, unit_bytes: int, *, pin: bool = False) -> None:
        self.budget = budget
        self._units: tuple[int, ...] = (unit_bytes,)
        self._pin = pin
        self._idle: dict[int, list[HostBuffer]] = {}
        self._idle_bytes = 0
        self._lock = threading.RLock()

    def add_unit(self, unit_bytes: int) -> None:
        """Add a usual size, for requests that the smaller ones do not hold."""
        with self._lock:
            self._units = tuple(sorted({*self._units, unit_bytes}))

    def pin_from_now_on(self) -> None:
        """Page-lock buffers that are allocated from now on; idle ones are freed."""
        if not self._pin:
            self._pin = True
            self.trim()

    def acquire(self, num_bytes: int, should_stop: Callable[[], bool] = lambda: False) -> HostBuffer | None:
        """Borrow a buffer of at least `num_bytes`; block until the budget allows it. None if `should_stop` said so."""
        capacity = self._size_class(num_bytes)
        return self._lend(capacity) if self.budget.acquire(capacity, should_stop) else None

    def borrow(self, num_bytes: int) -> HostBuffer:
        """Borrow a buffer of at least `num_bytes`; block until the budget allows it."""
        buffer = self.acquire(num_bytes)
        if buffer is None:
            raise InternalError("a buffer pool gave up without being asked to")
        return buffer

    @contextmanager
    def lent(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """Lend uint8[num_bytes] on the CPU; block until the budget allows it."""
        buffer = self.borrow(num_bytes)
        try:
            yield buffer.tensor[:num_bytes]
        finally:
            buffer.release()

    def try_acquire(self, num_bytes: int) -> HostBuffer | None:
        """Borrow a buffer if the budget allows it now."""
        capacity = self._size_class(num_bytes)
        return self._lend(capacity) if self.budget.try_acquire(capacity) else None

    def stock(self, num_buffers: int, num_bytes: int) -> None:
        """Allocate so many buffers of at least `num_bytes`, less what is idle, as far as there is room. Blocks."""
        capacity = self._size_class(num_bytes)
        while True:
            with self._lock:
                has_room = self._idle_bytes + self.budget.in_use_bytes + capacity <= self.budget.limit_bytes
                if len(self._idle.get(capacity, ())) >= num_buffers or not has_room:
                    return
                self._idle.setdefault(capacity, []).append(HostBuffer(self, capacity, self._pin))
                self._idle_bytes += capacity

    def trim(self) -> None:
        """Free every idle buffer."""
        with self._lock:
            for idle in self._idle.values():
                for buffer in idle:
                    buffer.free()
            self._idle.clear()
            self._idle_bytes = 0

    def _size_class(self, num_bytes: int) -> int:
        unit_bytes = next((unit for unit in self._units if num_bytes <= unit), None)
        if unit_bytes is None:
            return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if num_bytes > unit_bytes // 2:
            return unit_bytes
        return min(unit_bytes, max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length()))

    def _lend(self, capacity: int) -> HostBuffer:
        with self._lock:
            found = self._take_idle(capacity)
            if found is None and not self._has_room():
                larger = sorted(size for size, idle in self._idle.items() if idle and size > capacity)
                found = next((self._take_idle(s) for s in larger if self.budget.try_extend(s - capacity)), None)
            if found is not None:
                return found
            self._make_room()
        try:
            return HostBuffer(self, capacity, self._pin)
        except BaseException:
            self.budget.release(capacity)
            raise

    def _take_idle(self, capacity: int) -> HostBuffer | None:
        idle = self._idle.get(capacity)
        if not idle:
            return None
        self._idle_bytes -= capacity
        return idle.pop()

    def _has_room(self) -> bool:
        """Whether what is idle fits the budget beside what is lent, or about to be allocated."""
        return self._idle_bytes + self.budget.in_use_bytes <= self.budget.limit_bytes

    def _make_room(self) -> None:
        """Free idle buffers, the smallest first, until the others fit."""
        for capacity in sorted(self._idle):
            while not self._has_room() and (buffer := self._take_idle(capacity)) is not None:
                buffer.free()

    def _put_back(self, buffer: HostBuffer) -> None:
        with self._lock:
            if buffer.is_pinned == self._pin:
                self._idle.setdefault(buffer.capacity, []).append(buffer)
                self._idle_bytes += buffer.capacity
            else:
                buffer.free()
        self.budget.release(buffer.capacity)


def _check_cuda(code: object) -> None:
    status = int(code)  # type: ignore[call-overload]
    if status != 0:
        raise RuntimeError(f"page-locking host memory failed with CUDA error {status}")
