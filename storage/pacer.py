"""Work of a set rate that nobody does: a call comes back when it would be done."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable


class Pacer:
    """Says when units that pass one after the other at a set rate would be through.

    The schedule is absolute: units that come while others are under way end exactly their own time after those, however
    late this thread wakes up. So lateness is never added up, and the rate holds over any length of time. One thread
    sleeps until the next end; it needs the GIL only then.

    A pacer that is dropped without `close` calls back all that is queued and lets its thread end.

    Args:
        units_per_s: The rate.
        clock: Seconds, never going back.
        sleep: Blocks for so many seconds by that clock.

    Raises:
        ValueError: The rate is not positive.
    """

    def __init__(
        self,
        units_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not units_per_s > 0:
            raise ValueError(f"a rate must be positive, not {units_per_s}")
        self._units_per_s = units_per_s
        self._clock = clock
        self._busy_until_s = clock()
        self._agenda = _Agenda()
        self._pid = os.getpid()
        # Started here, not when it is needed: from Python 3.12 on no thread starts while the interpreter shuts down.
        self._thread = threading.Thread(
            target=_call_back, args=(self._agenda, clock, sleep), name="tidegate-pacer", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _Agenda.close, self._agenda).atexit = False

    def add(self, num_units: int, done: Callable[[], None]) -> None:
        """Call `done` when so many units more would be through. Does not block.

        Args:
            num_units: How many.
            done: Called once, by the pacer's thread. Must not raise, and should not block: it delays the next.

        Raises:
            RuntimeError: The pacer is closed, or this process is a fork of the one that has the thread.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(f"the thread of this pacer stayed in process {self._pid}; make a new one here")
        with self._agenda.changed:
            if self._agenda.is_closed:
                raise RuntimeError("this pacer is closed")
            self._busy_until_s = max(self._clock(), self._busy_until_s) + num_units / self._units_per_s
            self._agenda.entries.append((self._busy_until_s, done))
            self._agenda.changed.notify()

    def close(self) -> None:
        """Wait until all is through, then end the thread. May be called again. Blocks."""
        self._agenda.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()


class _Agenda:
    """What the thread has to do. Apart from the pacer, so that the thread does not keep that alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.entries: deque[tuple[float, Callable[[], None]]] = deque()
        self.is_closed = False

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify()

    def next(self) -> tuple[float, Callable[[], None]] | None:
        """Wait for an entry and take it; None at the end of all."""
        with self.changed:
            self.changed.wait_for(lambda: self.entries or self.is_closed)
            return self.entries.popleft() if self.entries else None


def _call_back(agenda: _Agenda, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    while (entry := agenda.next()) is not None:
        end_s, done = entry
        while (left_s := end_s - clock()) > 0:
            sleep(left_s)
        done()
        del entry, done  # or it would keep its arguments alive until the next one comes
