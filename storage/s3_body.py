"""A request's body over memoryviews, which travels without a copy."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Sequence

import numpy as np

_BLOCK_BYTES = 1 << 20


class Body:
    """What boto3 takes as a file: read, readinto, seek, tell.

    Args:
        views: The bytes (format "B"), one after the other. They are not released here.
        check: Called before every block; what it raises ends the request.

    Attributes:
        num_bytes: How many there are.
    """

    def __init__(self, views: Sequence[memoryview], check: Callable[[], None] = lambda: None) -> None:
        self._views = views
        self.check = check
        self.num_bytes = sum(view.nbytes for view in views)
        self._at = 0
        self._lent: memoryview | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # awscrt's threads may read while another one closes

    def read(self, size: int = -1) -> memoryview | bytes:
        """Return the next block: a view that is good until the next call; b"" at the end.

        It may be longer than asked: http.client asks for 16 KiB at a time, which would take the GIL 64 times a MiB.
        """
        self.check()
        self._take_back()
        view, start = self._find(self._at)
        if view is None:
            return b""
        self._lent = view[start : start + max(size, _BLOCK_BYTES)]
        self._at += self._lent.nbytes
        return self._lent

    def readinto(self, out: bytearray | memoryview) -> int:
        """Copy the next bytes to `out`, as many as fit. The interpreter's lock is not held meanwhile."""
        num_bytes = 0
        with self._lock:
            if self._is_closed:
                raise ValueError("this body was closed: its request is given up")
            room = np.frombuffer(out, np.uint8)
            while num_bytes < room.nbytes:
                view, start = self._find(self._at)
                if view is None:
                    break
                piece = np.frombuffer(view, np.uint8, min(view.nbytes - start, room.nbytes - num_bytes), start)
                np.copyto(room[num_bytes : num_bytes + piece.nbytes], piece)
                num_bytes += piece.nbytes
                self._at += piece.nbytes
                del piece  # or the view could not be released
        return num_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; returns where that is."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.num_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Say where the next read begins."""
        return self._at

    def seekable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """End all reading; returns when none is under way."""
        with self._lock:
            self._is_closed = True
        self._take_back()

    def _take_back(self) -> None:
        """Release the view that was lent last, whoever still keeps it: a traceback, for instance."""
        if self._lent is not None:
            with contextlib.suppress(BufferError):
                self._lent.release()
            self._lent = None

    def _find(self, at: int) -> tuple[memoryview | None, int]:
        for view in self._views:
            if at < view.nbytes:
                return view, at
            at -= view.nbytes
        return None, 0
