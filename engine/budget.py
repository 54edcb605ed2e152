"""Bytes in flight: never above the limit, held back above the high watermark until they fall to the low one."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ByteBudget:
    """A counter of bytes in flight that makes those who want more wait.

    Once a request would pass `high` × limit, every request waits until the bytes in flight have fallen to `low` ×
    limit or below; so a slow store lets the stages run in bursts instead of switching at every chunk. A request that
    is larger than the whole budget is let through alone: a state that fits no budget is streamed, never refused.

    Args:
        limit_bytes: The most bytes in flight.
        high: Fraction of the limit above which requests wait.
        low: Fraction of the limit at which they go on.
        max_count: The most requests in flight, however small; None: as many as there is room for.
    """

    def __init__(
        self, limit_bytes: int, *, high: float = 0.9, low: float = 0.7, max_count: int | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self._high = high
        self._low = low
        self._max_count = max_count
        self._count = 0
        self._in_use = 0
        self._peak = 0
        self._throttled = False
        self._is_waiting = False
        self._num_throttles = 0
        # Re-entrant, so that a save from a signal handler cannot deadlock on its own thread.
        self._changed = threading.Condition(threading.RLock())

    @property
    def in_use_bytes(self) -> int:
        """Bytes in flight now."""
        return self._in_use

    @property
    def num_throttles(self) -> int:
        """How often a request has had to wait: for the low watermark, or for one of those in flight to end."""
        return self._num_throttles

    def resize(self, limit_bytes: int) -> None:
        """Change the limit. What is in flight stays so, be it more."""
        with self._changed:
            self.limit_bytes = limit_bytes
            self._changed.notify_all()

    def take_peak(self) -> int:
        """Return the most bytes in flight since the last call."""
        with self._changed:
            peak, self._peak = self._peak, self._in_use
            return peak

    def try_acquire(self, num_bytes: int) -> bool:
        """Take `num_bytes` if they are free now."""
        with self._changed:
            return self._take(num_bytes)

    def acquire(self, num_bytes: int, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Take `num_bytes`; block until they are free.

        Args:
            num_bytes: How many.
            should_stop: Asked whenever something changed; True gives up. Call `wake` after making it true.

        Returns:
            Whether they were taken.
        """
        with self._changed:
            while not should_stop():
                if self._take(num_bytes):
                    return True
                self._changed.wait()
            return False

    def try_extend(self, num_bytes: int) -> bool:
        """Take so many bytes more for a request that has been let through, if the limit allows that now."""
        with self._changed:
            if self._in_use + num_bytes > self.limit_bytes:
                return False
            self._in_use += num_bytes
            self._peak = max(self._peak, self._in_use)
            return True

    def release(self, num_bytes: int) -> None:
        """Give bytes back, all that a request has taken."""
        with self._changed:
            self._in_use -= num_bytes
            self._count -= 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Make every waiting `acquire` ask its `should_stop` again."""
        with self._changed:
            self._changed.notify_all()

    def _take(self, num_bytes: int) -> bool:
        if self._must_wait(num_bytes):
            if not self._is_waiting:
                self._num_throttles += 1
            self._is_waiting = True
            return False
        self._is_waiting = self._throttled = False
        self._in_use += num_bytes
        self._count += 1
        self._peak = max(self._peak, self._in_use)
        return True

    def _must_wait(self, num_bytes: int) -> bool:
        if not self._in_use:
            return False
        if self._max_count is not None and self._count >= self._max_count:
            return True
        if self._throttled and self._in_use > int(self.limit_bytes * self._low):
            return True
        self._throttled = self._in_use + num_bytes > int(self.limit_bytes * self._high)
        return self._throttled
