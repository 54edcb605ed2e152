"""Failpoints: the process ends itself by SIGKILL at a chosen change of a store, or of the file system."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, NoReturn, TypeVar

from tests.kit.wrapping import WrappedStore, WrappedWriter
from tidegate.storage import ObjectWriter, Store

_T = TypeVar("_T")
_PAGE_BYTES = 4096

KillMoment = Literal["torn", "after"]
_FILE_CHANGES = frozenset({"os.link", "os.remove", "os.rename", "os.mkdir", "os.rmdir"})


def die() -> NoReturn:
    """End this process now: nothing is flushed, no handler runs."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemError("SIGKILL did not kill")


def die_before_file_change(nth: int) -> None:
    """From now on, count what this process does to folders, and die before the nth of those, from 1.

    Counted are new names, links, renames and removals, by any thread; Python itself reports them.
    """
    numbers = itertools.count(1)

    def hook(event: str, args: tuple[object, ...]) -> None:
        is_change = event in _FILE_CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT)
        if is_change and next(numbers) == nth:
            die()

    sys.addaudithook(hook)


class KillStore(WrappedStore):
    """Kills its process at one of the changes: create, append, seal, compare_and_put, delete, in the order made.

    Args:
        inner: The store.
        nth: Which change, from 1.
        moment: "after" it has taken effect, or "torn": with half of an append's bytes written, and before any other.
    """

    def __init__(self, inner: Store, nth: int, moment: KillMoment) -> None:
        super().__init__(inner)
        self._nth = nth
        self._moment = moment
        self._num_changes = 0
        self._lock = threading.Lock()

    def is_it(self) -> bool:
        """Count a change; whether it is the one to die at."""
        with self._lock:
            self._num_changes += 1
            return self._num_changes == self._nth

    @property
    def is_torn(self) -> bool:
        """Whether the change is to be made by half."""
        return self._moment == "torn"

    def change(self, run: Callable[[], _T]) -> _T:
        """Make a change, and die where that is asked for."""
        is_it = self.is_it()
        if is_it and self.is_torn:
            die()
        result = run()
        if is_it:
            die()
        return result

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        inner = self.change(lambda: self.inner.create(key, size_hint_bytes=size_hint_bytes, replace=replace))
        return _KillWriter(self, inner, key)

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        self.change(lambda: self.inner.compare_and_put(key, data, expected=expected))

    def delete(self, key: str) -> None:
        self.change(lambda: self.inner.delete(key))


class _KillWriter(WrappedWriter):
    def __init__(self, store: KillStore, inner: ObjectWriter, key: str) -> None:
        super().__init__(inner, key)
        self._store = store

    def append(self, data: memoryview) -> Future[None]:
        if not self._store.is_it():
            return self.inner.append(data)
        half = data.nbytes // 2 // _PAGE_BYTES * _PAGE_BYTES
        self.inner.append(data[:half] if self._store.is_torn else data).result()
        die()

    def seal(self) -> None:
        self._store.change(self.inner.seal)
