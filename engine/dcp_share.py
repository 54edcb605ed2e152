"""How the ranks of a `dcp.load` settle which of them reads what for its host: along with DCP's own plans.

every rank:   prepare_local_plan    plan.storage_data = what it needs, and on which host
coordinator:  prepare_global_plan   plan.storage_data = what each reads for its host, and takes
every rank:   read_data
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan

from .frame_plan import Frame, FrameNeed, FramePart, decide
from .frame_share import need_of
from .open_objects import FrameSource
from .shared_frames import SharedFrames


class PlannedShare:
    """What this rank of a `dcp.load` shares with the others of its host.

    Args:
        patience_s: How long it waits for what another rank reads; 0: share nothing.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._frames: tuple[Frame, ...] = ()
        self._part: FramePart | None = None
        self._shared: SharedFrames | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether there may be anybody to share with."""
        is_together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return is_together and self._patience_s > 0

    def tell(self, plan: LoadPlan, frames: Sequence[Frame]) -> LoadPlan:
        """Write into this rank's plan what it needs."""
        need = need_of(frames)
        self._frames = need.frames
        return dataclasses.replace(plan, storage_data=need)

    def heed(self, plan: LoadPlan) -> None:
        """Take from the plan what the coordinator has decided; nothing if a planner has dropped it."""
        self._part = plan.storage_data if isinstance(plan.storage_data, FramePart) else None

    def around(self, source: FrameSource, frames: Sequence[Frame]) -> FrameSource:
        """Return what the frames are read from. Begins to read what this rank reads for others."""
        if self._part is None:
            return source
        try:
            self._shared = SharedFrames(source, self._frames, self._part, self._patience_s)
        except OSError:
            return source
        return self._shared

    def finish(self) -> None:
        """End well: block until the others have what this rank has read for them, or are late or gone."""
        if self._shared is not None:
            self._shared.finish()

    def close(self) -> None:
        """Leave nothing in shared memory. May be called again."""
        if self._shared is not None:
            self._shared.close()


def shared_out(plans: list[LoadPlan]) -> list[LoadPlan]:
    """On the coordinator: write into each rank's plan what it reads for others, and takes from them."""
    needs = [plan.storage_data if isinstance(plan.storage_data, FrameNeed) else None for plan in plans]
    return [
        plan if need is None else dataclasses.replace(plan, storage_data=part)
        for plan, need, part in zip(plans, needs, decide(needs), strict=True)
    ]
