"""A pool's buffers are allocated at first and kept: page-locking them again and again would hold up the training."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.budget import ByteBudget
from tidegate.buffers import BufferPool, HostBuffer

MB = 1 << 20


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The capacities of all buffers that are allocated."""
    found: list[int] = []
    real = HostBuffer.__init__

    def noting(self: HostBuffer, pool: BufferPool, capacity: int, pin: bool) -> None:
        found.append(capacity)
        real(self, pool, capacity, pin)

    monkeypatch.setattr(HostBuffer, "__init__", noting)
    return found


def take(pool: BufferPool, num_bytes: int) -> HostBuffer:
    buffer = pool.try_acquire(num_bytes)
    assert buffer is not None
    assert buffer.capacity >= num_bytes
    return buffer


def held_bytes(pool: BufferPool) -> int:
    return pool.budget.in_use_bytes + pool._idle_bytes


def save(pool: BufferPool, sizes: list[int], depth: int) -> None:
    """Frames of these sizes pass through, so many at once or as many as there is room for."""
    lent: list[HostBuffer] = []
    for size in sizes:
        if len(lent) == depth:
            lent.pop(0).release()
        while (buffer := pool.try_acquire(size)) is None:
            lent.pop(0).release()
        lent.append(buffer)
        assert held_bytes(pool) <= pool.budget.limit_bytes
    for buffer in lent:
        buffer.release()


def test_saves_of_frames_of_several_sizes_allocate_nothing_after_the_first(made: list[int]) -> None:
    """Room for five whole frames and little more; the last frame of each role is shorter."""
    pool = BufferPool(ByteBudget(int(5 * 4 * MB / 0.9) + 1, high=0.9, low=0.7), MB)
    pool.add_unit(4 * MB)
    whole = [4 * MB] * 7
    sizes = [*whole, 3 * MB // 2, *whole, MB, *whole, MB // 5, *whole, 100]
    for depth in (3, 5):
        save(pool, sizes, depth)
    num_made = len(made)
    rng = random.Random(1)
    for _ in range(50):
        rng.shuffle(sizes)
        save(pool, sizes, rng.choice([2, 4, 5]))
    assert len(made) - num_made <= 3, "a few more short ones, in another order"
    pool.trim()


def test_a_larger_buffer_is_lent_where_there_is_no_room_for_another(made: list[int]) -> None:
    pool = BufferPool(ByteBudget(5 * MB, high=1.0, low=1.0), MB)
    pool.add_unit(4 * MB)
    take(pool, 4 * MB).release()
    first = take(pool, MB)
    assert first.capacity == MB
    second = take(pool, MB)
    assert second.capacity == 4 * MB
    assert pool.budget.in_use_bytes == 5 * MB
    assert pool.try_acquire(1) is None
    first.release()
    second.release()
    assert pool.budget.in_use_bytes == 0
    assert made == [4 * MB, MB]
    pool.trim()


def test_where_that_would_pass_the_limit_idle_ones_make_room(made: list[int]) -> None:
    pool = BufferPool(ByteBudget(6 * MB, high=1.0, low=1.0), MB)
    pool.add_unit(4 * MB)
    take(pool, 4 * MB).release()
    assert pool.budget.try_acquire(3 * MB), "another thread is about to allocate that"
    buffer = take(pool, MB)
    assert buffer.capacity == MB
    assert made == [4 * MB, MB]
    assert held_bytes(pool) == 4 * MB, "the large one has been freed"
    buffer.release()
    pool.trim()


def test_a_stock_is_allocated_at_once(made: list[int]) -> None:
    pool = BufferPool(ByteBudget(10 * MB, high=1.0, low=1.0), MB)
    pool.stock(3, MB - 5)
    assert made == [MB] * 3
    pool.stock(3, MB)
    lent = [take(pool, MB) for _ in range(3)]
    assert made == [MB] * 3
    pool.stock(100, MB)
    assert len(made) == 10
    assert held_bytes(pool) == 10 * MB
    for buffer in lent:
        buffer.release()
    pool.trim()
    assert held_bytes(pool) == 0


@given(st.lists(st.tuples(st.integers(1, 6 * MB), st.booleans()), max_size=60))
def test_idle_and_lent_bytes_never_pass_the_limit(steps: list[tuple[int, bool]]) -> None:
    pool = BufferPool(ByteBudget(9 * MB, high=0.9, low=0.6), MB)
    pool.add_unit(4 * MB)
    lent: list[HostBuffer] = []
    for size, is_release in steps:
        if is_release and lent:
            lent.pop(0).release()
            continue
        buffer = pool.try_acquire(size)
        if buffer is not None:
            lent.append(buffer)
            assert buffer.capacity >= size
        assert held_bytes(pool) <= 9 * MB
        assert pool.budget.in_use_bytes == sum(buffer.capacity for buffer in lent)
    for buffer in lent:
        buffer.release()
    assert pool.budget.in_use_bytes == 0
    pool.trim()
