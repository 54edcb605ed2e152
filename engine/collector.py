"""Keep the garbage collector from walking a hundred thousand new objects again and again while they are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keep the garbage collector from running: it would look through all objects of the process several times while
    100,000 tensors are described, which makes none that are garbage, and take a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
