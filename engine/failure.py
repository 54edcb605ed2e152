"""The first error of a load's threads. Those that are left stop when they see that there is one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .errors import CheckpointError
from .load_plan import ReadItem
from .plan import Chunk
from .table import StateTable
from .translate import load_error

_MAX_SHOWN = 3


class Failure:
    """Keeps the first error and drops those that follow from it.

    Args:
        table: What is being loaded, for the names of tensors.
    """

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._is_set = threading.Event()
        self._wakers: list[Callable[[], None]] = []
        self.error: CheckpointError | None = None

    @property
    def is_set(self) -> bool:
        """Whether something went wrong, so that nothing more needs to be done."""
        return self._is_set.is_set()

    def call_when_set(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once something went wrong, by any thread. Not to be called after that."""
        self._wakers.append(wake)

    def forget(self) -> None:
        """Let go of who would be called: they know this object too, and hold memory of GPUs."""
        self._wakers.clear()

    def note(self, exc: Exception, item: ReadItem | None = None) -> None:
        """Keep an error, as one of the public API, if it is the first.

        Args:
            exc: What was raised.
            item: The frame concerned.
        """
        with self._lock:
            if self.error is None and not self.is_set:
                self.error = self._translated(exc, item)
        self.stop()

    def stop(self) -> None:
        """Make the threads stop without an error of theirs."""
        with self._lock:
            wakers = [] if self.is_set else list(self._wakers)
            self._is_set.set()
        for wake in wakers:
            wake()

    def raise_first(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    def _translated(self, exc: Exception, item: ReadItem | None) -> CheckpointError:
        if item is None:
            return load_error(exc, "reading frames", stage="read")
        names = _names(self._table, item.chunk)
        what = f"frame of chunk {item.chunk.index} in {item.key}, which holds {', '.join(names[:_MAX_SHOWN])}"
        what += f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
        return load_error(exc, what, stage="decode", key=item.key, fqn=names[0] if names else "")


def _names(table: StateTable, chunk: Chunk) -> list[str]:
    return [table.fqn(i) for i, e in enumerate(table.tensor_extent) if chunk.first_extent <= e < chunk.end_extent]
