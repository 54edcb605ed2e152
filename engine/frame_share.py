"""Read each stored frame once a host, where several ranks of it need the same: one reads, the others copy.

The ranks of a load tell the coordinator which frames they need. Of those that several ranks of one host need, one rank
reads each and puts it, as it is stored, into the host's shared memory, for as long as the load takes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tidegate.storage.workers import WorkerPool

from .council import Council
from .json_fields import as_dict, as_int, as_list, as_str
from .open_objects import FrameSource
from .types import JSON

Frame = tuple[str, int, int]
"""Key of the object, where the frame begins, and how long it is."""

_SHARED_MEMORY = Path("/dev/shm")
_NUM_READERS = 4
_NAP_S = 0.002
_PATIENCE_S = 30.0
"""How long a rank waits for a frame that another reads, before it reads it itself."""


class FrameShare:
    """What the ranks of one load share.

    Args:
        council: The ranks.
        topic: What they call it.
        deadline_s: By when all must have said what they need, by `time.monotonic`.
        grace_s: How much longer a rank waits for the coordinator than the coordinator for the ranks.
    """

    def __init__(self, council: Council, topic: str, deadline_s: float, grace_s: float) -> None:
        self._council = council
        self._topic = topic
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        self._is_settled = False
        self._folder: Path | None = None

    def around(self, source: FrameSource, frames: Sequence[Frame]) -> FrameSource:
        """Settle who reads what, and read what this rank reads for others. Blocks for all ranks.

        Returns:
            A source that has the shared frames from the host's memory and all others from `source`.
        """
        keys = sorted({key for key, _, _ in frames})
        number = {key: i for i, key in enumerate(keys)}
        folder = self._made_folder()
        reply = self._settle(
            {
                "host": _host(),
                "folder": str(folder),
                "room_bytes": shutil.disk_usage(_SHARED_MEMORY).free // 2 if folder is not None else 0,
                "keys": list(keys),
                "frames": [[number[key], offset, num_bytes] for key, offset, num_bytes in frames],
            }
        )
        mine = [frames[as_int(i)] for i in as_list(reply["read"])]
        others = {frames[as_int(i)]: Path(as_str(path)) for i, path in map(as_list, as_list(reply["take"]))}
        if folder is not None and mine:
            _publish(source, folder, mine)
        found = {frame: folder / _name(frame) for frame in mine if folder is not None}
        found.update((frame, place / _name(frame)) for frame, place in others.items())
        return _Shared(source, found) if found else source

    def skip(self) -> None:
        """Take part without needing anything, if this rank has failed before it knew what it needs."""
        if not self._is_settled:
            self._settle({"host": "", "folder": "", "room_bytes": 0, "keys": [], "frames": []})

    def close(self) -> None:
        """Free the shared memory. Not before all ranks have loaded."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _made_folder(self) -> Path | None:
        with contextlib.suppress(OSError):
            self._folder = Path(tempfile.mkdtemp(prefix="tidegate-frames-", dir=_SHARED_MEMORY))
        return self._folder

    def _settle(self, need: dict[str, JSON]) -> dict[str, JSON]:
        self._is_settled = True
        self._council.say(self._topic, need)
        if self._council.is_coordinator:
            needs = [as_dict(message) for message in self._council.gather(self._topic, self._deadline_s)]
            self._council.reply(self._topic, dict(enumerate(_decide(needs))))
        return as_dict(self._council.hear(self._topic, self._deadline_s + self._grace_s))


def _decide(needs: Sequence[Mapping[str, JSON]]) -> list[JSON]:
    """Of the frames that several ranks of a host need, give each to one of them, by turns, while there is room."""
    wanted: dict[tuple[str, str, int], list[tuple[int, int, int]]] = defaultdict(list)
    room_bytes: dict[str, int] = {}
    for rank, need in enumerate(needs):
        host, keys = as_str(need["host"]), as_list(need["keys"])
        room_bytes[host] = min(room_bytes.get(host, 1 << 62), as_int(need["room_bytes"]))
        for i, row in enumerate(as_list(need["frames"])):
            key, offset, num_bytes = as_list(row)
            wanted[host, as_str(keys[as_int(key)]), as_int(offset)].append((rank, i, as_int(num_bytes)))
    replies: list[tuple[list[JSON], list[JSON]]] = [([], []) for _ in needs]
    load_bytes = [0] * len(needs)
    for (host, _, _), takers in wanted.items():
        num_bytes = takers[0][2]
        if len(takers) < 2 or num_bytes > room_bytes[host]:
            continue
        room_bytes[host] -= num_bytes
        reader = min((rank for rank, _, _ in takers), key=lambda rank: load_bytes[rank])
        load_bytes[reader] += num_bytes
        for rank, i, _ in takers:
            if rank == reader:
                replies[rank][0].append(i)
            else:
                replies[rank][1].append([i, needs[reader]["folder"]])
    return [{"read": read, "take": take} for read, take in replies]


def _host() -> str:
    """Name what shares memory: this host and, in a container, this mount of it."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}:{_SHARED_MEMORY.stat().st_dev}"
    return f"{socket.gethostname()}:{os.getpid()}"


def _name(frame: Frame) -> str:
    return f"{frame[0].replace('/', '_')}-{frame[1]}"


def _publish(source: FrameSource, folder: Path, frames: Sequence[Frame]) -> None:
    """Read frames, and put them where others find them. One that cannot be read is left to them."""
    workers = WorkerPool(min(_NUM_READERS, len(frames)), "tidegate-share")
    try:
        for future in [workers.submit(_publish_one, source, folder, frame) for frame in frames]:
            future.result()
    finally:
        workers.close()


def _publish_one(source: FrameSource, folder: Path, frame: Frame) -> None:
    key, offset, num_bytes = frame
    place = folder / _name(frame)
    unfinished = folder / f"{place.name}.unfinished"
    try:
        with unfinished.open("wb+") as file:
            file.truncate(num_bytes)
            with mmap.mmap(file.fileno(), num_bytes) as memory, memoryview(memory) as view:
                source.read_into(key, offset, view)
        unfinished.rename(place)
    except Exception:  # noqa: BLE001 - whoever needs it reads it again and says what is wrong
        with contextlib.suppress(OSError):
            place.touch()
        unfinished.unlink(missing_ok=True)


class _Shared:
    """Frames from the host's memory, the rest from the store."""

    def __init__(self, source: FrameSource, places: Mapping[Frame, Path]) -> None:
        self._source = source
        self._places = places
        self._starts: dict[str, list[int]] = defaultdict(list)
        self._frames: dict[tuple[str, int], Frame] = {}
        for frame in sorted(places, key=lambda frame: frame[1]):
            self._starts[frame[0]].append(frame[1])
            self._frames[frame[0], frame[1]] = frame
        self._pause = threading.Event()

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out`, as a store does. Blocks until another rank has read the frame."""
        starts = self._starts.get(key, [])
        at = bisect_right(starts, offset) - 1
        frame = self._frames[key, starts[at]] if at >= 0 else None
        if frame is None or offset + out.nbytes > frame[1] + frame[2] or not self._copied(frame, offset, out):
            self._source.read_into(key, offset, out)

    def _copied(self, frame: Frame, offset: int, out: memoryview) -> bool:
        place = self._places[frame]
        deadline_s = time.monotonic() + _PATIENCE_S
        while not place.exists():
            if time.monotonic() > deadline_s or not place.parent.exists():
                return False  # whoever was to read it hangs, or is gone
            self._pause.wait(_NAP_S)
        with contextlib.suppress(OSError), place.open("rb") as file:
            file.seek(offset - frame[1])
            return file.readinto(out) == out.nbytes
        return False
