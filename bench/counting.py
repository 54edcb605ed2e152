"""A thread that runs Python without pause: counting, which never gives up the interpreter's lock of its own accord.

What it counts a second depends on the core's clock, which drifts from second to second. How long it could not run does
not: the kernel tells how long a thread was on a core and how long it waited for one, and for all that is left of the
time it waited for the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COUNTS_A_LOOK = 5_000
"""Counts between two looks at the clock, or at what is waited for."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What one thread counted, in how many seconds, and in how many of these it ran, and waited for a core."""

    num: int = 0
    wall_s: float = 0.0
    ran_s: float = 0.0
    waited_s: float = 0.0

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            self.num + other.num,
            self.wall_s + other.wall_s,
            self.ran_s + other.ran_s,
            self.waited_s + other.waited_s,
        )

    @property
    def per_s(self) -> float:
        """Counts a second."""
        return self.num / self.wall_s

    @property
    def lock(self) -> float:
        """Share of the time in which the thread neither ran nor waited for a core: what the lock cost it."""
        return 1 - (self.ran_s + self.waited_s) / self.wall_s

    @property
    def core(self) -> float:
        """Share of the time in which it could have run, and had no core."""
        return self.waited_s / self.wall_s


def count_until(is_over: Callable[[], bool]) -> Counted:
    """Count until something is over."""
    num, start_s, (ran_s, waited_s) = 0, time.perf_counter(), scheduled_s()
    while not is_over():
        for _ in range(COUNTS_A_LOOK):
            num += 1
    (ran_end_s, waited_end_s), end_s = scheduled_s(), time.perf_counter()
    return Counted(num, end_s - start_s, ran_end_s - ran_s, waited_end_s - waited_s)


def count_for(seconds: float) -> Counted:
    """Count for so long."""
    end_s = time.perf_counter() + seconds
    return count_until(lambda: time.perf_counter() >= end_s)


def scheduled_s() -> tuple[float, float]:
    """Seconds that this thread has run, and that it has waited for a core; 0 where the kernel does not count these."""
    schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    try:
        waited_s = int(schedstat.read_text().split()[1]) / 1e9
    except FileNotFoundError:
        waited_s = 0.0
    return time.thread_time(), waited_s
