"""A thread that runs Python without pause: counting, which never gives up the interpreter's lock of its own accord."""

from __future__ import annotations

import time

COUNTS_A_LOOK = 5_000
"""Counts between two looks at the clock, or at what is waited for."""


def count_for(seconds: float) -> float:
    """Count for so long, and return counts a second."""
    start_s = time.perf_counter()
    count = 0
    while time.perf_counter() - start_s < seconds:
        for _ in range(COUNTS_A_LOOK):
            count += 1
    return count / (time.perf_counter() - start_s)
