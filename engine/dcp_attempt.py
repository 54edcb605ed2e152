"""How the ranks of one DCP save learn the attempt that they write under.

The coordinator sends it along with the plans. Where DCP has cached a rank's plan it sends none, and the rank finds what
came with the first one; then it reads the attempt from a small object that the coordinator has put beforehand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidegate.storage.base import Store
from tidegate.storage.errors import ObjectNotFoundError

from .commit import step_folder
from .errors import SaveError

_NAME = "ATTEMPT"
_ATTEMPT = re.compile("[0-9a-f]{32}")
_MAX_BYTES = 64
_used: set[str] = set()
"""The attempts that this process has written under: a plan that brings one of them is a cached one."""


@dataclass(frozen=True, slots=True)
class StepTicket:
    """What the coordinator sends along with a plan."""

    step: int
    attempt: str


class AttemptPointer:
    """The small object of a step's folder that names the attempt in progress.

    Args:
        store: Where.
        step: The step.
    """

    def __init__(self, store: Store, step: int) -> None:
        self._store = store
        self._step = step
        self._key = f"{step_folder(step)}/{_NAME}"

    def put(self, attempt: str) -> None:
        """Name the attempt; one of an earlier save is replaced. Blocks."""
        self._store.compare_and_put(self._key, attempt.encode(), expected=self._read())

    def of(self, ticket: StepTicket) -> str:
        """Return the attempt that a rank writes under. Blocks where its plan was cached.

        Raises:
            SaveError: There is none.
        """
        if ticket.step == self._step and ticket.attempt not in _used:
            _used.add(ticket.attempt)
            return ticket.attempt
        text = self._read()
        if text is None or not _ATTEMPT.fullmatch(text.decode("ascii", "replace")):
            raise SaveError(
                f"{self._key} at {self._store.url} does not name the attempt of this save. Do all ranks write to one "
                "store, and is the plan cached by saves of the same planner?",
                key=self._key,
                stage="write",
            )
        return text.decode()

    def delete(self) -> None:
        """Remove it. Blocks; no error if it is not there."""
        self._store.delete(self._key)

    def _read(self) -> bytes | None:
        try:
            return self._store.read_all(self._key, limit_bytes=_MAX_BYTES)
        except ObjectNotFoundError:
            return None
