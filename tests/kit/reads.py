"""A store that writes down what is read from it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tests.kit.wrapping import WrappedStore
from tidegate.storage import Store


@dataclass(frozen=True, slots=True)
class Read:
    """One read: from which object, from which byte on, how many."""

    key: str
    offset: int
    num_bytes: int


class ReadingStore(WrappedStore):
    """Records every read that succeeded.

    Attributes:
        reads: The reads so far.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reads: list[Read] = []
        self._lock = threading.Lock()

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        super().read_into(key, offset, out)
        with self._lock:
            self.reads.append(Read(key, offset, out.nbytes))

    def num_bytes_of(self, suffix: str) -> int:
        """Bytes read from objects whose keys end so."""
        return sum(read.num_bytes for read in self.reads if read.key.endswith(suffix))
