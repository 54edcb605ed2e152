"""What `save_async` returns."""

from __future__ import annotations

import time
from concurrent.futures import Future

from .errors import RankFailedError, WaitTimeoutError
from .latch import Latch
from .report import SaveReport


class SaveFuture(Future[SaveReport]):
    """The outcome of one save.

    `result()` blocks until the checkpoint is committed and returns its SaveReport, or raises the SaveError.
    A save that `on_busy="skip"` skipped is `cancelled()`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._staged = Latch()
        self._ended = Latch()
        self._limit_s: float | None = None

    def limit(self, deadline_s: float) -> None:
        """Let nobody wait beyond `deadline_s`, by `time.monotonic`; not for callers."""
        self._limit_s = deadline_s

    def shortened(self, timeout: float | None) -> float | None:
        """Return how long one may wait who would wait for `timeout` seconds; not for callers."""
        if self._limit_s is None:
            return timeout
        left_s = max(0.0, self._limit_s - time.monotonic())
        return left_s if timeout is None else min(timeout, left_s)

    def check_in_time(self) -> None:
        """Raise RankFailedError if the save has not ended by its limit; not for callers."""
        if self._limit_s is not None and time.monotonic() >= self._limit_s and not self._ended.is_set():
            raise RankFailedError(
                "this rank still hangs in a save that all ranks have given up, as its deadline has passed; look at its "
                "store and its GPU. The save ends when it wakes; another cannot begin before"
            )

    @property
    def is_staged(self) -> bool:
        """Whether the state may change."""
        return self._staged.is_set()

    def mark_staged(self) -> None:
        """Let the state change; not for callers."""
        self._staged.set()

    # Future's own methods hold a lock that the background thread needs to end the save. A signal handler that
    # interrupts one of them and saves would wait for that thread for ever; so these take it only when all is over.

    def done(self) -> bool:
        """Whether the save has ended."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Block until the save has ended, and return its report; see `concurrent.futures.Future.result`."""
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the save has ended, and return its failure; see `concurrent.futures.Future.exception`."""
        self._await(timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """Return False: a save that has begun cannot be cancelled."""
        was_cancelled = super().cancel()
        if was_cancelled:
            self._ended.set()
        return was_cancelled

    def set_result(self, result: SaveReport) -> None:
        """End it well; not for callers."""
        super().set_result(result)
        self._ended.set()

    def set_exception(self, exception: BaseException | None) -> None:
        """End it badly; not for callers."""
        super().set_exception(exception)
        self._ended.set()

    def _await(self, timeout: float | None) -> None:
        if not self._ended.wait(self.shortened(timeout)):
            self.check_in_time()
            raise TimeoutError(f"the save has not ended after {timeout} s; it goes on, ask again")

    def wait_staged(self, timeout: float | None = None) -> None:
        """Block until the state may change again: everything is copied, or the save has failed.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            WaitTimeoutError: It is not staged yet.
        """
        if not self._staged.wait(timeout):
            raise WaitTimeoutError(f"the snapshot is not complete after {timeout} s; the save goes on, wait again")
