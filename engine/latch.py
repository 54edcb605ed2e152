"""A flag that is set once, and may be awaited by a signal handler that has interrupted a wait for it.

`threading.Event` cannot be: its `wait` holds a lock for some moments, at which a handler that waits for the event, or
for a thread that sets it, waits for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress


class Latch:
    """Whoever waits brings a lock of their own, so no two share one."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Let everyone go on, now and later. May be called again."""
        self._is_set = True
        with suppress(IndexError):
            while True:
                self._waiting.pop().release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until `set` is called, at most for `timeout_s` seconds; return whether it was."""
        if not self._is_set:
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
            if not self._is_set:  # else `set` may have looked before `mine` was there
                mine.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            with suppress(ValueError):
                self._waiting.remove(mine)
        return self._is_set
