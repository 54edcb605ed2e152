"""Gather appends into the parts of an upload."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from .s3_options import MAX_PART_BYTES, S3Options

_ALIGNMENT_BYTES = 4096


class Claim:
    """One append: its future is done when the last part that holds bytes of it has let them go."""

    __slots__ = ("_error", "_left", "_lock", "future")

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # it cannot be cancelled: uploads use its bytes
        self._left = 1
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def hold(self) -> None:
        """One more needs its bytes."""
        with self._lock:
            self._left += 1

    def drop(self, error: BaseException | None = None) -> None:
        """One less does, or `append` itself has ended."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(None)


@dataclass(slots=True)
class Part:
    """Bytes that travel together. `number` counts from 0; `claims` are those of the views that are borrowed."""

    number: int
    views: list[memoryview]
    claims: list[Claim]

    @property
    def num_bytes(self) -> int:
        """Its length; 0 once it is released."""
        return sum(view.nbytes for view in self.views)

    def release(self, error: BaseException | None = None) -> None:
        """Let the bytes go and tell the appends."""
        views, claims = self.views, self.claims
        self.views, self.claims = [], []
        for view in views:
            view.release()
        for claim in claims:
            claim.drop(error)


class Gatherer:
    """Cuts what is appended into parts. Not safe for threads.

    Bytes are borrowed while they are enough for a part. What is less is copied at once: the caller gets its buffer back
    without waiting for appends that may never come.

    Args:
        options: How long parts are, and how many there may be.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._views: list[tuple[memoryview, Claim | None]] = []
        self._tail = bytearray()  # our own copy of what comes after those
        self.num_bytes = 0
        self.num_parts = 0

    def add(self, view: memoryview, claim: Claim) -> None:
        """Take bytes; `view` is released when they are not needed any more."""
        num_bytes = view.nbytes
        self.num_bytes += num_bytes
        if self.num_bytes < self._options.least_bytes(self.num_parts):
            with view:
                self._tail += view
            return
        self._close_tail()
        if num_bytes:
            claim.hold()
            self._views.append((view, claim))

    def cut(self, *, early: bool) -> Part | None:
        """Take a part, if there is enough for one.

        Args:
            early: Whether a short one will do, since nothing else is there to be sent.
        """
        target = self._options.target_bytes(self.num_parts)
        if self.num_bytes >= target:  # equal parts rather than a short one at the end
            share = -(-self.num_bytes // (self.num_bytes // target))
            aligned = -(-share // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            return self._take(min(aligned, self.num_bytes, MAX_PART_BYTES))
        if early and self.num_bytes >= self._options.least_bytes(self.num_parts):
            return self._take(self.num_bytes)
        return None

    def keep(self) -> None:
        """Copy what is not enough for a part, so that it is no longer borrowed."""
        if self._views and self.num_bytes < self._options.least_bytes(self.num_parts):
            rest = self.rest()
            self._tail = bytearray().join(rest.views)
            self.num_bytes = len(self._tail)
            self.num_parts -= 1
            rest.release()

    def rest(self) -> Part:
        """Take all that is there, perhaps nothing."""
        return self._take(self.num_bytes)

    def _close_tail(self) -> None:
        if self._tail:
            self._views.append((memoryview(self._tail), None))
            self._tail = bytearray()

    def _take(self, num_bytes: int) -> Part:
        self._close_tail()
        part = Part(self.num_parts, [], [])
        while num_bytes:
            view, claim = self._views[0]
            if view.nbytes <= num_bytes:
                del self._views[0]
            else:
                self._views[0] = (view[num_bytes:], claim)
                with view:
                    view = view[:num_bytes]
                if claim is not None:
                    claim.hold()
            part.views.append(view)
            if claim is not None:
                part.claims.append(claim)
            num_bytes -= view.nbytes
            self.num_bytes -= view.nbytes
        self.num_parts += 1
        return part
