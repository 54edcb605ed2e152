"""Objects of this process by key: what the stores that live in it have in common."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator

from .base import ObjectStat
from .errors import ObjectExistsError, ObjectNotFoundError
from .keys import check_key, check_new_key, check_prefix, partial_name


class Entry:
    """One object, or one that is being written.

    Attributes:
        num_bytes: Its length.
        changed_at_s: When it was last written to.
        content: Its bytes; None: they are not kept.
    """

    __slots__ = ("changed_at_s", "content", "num_bytes")

    def __init__(self, changed_at_s: float, content: bytearray | None) -> None:
        self.num_bytes = 0 if content is None else len(content)
        self.changed_at_s = changed_at_s
        self.content = content


class ObjectTable:
    """A dict of objects. Safe for threads; whoever looks into an entry holds `lock`.

    Args:
        url: Of the store, for messages.
        clock: Seconds that the ages in a listing are counted by.
    """

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self.url = url
        self.lock = threading.RLock()
        self._clock = clock
        self._entries: dict[str, Entry] = {}

    def begin(self, key: str, content: bytearray | None) -> str:
        """Start a new object, and return the key under which it is written."""
        check_new_key(key)
        folder, slash, name = key.rpartition("/")
        partial_key = folder + slash + partial_name(name, secrets.token_hex(8))
        with self.lock:
            self._entries[partial_key] = Entry(self._clock(), content)
        return partial_key

    def grow(self, partial_key: str, num_bytes: int, content: memoryview | None = None) -> None:
        """Add to an object that is being written.

        Raises:
            ObjectNotFoundError: It was deleted.
        """
        with self.lock:
            entry = self.entry(partial_key)
            if entry.content is not None and content is not None:
                entry.content += content
            entry.num_bytes += num_bytes
            entry.changed_at_s = self._clock()

    def publish(self, partial_key: str, key: str, *, replace: bool) -> None:
        """Give an object its key. Raises ObjectExistsError if there is one and it may not be replaced."""
        with self.lock:
            entry = self.entry(partial_key)
            if not replace and key in self._entries:
                raise ObjectExistsError(
                    f"{self.url}/{key} is there already; it is never overwritten unless asked", key=key
                )
            del self._entries[partial_key]
            self._entries[key] = entry

    def entry(self, key: str) -> Entry:
        """Return an entry. Raises ObjectNotFoundError if there is none."""
        check_key(key)
        try:
            return self._entries[key]
        except KeyError:
            raise ObjectNotFoundError(f"{self.url} has no object {key!r}; check root and key", key=key) from None

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        """See `Store.compare_and_put`."""
        check_new_key(key)
        with self.lock:
            entry = self._entries.get(key)
            if (entry is None) != (expected is None) or (entry is not None and entry.content != expected):
                state = "absent" if entry is None else "there already"
                raise ObjectExistsError(f"{self.url}/{key} is {state}, so it is not what was expected", key=key)
            self._entries[key] = Entry(self._clock(), bytearray(data))

    def stat(self, key: str) -> ObjectStat:
        """See `Store.stat`."""
        with self.lock:
            entry = self.entry(key)
            return ObjectStat(key, entry.num_bytes, max(0.0, self._clock() - entry.changed_at_s))

    def list(self, prefix: str) -> Iterator[ObjectStat]:
        """See `Store.list`."""
        check_prefix(prefix)
        with self.lock:
            stats = [self.stat(key) for key in self._entries if key.startswith(prefix)]
        yield from stats

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        check_key(key)
        with self.lock:
            self._entries.pop(key, None)
