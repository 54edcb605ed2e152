"""The budget's limit holds, its watermarks throttle, and nobody waits for ever."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from tidegate.budget import ByteBudget
from tidegate.buffers import BufferPool

MB = 1 << 20


def test_above_high_everyone_waits_until_low() -> None:
    budget = ByteBudget(100, high=0.9, low=0.5)
    assert all(budget.try_acquire(30) for _ in range(3))
    assert not budget.try_acquire(1)  # 91 would pass the high watermark
    budget.release(30)
    assert not budget.try_acquire(1)  # 60 is above the low one
    budget.release(30)
    assert budget.try_acquire(1)
    assert budget.num_throttles == 1


def test_what_is_larger_than_the_budget_passes_alone() -> None:
    budget = ByteBudget(100)
    assert budget.try_acquire(1000)
    assert not budget.try_acquire(1)
    budget.release(1000)
    assert budget.try_acquire(1)


def test_a_waiter_goes_on_when_bytes_come_back() -> None:
    budget = ByteBudget(100)
    budget.acquire(90)
    done = threading.Event()

    def wait() -> None:
        budget.acquire(50)
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not done.is_set()
    budget.release(90)
    assert done.wait(10)
    thread.join()
    assert budget.in_use_bytes == 50


def test_a_waiter_gives_up_when_told() -> None:
    budget = ByteBudget(100)
    budget.acquire(90)
    stop = threading.Event()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(budget.acquire(50, stop.is_set)))
    thread.start()
    stop.set()
    budget.wake()
    thread.join(10)
    assert answers == [False]


@given(st.lists(st.integers(1, 60), max_size=60))
def test_the_limit_holds(sizes: list[int]) -> None:
    budget = ByteBudget(100, high=0.95, low=0.6)
    held: list[int] = []
    for size in sizes:
        while not budget.try_acquire(size):
            budget.release(held.pop(0))
        held.append(size)
        assert budget.in_use_bytes == sum(held) <= 100
    assert budget.take_peak() <= 100


def test_buffers_are_reused_and_stay_in_the_budget() -> None:
    pool = BufferPool(ByteBudget(8 * MB), MB)
    first = pool.try_acquire(MB)
    assert first is not None
    address = first.tensor.data_ptr()
    assert address % 4096 == 0
    first.release()
    again = pool.try_acquire(MB - 5)
    assert again is not None
    assert again.tensor.data_ptr() == address
    again.release()


def test_idle_buffers_of_other_sizes_make_room() -> None:
    pool = BufferPool(ByteBudget(4 * MB, high=1.0, low=1.0), MB)
    small = [pool.try_acquire(1 << 18) for _ in range(16)]
    for buffer in small:
        assert buffer is not None
        buffer.release()
    large = [pool.try_acquire(MB) for _ in range(4)]
    assert all(large)
    assert sum(len(idle) for idle in pool._idle.values()) == 0
    for buffer in large:
        assert buffer is not None
        buffer.release()
    pool.trim()


def test_a_count_bounds_what_is_in_flight_however_small() -> None:
    budget = ByteBudget(1000, high=1.0, low=1.0, max_count=2)
    assert budget.try_acquire(1)
    assert budget.try_acquire(1)
    assert not budget.try_acquire(1)
    budget.release(1)
    assert budget.try_acquire(1)
    assert budget.in_use_bytes == 2


def test_a_larger_limit_lets_waiters_go_on_and_a_smaller_one_holds_them() -> None:
    budget = ByteBudget(100, high=0.9, low=0.5)
    assert budget.try_acquire(80)
    assert not budget.try_acquire(80)
    done = threading.Event()
    thread = threading.Thread(target=lambda: done.set() if budget.acquire(80) else None)
    thread.start()
    budget.resize(200)
    assert done.wait(10)
    thread.join()
    budget.resize(50)
    assert budget.in_use_bytes == 160
    budget.release(80)
    assert not budget.try_acquire(1), "what is in flight is more than the limit"
    budget.release(80)
    assert budget.try_acquire(1)


@given(st.lists(st.integers(1, 5 * MB), max_size=20))
def test_a_pool_of_two_units_wastes_no_more_than_one_of_either(sizes: list[int]) -> None:
    pool = BufferPool(ByteBudget(64 * MB, high=1.0, low=1.0), MB)
    pool.add_unit(4 * MB)
    for size in sizes:
        buffer = pool.try_acquire(size)
        assert buffer is not None
        assert size <= buffer.capacity < max(2 * size, 64 << 10) + 4096
        assert buffer.capacity in (MB, 4 * MB) or size > 4 * MB or size <= MB // 2 or MB < size <= 2 * MB
        buffer.release()
    pool.trim()


def test_a_frame_of_a_short_chunk_does_not_get_a_long_buffer() -> None:
    """A frame is longer than its chunk by a header: where units are a power of two and that, either gets its own."""
    units = [size + 4096 for size in (MB, 4 * MB)]
    pool = BufferPool(ByteBudget(64 * MB), units[0])
    pool.add_unit(units[1])
    for unit in units:
        buffer = pool.try_acquire(unit)
        assert buffer is not None
        assert buffer.capacity == unit
        buffer.release()
