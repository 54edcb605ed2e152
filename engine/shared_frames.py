"""Read each stored frame once a host: one rank reads it into the host's shared memory, the others copy it from there.

A frame that is there has a link for each rank that takes it, which that rank removes once it has the frame; with the
last link the memory is free. A rank keeps no more than its window there, and goes on when the others have caught up.
All ranks take frames in the same order, so the one that is waited for is never behind one that waits.

Nobody depends on a peer: what does not come in time, or from one that is dead, a rank reads itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from .frame_plan import Frame, FramePart
from .frame_publisher import FramePublisher, link_name
from .meeting import Meeting
from .open_objects import FrameSource

_NAP_S = 0.002
_LONGEST_NAP_S = 0.02


class SharedFrames:
    """A source that has the frames that ranks share from the host's memory, and all others from the store.

    Begins at once to read what this rank reads for others, by threads of its own.

    Args:
        source: The store.
        frames: What this rank has said it reads.
        part: What came of it.
        patience_s: How long it waits for a frame that another rank reads, before it reads it itself; and half of it
            for one that another should take.

    Raises:
        OSError: The shared memory cannot be used.
    """

    def __init__(self, source: FrameSource, frames: Sequence[Frame], part: FramePart, patience_s: float) -> None:
        self._source = source
        self._patience_s = patience_s
        self._meeting = Meeting(part.token, part.rank, part.peers)
        self._taken: dict[tuple[str, int], _Taken] = {}
        self._starts: dict[str, list[int]] = defaultdict(list)
        for index, number, reader in part.take:
            key, offset, num_bytes = frames[index]
            place = self._meeting.folder / link_name(number, part.rank)
            self._taken[key, offset] = _Taken(offset, num_bytes, place, reader)
            self._starts[key].append(offset)
        for starts in self._starts.values():
            starts.sort()
        self._late: set[int] = set()
        self._lock = threading.Lock()
        self._pause = threading.Event()
        self._publisher = FramePublisher(source, self._meeting, frames, part, patience_s / 2)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out`, as a store does. Blocks until the rank that reads the frame has done so."""
        taken = self._covering(key, offset, out.nbytes)
        if taken is None or not self._copied(taken, offset, out):
            self._source.read_into(key, offset, out)

    def finish(self) -> None:
        """End well: block until the others have what this rank has read for them, or are late or gone."""
        self._publisher.wait_taken()
        self.close()

    def close(self) -> None:
        """Take no more, give no more, and leave nothing. Blocks for the reads in flight. May be called again."""
        if self._pause.is_set():
            return
        self._pause.set()
        self._publisher.close()
        for taken in self._taken.values():
            taken.place.unlink(missing_ok=True)
        self._meeting.leave()

    def _covering(self, key: str, offset: int, num_bytes: int) -> _Taken | None:
        starts = self._starts.get(key, [])
        at = bisect_right(starts, offset) - 1
        taken = self._taken[key, starts[at]] if at >= 0 else None
        return taken if taken is not None and offset + num_bytes <= taken.offset + taken.num_bytes else None

    def _copied(self, taken: _Taken, offset: int, out: memoryview) -> bool:
        if taken.left_bytes <= 0 or not self._has_come(taken):
            return False
        is_whole = False
        with contextlib.suppress(OSError), taken.place.open("rb", buffering=0) as file:
            file.seek(offset - taken.offset)
            is_whole = file.readinto(out) == out.nbytes
        with self._lock:
            taken.left_bytes = taken.left_bytes - out.nbytes if is_whole else 0
        if taken.left_bytes <= 0:
            taken.place.unlink(missing_ok=True)
        return is_whole

    def _has_come(self, taken: _Taken) -> bool:
        deadline_s, nap_s = time.monotonic() + self._patience_s, _NAP_S
        while not taken.place.exists():
            if taken.reader in self._late or self._meeting.is_gone(taken.reader) or self._pause.is_set():
                return taken.place.exists()
            if time.monotonic() > deadline_s:
                self._late.add(taken.reader)  # what else it was to read is not waited for
                return False
            self._pause.wait(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        return True


class _Taken:
    """A frame that this rank has from shared memory.

    Attributes:
        offset: Where it begins in its object.
        num_bytes: How long it is.
        place: This rank's link to it.
        reader: The rank that puts it there.
        left_bytes: How much of it has not been copied yet; 0 also if it cannot be.
    """

    __slots__ = ("left_bytes", "num_bytes", "offset", "place", "reader")

    def __init__(self, offset: int, num_bytes: int, place: Path, reader: int) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        self.place = place
        self.reader = reader
        self.left_bytes = num_bytes
