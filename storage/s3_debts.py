"""What failed writes may have left at the server: remembered, and removed once the server answers.

A request that got no answer in time is not gone. A server that was frozen, or a machine on the way, still has it, and
may take it up after it has answered later ones: then an upload appears behind the look that found none, or a part
comes to an upload that was aborted (docs.aws.amazon.com/AmazonS3/latest/API/API_AbortMultipartUpload.html says so of
AWS, too). So whatever had such a request is looked at again.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field

from .errors import ObjectNotFoundError, StorageError
from .s3_calls import Attempt, Calls
from .s3_client import Answer
from .s3_errors import Effect, effect_of
from .s3_uploads import Upload, Uploads

TOKEN = "tidegate-write"
"""Name of the metadata that tell whose an object is."""
LATE_S = 3.0
"""How long after its first answer a server may still take up what we had sent before: so long do we look again.

SeaweedFS, thawed beside three busy processes on two cores, took up to 0.02 s.
"""
_REMEMBERED_S = 600.0  # the same while the store is open, where it costs a call a save, and no waiting
_FIRST_PAUSE_S = 0.1


@dataclass(slots=True, eq=False)
class Debt:
    """What one write, that has failed or needs it no more, may have left.

    Attributes:
        key: The key of its object.
        upload_id: Its upload; None: it has none that it knows of.
        num_strays: How many uploads the server may have begun without our learning their ids. Where it is not 0, all
            uploads of the key are of no use, but for those of writers that the store still has.
        token: What its object is marked by, if that may have appeared; None: it has not.
        creates_late: Whether one of those strays may appear yet, as its request got no answer.
        is_late: Whether another request got none: a part, a completion, or what was to remove it.
    """

    key: str
    upload_id: str | None = None
    num_strays: int = 0
    token: str | None = None
    creates_late: bool = False
    is_late: bool = False
    _found: set[str] = field(default_factory=set)
    _answered_s: float | None = None

    def __bool__(self) -> bool:
        """Whether there may be anything."""
        return self.upload_id is not None or self.num_strays > 0 or self.token is not None

    def seen(self, now_s: float, stray_ids: set[str]) -> None:
        """Take down that the server has answered to all of a look, and which strays it had."""
        self._found |= stray_ids
        if self._answered_s is None:
            self._answered_s = now_s

    def left_s(self, now_s: float, patience_s: float) -> float:
        """How long it has to be looked at still, after a look; not positive: it is paid."""
        is_settled = not self.is_late and (not self.creates_late or len(self._found) >= self.num_strays)
        return 0.0 if is_settled or self._answered_s is None else self._answered_s + patience_s - now_s


class Debts:
    """What is owed to the server of one store. Safe for threads.

    Args:
        calls: How the server is called.
        uploads: Its uploads.
    """

    def __init__(self, calls: Calls, uploads: Uploads) -> None:
        self._calls = calls
        self._uploads = uploads
        self._owed: list[Debt] = []
        self._live: Counter[str] = Counter()
        self._lock = threading.Lock()

    def unpaid(self) -> list[str]:
        """Return the keys of the writes of which something may be left. Makes no call."""
        with self._lock:
            return sorted({debt.key for debt in self._owed})

    def begin(self, key: str) -> None:
        """Let uploads of a key alone, whatever is owed of it: a writer is about to begin one. Makes no call."""
        with self._lock:
            self._live[key] += 1

    def end(self, key: str) -> None:
        """That writer has completed its upload, or needs it no more. Makes no call."""
        with self._lock:
            self._live[key] -= 1
            if self._live[key] <= 0:
                del self._live[key]

    def owe(self, debt: Debt) -> None:
        """Remember what a write may have left. Makes no call."""
        if debt:
            with self._lock:
                self._owed.append(debt)
            indebted.add(self)
            _unclosed.add(self)

    def settle(self, deadline_s: float, *, patience_s: float = _REMEMBERED_S) -> bool:
        """Look at all that is owed, and remove what is there. Blocks; makes no call where nothing is owed.

        Args:
            deadline_s: How long that may take; one attempt of a call may go over it, by `timeout_s`.
            patience_s: How long after the server's first answer unanswered requests count as under way.

        Returns:
            Whether the server has answered to everything, and nothing had to be put off.
        """
        is_complete = True
        end_s = time.monotonic() + deadline_s
        with self._lock:
            owed = list(self._owed)
        for debt in owed:
            try:
                if time.monotonic() > end_s:
                    return False
                stray_ids = self._look(debt, end_s)
            except StorageError as exc:
                if exc.retryable:
                    debt.is_late = debt.is_late or effect_of(exc) is Effect.LATER
                    return False
                self._forget(debt)  # we may not see or abort it, for instance
                continue
            if stray_ids is None:
                is_complete = False
                continue
            debt.seen(time.monotonic(), stray_ids)
            if debt.left_s(time.monotonic(), patience_s) <= 0:
                self._forget(debt)
        return is_complete

    def finish(self, deadline_s: float) -> None:
        """Settle for good: look again for LATE_S after the server's first answer where a request got none. Blocks.

        Ends early when the server is away; and, where only creates went unanswered and no removal of ours did, when as
        many uploads have been found. So it takes at most LATE_S and two times `deadline_s`, and `timeout_s` if the
        server falls silent.
        """
        pause_s = _FIRST_PAUSE_S
        while self.settle(deadline_s, patience_s=LATE_S):
            with self._lock:
                left_s = max((debt.left_s(time.monotonic(), LATE_S) for debt in self._owed), default=0.0)
                if not self._owed:
                    break
            time.sleep(max(0.0, min(pause_s, left_s)))
            pause_s *= 2
        _unclosed.discard(self)

    def _look(self, debt: Debt, end_s: float) -> set[str] | None:
        """Remove what is there of one. Returns the ids of its strays that were; None: it has to be put off."""
        if debt.upload_id is not None:
            self._uploads.abort(Upload(debt.key, debt.upload_id, 0.0), deadline_s=_left_s(end_s))
        strays: list[Upload] = []
        if debt.num_strays:
            folder, slash, _ = debt.key.rpartition("/")
            found = self._uploads.list(folder + slash, deadline_s=_left_s(end_s))
            strays = [each for each in found if each.key == debt.key and each.upload_id != debt.upload_id]
            with self._lock:
                if debt.key in self._live:  # asked after the listing: what that has seen was live before
                    return None
        for upload in strays:
            self._uploads.abort(upload, deadline_s=_left_s(end_s))
        if debt.token is not None:
            with contextlib.suppress(ObjectNotFoundError):
                self._remove_object(debt, end_s)
        return {upload.upload_id for upload in strays}

    def _remove_object(self, debt: Debt, end_s: float) -> None:
        """Delete the object, if it is this one's."""

        def head(attempt: Attempt) -> Answer:
            return attempt.client.head_object(**self._calls.at(debt.key))

        def delete(attempt: Attempt) -> Answer:
            return attempt.client.delete_object(**self._calls.at(debt.key))

        answer = self._calls.run(head, action="look up", key=debt.key, deadline_s=_left_s(end_s))
        if answer.get("Metadata", {}).get(TOKEN) == debt.token:
            self._calls.run(delete, action="delete", key=debt.key, deadline_s=_left_s(end_s))

    def _forget(self, debt: Debt) -> None:
        with self._lock:
            with contextlib.suppress(ValueError):  # another thread was faster
                self._owed.remove(debt)
            if not self._owed:
                indebted.discard(self)
                _unclosed.discard(self)


indebted: weakref.WeakSet[Debts] = weakref.WeakSet()
_unclosed: set[Debts] = set()
"""Those that live until the exit, although whoever had the store has let it go without closing it."""


def forget_all() -> None:
    """Owe nothing, in a child process: all of it is the parent's."""
    indebted.clear()
    _unclosed.clear()


def _left_s(end_s: float) -> float:
    return max(0.0, end_s - time.monotonic())
