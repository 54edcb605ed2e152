"""Let saves in flight end when the interpreter does.

Falling off the end of the script, `sys.exit` and an uncaught exception all run this: each open engine's save is
finished, for at most TIDEGATE_EXIT_TIMEOUT_S seconds (default 600). The process's exit code is not touched.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Protocol

from .errors import CheckpointError

_DEFAULT_TIMEOUT_S = 600.0


class Closable(Protocol):
    """What can have a save in flight at exit."""

    def finish(self, timeout_s: float) -> None:
        """End the save in flight. Raises CheckpointError where it failed or did not end in time."""
        ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def register(engine: Closable) -> None:
    """Finish this engine's save at exit if it is still there then."""
    _open.add(engine)


def unregister(engine: Closable) -> None:
    """Forget an engine that has been closed."""
    _open.discard(engine)


def _finish_all() -> None:
    timeout_s = float(os.environ.get("TIDEGATE_EXIT_TIMEOUT_S", _DEFAULT_TIMEOUT_S))
    for engine in list(_open):
        try:
            engine.finish(timeout_s)
        except CheckpointError as exc:
            print(f"tidegate: the last save was lost: {exc}", file=sys.stderr, flush=True)


atexit.register(_finish_all)
