"""Where processes of one host that share memory for a while see each other come and go.

They meet in a folder of the host's shared memory:

    <rank>.here     is locked by the rank's process while it takes part: a lock that can be had is a dead one's
    <rank>.gone     says that it neither gives nor wants anything any more

Whoever goes last removes the folder. What ranks leave that were all killed goes when the next meeting begins; so does,
a minute later, the empty folder of ranks that waited for one which never came.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from tidegate.storage.locks import release, try_lock

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "tidegate-frames-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NUM_TRIES = 100
_LOOK_EVERY_S = 0.1
_OLD_S = 60.0


def host_name() -> str:
    """Name what shares memory: this machine and, in a container, its mount of the memory; "" if there is none."""
    try:
        place = SHARED_MEMORY.stat()
        return f"{_BOOT_ID.read_text().strip()}:{place.st_dev}:{place.st_ino}"
    except OSError:
        return ""


def free_bytes() -> int:
    """Return how much of the shared memory is free."""
    return shutil.disk_usage(SHARED_MEMORY).free


class Meeting:
    """This rank's part in a meeting. Comes when it is made.

    Args:
        token: Names the meeting.
        me: This rank.
        peers: The ranks of this host that meet.

    Raises:
        OSError: The shared memory cannot be used.
    """

    def __init__(self, token: str, me: int, peers: Sequence[int]) -> None:
        self.folder = SHARED_MEMORY / f"{_PREFIX}{token}"
        self.me = me
        self._peers = [peer for peer in peers if peer != me]
        self._gone: set[int] = set()
        self._next_look_s = dict.fromkeys(self._peers, 0.0)
        _remove_left_behind(self.folder)
        self._folder_fd, self._lock_fd = self._come()

    def is_gone(self, peer: int) -> bool:
        """Tell whether a peer has gone, or is dead. False while it is yet to come."""
        if peer == self.me or peer in self._gone or time.monotonic() < self._next_look_s[peer]:
            return peer in self._gone
        self._next_look_s[peer] = time.monotonic() + _LOOK_EVERY_S
        if (self.folder / f"{peer}.gone").exists() or not self.folder.exists() or self._is_dead(peer):
            self._gone.add(peer)
        return peer in self._gone

    def leave(self) -> None:
        """Go, and remove the folder if nobody else is to come. What this rank has put there, it has removed before."""
        with contextlib.suppress(OSError):
            (self.folder / f"{self.me}.gone").touch()
        release(self._folder_fd, f"{self.me}.here", self._lock_fd)
        self._next_look_s = dict.fromkeys(self._peers, 0.0)
        if all(map(self.is_gone, self._peers)):
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._folder_fd)

    def _come(self) -> tuple[int, int]:
        for _ in range(_NUM_TRIES):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # somebody has tidied up in between
                folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                lock_fd = _locked(folder_fd, f"{self.me}.here")
                if lock_fd is not None:
                    return folder_fd, lock_fd
                os.close(folder_fd)
        raise OSError(f"cannot lock {self.me}.here in {self.folder}")

    def _is_dead(self, peer: int) -> bool:
        name = f"{peer}.here"
        if not (self.folder / name).exists():
            return False
        with contextlib.suppress(OSError):
            lock_fd = try_lock(self._folder_fd, name)
            if lock_fd is None:
                return False
            (self.folder / f"{peer}.gone").touch()
            release(self._folder_fd, name, lock_fd)
        return True


def _locked(folder_fd: int, name: str) -> int | None:
    try:
        return try_lock(folder_fd, name)
    except FileNotFoundError:
        os.close(folder_fd)
        raise


def _remove_left_behind(mine: Path) -> None:
    """Remove the folders of meetings whose processes are all dead."""
    for folder in SHARED_MEMORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder != mine and _is_left_behind(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left_behind(folder: Path) -> bool:
    """Tell whether a folder holds locks, and all of dead processes; or none, and for long."""
    names = [path.name for path in folder.glob("*.here")]
    if not names:
        return time.time() - folder.stat().st_mtime > _OLD_S
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            lock_fd = try_lock(folder_fd, name)
            if lock_fd is None:
                return False
            os.close(lock_fd)  # the file stays: to its peers it says that it is dead
        return True
    finally:
        os.close(folder_fd)
