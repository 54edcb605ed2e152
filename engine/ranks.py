"""The ranks of a CheckpointEngine: what this one has, what it writes, and one commit for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from tidegate.storage.base import Store

from .council import Council, open_council
from .errors import RankFailedError
from .job import SaveJob
from .load_round import LoadRound
from .local_part import LocalPart, PartFinder
from .locate import MapLocation
from .options import check_seconds
from .parts import PartPaths
from .plan_round import PlanRound
from .shard_plan import Share
from .sources import unchanged_since

_HANDSHAKE = timedelta(seconds=300)
_LEAST_GRACE_S = 1.0
_GRACE_FRACTION = 0.1


@dataclass(slots=True)
class RankSave:
    """One save of this rank.

    Attributes:
        topic: What the ranks call it.
        step: The step.
        local: What this rank has.
        deadline_s: By when all ranks must have ended, by `time.monotonic`.
        share: What of it is staged and written; None until it is agreed on.
        attempt: The attempt; "" until it is agreed on.
        overwrite: Whether the step may be replaced.
        check_unchanged: Raises TornSnapshotError if a DTensor of the state has been changed in place since it was
            planned.
    """

    topic: str
    step: int
    deadline_s: float
    overwrite: bool = False
    local: LocalPart | None = None
    share: Share | None = None
    attempt: str = ""
    check_unchanged: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Agreed:
    part: object
    share: Share


class Ranks:
    """This rank among those of its engine.

    Args:
        group: The ranks. It is used at construction only, to make a private group of gloo for the handshake.
        deadline_s: How long a save may take on all ranks together.
        silence_s: A rank that shows no sign of life for so long has failed.

    Raises:
        ConfigError: An argument is wrong.
    """

    def __init__(self, group: dist.ProcessGroup, *, deadline_s: float, silence_s: float) -> None:
        check_seconds("rank_deadline_s", deadline_s)
        check_seconds("rank_silence_s", silence_s)
        self.deadline_s = deadline_s
        self.council = _connect(group, silence_s)
        self.lineage = ""
        self.rounds = PlanRound(self.council)
        self._finder = PartFinder()
        self._agreed: _Agreed | None = None
        self._tries: dict[str, int] = {}

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank commits."""
        return self.council.is_coordinator

    def grace_s(self) -> float:
        """How much longer a rank waits for the coordinator's word than the coordinator for the ranks'."""
        return max(_LEAST_GRACE_S, self.deadline_s * _GRACE_FRACTION)

    def begin(self, step: int, overwrite: bool) -> RankSave:
        """Begin a save. From here on the other ranks wait for what becomes of it."""
        return RankSave(self._topic(f"save of step {step}"), step, time.monotonic() + self.deadline_s, overwrite)

    def plan(self, save: RankSave, state: object) -> dict[str, object]:
        """Find what this rank writes of a state: by name in its object.

        Blocks, for all ranks, where the state has another structure than the one before.

        Raises:
            UnsupportedStateError: Something cannot be saved.
            RankFailedError: The ranks do not agree.
        """
        found = self._finder.find(state)
        save.check_unchanged = unchanged_since(found.wrappers)
        save.local = found.local
        agreed = self._agreed
        if agreed is not None and agreed.part == save.local.part:
            save.share = agreed.share
        else:
            self._agreed = None
            self.agree(save)
        return found.items(save.share)

    def equip(self, job: SaveJob, save: RankSave) -> None:
        """Make a job one of several ranks'."""
        job.rank_save = save
        job.check_unchanged, save.check_unchanged = save.check_unchanged, lambda: None  # the job forgets it in time
        job.future.limit(save.deadline_s + 2 * self.grace_s())

    def agree(self, save: RankSave) -> None:
        """Settle with the other ranks who writes what, if that is not settled. Blocks.

        Raises:
            RankFailedError: They do not agree, or one has failed.
        """
        if save.attempt or save.local is None:
            return
        try:
            share, save.attempt = self.rounds.run(
                f"{save.topic}/plan", save.step, self.lineage, save.local, save.share,
                save.deadline_s, save.deadline_s + self.grace_s(),
            )  # fmt: skip
        except BaseException:
            self._agreed = None
            raise
        save.share = share
        self._agreed = _Agreed(save.local.part, share)

    def fail_plan(self, save: RankSave, failure: BaseException) -> None:
        """Tell the others that this rank has failed before it had agreed. Does not block for them."""
        self._agreed = None
        if save.attempt or isinstance(failure, RankFailedError):
            return
        self.rounds.fail(f"{save.topic}/plan", failure, save.deadline_s)

    def forget(self) -> None:
        """Agree anew at the next save."""
        self._agreed = None

    def close(self) -> None:
        """End the pulse."""
        self.council.close()

    def _topic(self, what: str) -> str:
        self._tries[what] = number = self._tries.get(what, 0) + 1
        if len(self._tries) > 1000:
            self._tries = {what: number}
        return what if number == 1 else f"{what}, try {number}"

    def load(
        self,
        store: Store,
        step: int | Literal["latest"],
        *,
        map_location: MapLocation,
        into: object | None,
        part: PartPaths,
    ) -> object:
        """Load one checkpoint on all ranks, or on none; see `CheckpointEngine.load`. Blocks for all ranks."""
        loading = LoadRound(self.council, self._topic(f"load of step {step}"), self.deadline_s, self.grace_s())
        state, attempt = loading.run(store, step, map_location=map_location, into=into, part=part)
        self.lineage = attempt
        return state


def _connect(group: dist.ProcessGroup, silence_s: float) -> Council:
    ranks: Sequence[int] = dist.get_process_group_ranks(group)
    is_all = len(ranks) == dist.get_world_size()
    private = dist.new_group(list(ranks), timeout=_HANDSHAKE, backend="gloo", use_local_synchronization=not is_all)
    try:
        return open_council(private, silence_s=silence_s)
    finally:
        dist.destroy_process_group(private)
