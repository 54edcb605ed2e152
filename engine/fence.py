"""Keep `optimizer.step()` from changing what a lazy save is still reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch.utils.hooks import RemovableHandle

from .job import SaveJob
from .sources import local_shard
from .table import StateTable

_Counts = list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class _Owned:
    """What the optimizers owned of a state.

    Attributes:
        extents_id: Which extents the state had.
        counts: What the optimizers held.
        extents: The extents that they owned.
        addresses_of: Takes their addresses from those of all extents.
        addresses: What it took.
        all_addresses: Where all extents of the state were.
    """

    extents_id: int
    counts: _Counts
    extents: frozenset[int]
    addresses_of: Callable[[Sequence[int]], object]
    addresses: object
    all_addresses: Sequence[int]

    def is_of(self, table: StateTable, counts: _Counts) -> bool:
        """Whether it still holds."""
        now = table.extent_addresses
        if self.extents_id != table.extents_id or self.counts != counts:
            return False
        return now is self.all_addresses or self.addresses_of(now) == self.addresses


class Fence:
    """The optimizers whose tensors may be read in place, and the wait before they step.

    Args:
        current_job: Returns the save in flight, if any.
    """

    def __init__(self, current_job: Callable[[], SaveJob | None]) -> None:
        self._current_job = current_job
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hooks: list[RemovableHandle] = []
        self._owned: _Owned | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Own this optimizer's tensors, and wait before each of its steps."""
        self._owned = None
        self._optimizers.append(optimizer)
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.wait()))

    def wait(self) -> None:
        """Block until the save in flight has read everything that it reads in place."""
        while (job := self._current_job()) is not None and not job.future.is_staged:
            start_s = time.perf_counter()
            job.future.wait_staged()
            job.fence_s += time.perf_counter() - start_s

    def owned_extents(self, table: StateTable) -> frozenset[int]:
        """Return the extents of a state that lie in storages of the optimizers' parameters and states.

        Remembers the answer while these extents lie where they did and the optimizers hold as many tensors as they did.
        """
        if not self._optimizers:
            return frozenset()
        counts = self._counts()
        if self._owned is None or not self._owned.is_of(table, counts):
            self._owned = self._look_up(table, counts)
        return self._owned.extents

    def detach(self) -> None:
        """Forget the optimizers and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._optimizers.clear()
        self._owned = None

    def _look_up(self, table: StateTable, counts: _Counts) -> _Owned:
        owned = owned_storages(self._optimizers)
        extents = [
            extent
            for extent, source in enumerate(table.sources)
            if not source.num_bytes or source.storage.data_ptr() in owned
        ]
        addresses_of: Callable[[Sequence[int]], object] = itemgetter(*extents) if extents else len
        now = table.extent_addresses
        return _Owned(table.extents_id, counts, frozenset(extents), addresses_of, addresses_of(now), now)

    def _counts(self) -> _Counts:
        """How many parameters have states, and how many parameters each group has, by optimizer."""
        return [(len(o.state), [len(group["params"]) for group in o.param_groups]) for o in self._optimizers]


def owned_storages(optimizers: Sequence[torch.optim.Optimizer]) -> frozenset[int]:
    """Return the addresses of the storages of all parameters and optimizer states; of a DTensor, of its local shard."""
    tensors = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    tensors += [
        value
        for o in optimizers
        for state in o.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return frozenset(local_shard(tensor).untyped_storage().data_ptr() for tensor in tensors)
