"""One `dcp.async_save` between its stager, on the training thread, and its writer, on DCP's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from .job import SaveJob
from .latch import Latch


class Flight:
    """What the two know of each other.

    Args:
        events: After them the staged bytes on GPUs are valid.
        check: Raises TornSnapshotError if what is read in place has changed.
    """

    def __init__(self, events: Sequence[torch.cuda.Event], check: Callable[[], None]) -> None:
        self._events = events
        self._check = check
        self._job: SaveJob | None = None
        self._thread: threading.Thread | None = None
        self._has_job = Latch()
        self._is_over = Latch()

    def begin(self) -> None:
        """Say that the calling thread carries the save out: when it is gone, the save is over."""
        self._thread = threading.current_thread()

    def await_staged(self) -> None:
        """Block until the staged bytes are valid."""
        for event in self._events:
            event.synchronize()

    def reads_for(self, job: SaveJob) -> None:
        """Say which job reads, before it begins. It is told to look whether what it reads has changed."""
        job.check_unchanged = self._check
        self._job = job
        self._has_job.set()

    def end(self) -> None:
        """Say that nothing is read any more."""
        self._is_over.set()
        self._has_job.set()

    def wait_read(self, timeout_s: float) -> bool:
        """Block until everything is read or the save is over, at most `timeout_s` seconds; tell whether it is so."""
        if self._has_job.wait(timeout_s):
            job = self._job
            if self._is_over.is_set() or job is None or job.future.is_staged:
                return True
            self._is_over.wait(timeout_s)
            return job.future.is_staged or self._is_over.is_set() or self._is_gone
        return self._is_gone

    def wait_over(self) -> None:
        """Block until the thread that carries the save out has ended it."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether a thread other than this one carries the save out."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    @property
    def _is_gone(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()
