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
_TEXT = re.compile(r"([0-9a-f]{32}) (\d{1,9}) ([!-~]*)")
_MAX_BYTES = 1024
_used: set[str] = set()
"""The attempts that this process has written under: a plan that brings one of them is a cached one."""


@dataclass(frozen=True, slots=True)
class StepTicket:
    """What the coordinator sends along with a plan.

    Attributes:
        step: The step.
        attempt: The attempt.
        address: Where the ranks meet, see `dcp_watch.RankWatch`; "" for one rank.
        num_ranks: How many there are.
    """

    step: int
    attempt: str
    address: str = ""
    num_ranks: int = 1


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

    def put(self, ticket: StepTicket) -> None:
        """Name the attempt; one of an earlier save is replaced. Blocks."""
        text = f"{ticket.attempt} {ticket.num_ranks} {ticket.address}"
        self._store.compare_and_put(self._key, text.encode(), expected=self._read())

    def of(self, ticket: StepTicket) -> StepTicket:
        """Return the ticket of the attempt that a rank writes under. Blocks where its plan was cached.

        Raises:
            SaveError: There is none.
        """
        if ticket.step == self._step and ticket.attempt not in _used:
            _used.add(ticket.attempt)
            return ticket
        text = self._read()
        found = None if text is None else _TEXT.fullmatch(text.decode("ascii", "replace"))
        if found is None:
            raise SaveError(
                f"{self._key} at {self._store.url} does not name the attempt of this save. Do all ranks write to one "
                "store, and is the plan cached by saves of the same planner?",
                key=self._key,
                stage="write",
            )
        return StepTicket(self._step, found[1], found[3], int(found[2]))

    def delete(self) -> None:
        """Remove it. Blocks; no error if it is not there."""
        self._store.delete(self._key)

    def _read(self) -> bytes | None:
        try:
            return self._store.read_all(self._key, limit_bytes=_MAX_BYTES)
        except ObjectNotFoundError:
            return None
