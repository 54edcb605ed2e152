"""Let saves in flight end when the interpreter does.

Falling off the end of the script, `sys.exit` and an uncaught exception all run this: each save in flight is finished,
for at most TIDEGATE_EXIT_TIMEOUT_S seconds (default 600), also where its engine was dropped without `close`. What
nobody has been told is printed. The process's exit code is not touched.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

from .errors import CheckpointError

_DEFAULT_TIMEOUT_S = 600.0


class Pending(Protocol):
    """What has a save in flight, or something to tell that nobody has heard."""

    def settle(self, timeout_s: float | None) -> list[str]:
        """End the save. Returns what else is to be told; raises CheckpointError where it failed or goes on."""
        ...


_pending: set[Pending] = set()


def hold(driver: Pending) -> None:
    """Keep this driver alive, and settle it at exit."""
    _pending.add(driver)


def let_go(driver: Pending) -> None:
    """Forget a driver that has ended its save and told everything."""
    _pending.discard(driver)


def _timeout_s() -> float:
    text = os.environ.get("TIDEGATE_EXIT_TIMEOUT_S", "")
    try:
        return float(text) if text else _DEFAULT_TIMEOUT_S
    except ValueError:
        print(f"tidegate: TIDEGATE_EXIT_TIMEOUT_S={text!r} is no number; it is ignored", file=sys.stderr)
        return _DEFAULT_TIMEOUT_S


def _finish_all() -> None:
    timeout_s = _timeout_s()
    for driver in list(_pending):
        try:
            for note in driver.settle(timeout_s):
                print(f"tidegate: {note}", file=sys.stderr, flush=True)
        except CheckpointError as exc:
            print(f"tidegate: the last save was lost: {exc}", file=sys.stderr, flush=True)


atexit.register(_finish_all)
os.register_at_fork(after_in_child=_pending.clear)  # their threads are not in the child
