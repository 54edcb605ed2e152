"""From a live state to a job: what the training thread does at each call, and remembers for the next one."""

from __future__ import annotations

from collections.abc import Mapping

from .collector import collector_at_rest
from .derived import DerivedChunks
from .derived_device import Comparisons
from .device_layout import LayoutCache
from .job import SaveJob
from .pairs import PairFinder
from .planned import PlanCache
from .resources import Resources
from .state import Describer
from .table import StateTable
from .types import JSON


class Preparation:
    """Describes states, plans them, and makes jobs of them. Used by the training thread alone.

    Args:
        resources: Threads, buffers and encoders of the engine, and its options.
        with_ranks: Whether what is described is this rank's part of what several save together; all of that is stored.
    """

    def __init__(self, resources: Resources, *, with_ranks: bool) -> None:
        derive = resources.options.derive
        self._resources = resources
        self._describer = Describer()
        self._pairs = PairFinder(False if with_ranks else True if derive is None else derive)
        self._plans = PlanCache(resources.sizes_for)
        self._layouts = LayoutCache()
        self._comparisons = Comparisons()

    def describe(self, state: object) -> StateTable:
        """Take a state apart. Raises UnsupportedStateError."""
        return self._describer.describe(state)

    def job_of(self, table: StateTable, step: int, metadata: Mapping[str, JSON]) -> SaveJob:
        """Plan a described state and make a job of it, to be staged. Waits for GPUs where the state is a new one.

        Raises:
            ConfigError: The user has named a pair of tensors that is none.
        """
        with collector_at_rest():
            planned = self._plans.of(table, self._pairs.of(table))
        derived = DerivedChunks(planned.candidates)
        self._pairs.watch(derived)
        job = SaveJob(
            step, table, planned.plan, metadata, self._resources.wake,
            layouts=self._layouts, chunk_order=planned.chunk_order, derived=derived, comparisons=self._comparisons,
        )  # fmt: skip
        self._resources.prepare(has_cuda=planned.has_cuda)
        self._resources.take_peak_host_bytes()
        return job

    def clear(self) -> None:
        """Free what GPUs hold of it."""
        self._layouts.clear()
        self._comparisons.clear()
