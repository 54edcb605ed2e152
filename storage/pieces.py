"""One append in pieces, that several threads write."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from .base import ALIGNMENT_BYTES

MIN_PIECE_BYTES = 4 << 20
"""The shortest piece of an append that is cut; the last may be a little shorter."""
MAX_PIECE_BYTES = 32 << 20


def piece_bytes(num_bytes: int, num_idle: int) -> int:
    """Choose how an append is cut.

    A thread needs the GIL after each piece, and where another thread computes, it waits for it for up to 5 ms. So an
    append is cut only where threads have nothing to do, and no finer than they need it; a busy pool gets long pieces.

    Args:
        num_bytes: Length of the append.
        num_idle: How many threads have nothing to do.

    Returns:
        The length of all pieces but the last: a multiple of ALIGNMENT_BYTES. None is much shorter than the others.
    """
    fewest, most = -(-num_bytes // MAX_PIECE_BYTES), num_bytes // MIN_PIECE_BYTES
    num_pieces = max(1, fewest, min(most, num_idle))
    share = -(-num_bytes // num_pieces)
    return max(1, -(-share // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


class Pieces:
    """The pieces of one append, by where they start, and the future that is done with the last of them.

    Args:
        starts: Where they start in the append.
    """

    __slots__ = ("_error", "_left", "_lock", "future", "starts")

    def __init__(self, starts: Sequence[int]) -> None:
        self.starts = starts
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # it cannot be cancelled: the threads use its bytes
        self._left = set(starts)
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def end_one(self, start: int, error: BaseException | None) -> None:
        """Count one piece as done; a piece counts once."""
        with self._lock:
            if start not in self._left:
                return
            self._left.discard(start)
            self._error = self._error or error
            if self._left:
                return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(None)

    def end_all(self, error: BaseException) -> None:
        """Count every piece as done."""
        for start in self.starts:
            self.end_one(start, error)
