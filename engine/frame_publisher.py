"""The half of a rank that reads frames for the others of its host, and puts them into shared memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.storage.workers import WorkerPool

from .frame_plan import Frame, FramePart
from .meeting import Meeting
from .open_objects import FrameSource

_NUM_THREADS = 4
_NAP_S = 0.002
_LONGEST_NAP_S = 0.02


def link_name(number: int, taker: int) -> str:
    """Return the name of a frame in the meeting's folder, for a rank that takes it."""
    return f"{number}-{taker}"


@dataclass(slots=True)
class _Published:
    """A frame in shared memory.

    Attributes:
        fd: Of the memory; it is free once no name is left.
        num_bytes: How much it is.
        unfinished: Its name until it is filled.
        takers: Who takes it.
        links: What they know it by; none before it is filled.
    """

    fd: int
    num_bytes: int
    unfinished: Path
    takers: dict[int, Path]
    links: dict[int, Path] = field(default_factory=dict)

    @property
    def num_names(self) -> int:
        """How many have not taken it; 1 while it is being filled."""
        return os.fstat(self.fd).st_nlink

    def free(self) -> None:
        """Remove its names."""
        for path in (self.unfinished, *self.links.values()):
            path.unlink(missing_ok=True)
        os.close(self.fd)


class FramePublisher:
    """Reads what a rank reads for its host, in order, while there is room; by threads of its own, from the start on.

    Args:
        source: Where frames are read from.
        meeting: The ranks.
        frames: The rank's list of frames.
        part: Which of them it reads, and for whom.
        patience_s: Takers that take nothing for so long are given up.
    """

    def __init__(
        self, source: FrameSource, meeting: Meeting, frames: Sequence[Frame], part: FramePart, patience_s: float
    ) -> None:
        self._source = source
        self._meeting = meeting
        self._window_bytes = part.window_bytes
        self._patience_s = patience_s
        self._rows = iter([(frames[index], number, takers) for index, number, takers in part.read])
        self._order = threading.Lock()
        self._lock = threading.Lock()
        self._published: list[_Published] = []
        self._late: set[int] = set()
        self._is_closed = threading.Event()
        num_threads = min(_NUM_THREADS, len(part.read))
        self._workers = WorkerPool(num_threads, "tidegate-share") if num_threads else None
        self._running = [self._workers.submit(self._run) for _ in range(num_threads)] if self._workers else []

    def wait_taken(self) -> None:
        """Block until all frames have been read and taken, or their takers are gone or late."""
        for future in self._running:
            future.result()
        self._wait_until_at_most(0)

    def close(self) -> None:
        """Stop, and free the memory. Blocks for the reads in flight. May be called again."""
        self._is_closed.set()
        if self._workers is not None:
            self._workers.close()
        while self._published:
            self._published.pop().free()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # no room even for names: the takers will not wait for long
            while (row := self._next()) is not None:
                frame, published = row
                try:
                    _fill(self._source, frame, published.fd)
                except Exception:  # noqa: BLE001 - whoever finds it empty reads it again and says what is wrong
                    os.truncate(published.fd, 0)
                self._put_out(published)

    def _next(self) -> tuple[Frame, _Published] | None:
        """Take the next frame, once there is room for it."""
        with self._order:
            row = next(self._rows, None)
            if row is None:
                return None
            frame, number, takers = row
            self._wait_until_at_most(self._window_bytes - frame[2])
            if self._is_closed.is_set():
                return None
            folder = self._meeting.folder
            unfinished = folder / f"{number}.unfinished"
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            links = {taker: folder / link_name(number, taker) for taker in takers}
            published = _Published(fd, frame[2], unfinished, links)
            with self._lock:
                self._published.append(published)
            return frame, published

    def _put_out(self, published: _Published) -> None:
        """Let the takers see a frame that is filled; each finds all of it or nothing."""
        with self._lock:
            for taker, link in published.takers.items():
                if taker not in self._late and not self._meeting.is_gone(taker):
                    os.link(published.unfinished, link)
                    published.links[taker] = link
            published.unfinished.unlink()

    def _wait_until_at_most(self, num_bytes: int) -> None:
        """Block until what is in shared memory is no more than this; give up takers that are late."""
        nap_s, before = _NAP_S, -1
        deadline_s = time.monotonic() + self._patience_s
        while not self._is_closed.is_set():
            with self._lock:
                used_bytes, num_names = self._look()
                if used_bytes <= num_bytes:
                    return
                if time.monotonic() > deadline_s:
                    self._drop(lambda _: True)
                else:
                    self._drop(self._meeting.is_gone)
            if num_names != before:
                nap_s, before, deadline_s = _NAP_S, num_names, time.monotonic() + self._patience_s
            self._is_closed.wait(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _look(self) -> tuple[int, int]:
        """Return how many bytes are in shared memory, and how many names they have; forget what all have taken."""
        left: list[_Published] = []
        for published in self._published:
            if published.num_names:
                left.append(published)
            else:
                os.close(published.fd)
        self._published = left
        return sum(item.num_bytes for item in left), sum(item.num_names for item in left)

    def _drop(self, is_dropped: Callable[[int], bool]) -> None:
        """Take back what is out for takers that will not come for it."""
        for published in self._published:
            for taker, link in published.links.items():
                if is_dropped(taker) and link.exists():
                    link.unlink(missing_ok=True)
                    self._late.add(taker)


def _fill(source: FrameSource, frame: Frame, fd: int) -> None:
    """Read a frame into shared memory. Raises OSError if there is no room for it."""
    key, offset, num_bytes = frame
    os.posix_fallocate(fd, 0, num_bytes)  # or the first touch of a page too many would kill the process
    with mmap.mmap(fd, num_bytes) as memory, memoryview(memory) as view:
        source.read_into(key, offset, view)
