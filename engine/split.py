"""Part the chunks of a save: those that are copied at the call, and those that are read where they lie.

That is the same from save to save as long as the state's plan is, and what the optimizers own. So it is remembered, in
numbers alone: the training thread would else go through all chunks and all tensors several times a call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .job import SaveJob
from .plan import Chunk, SavePlan
from .watch import Runs, runs_of


@dataclass(frozen=True, slots=True)
class Split:
    """How the chunks of a save are staged. Never changed.

    Attributes:
        copied: Chunks to copy at the call, in the order of staging.
        copied_on: Those of them that lie on CUDA devices, by device.
        copied_on_cpu: The others.
        live: Chunks to read in place, in the order of staging.
        live_devices: The device of each of these.
        live_on: Those of them that lie on CUDA devices, by device.
        host_copied: Tensors whose bytes the host copies at the call.
        read_in_place: Tensors whose bytes are read in place.
    """

    copied: tuple[Chunk, ...]
    copied_on: Mapping[torch.device, tuple[Chunk, ...]]
    copied_on_cpu: tuple[Chunk, ...]
    live: tuple[Chunk, ...]
    live_devices: tuple[torch.device, ...]
    live_on: Mapping[torch.device, tuple[Chunk, ...]]
    host_copied: Runs
    read_in_place: Runs


def split(job: SaveJob, owned_extents: Collection[int] | None, *, is_cuda_only: bool = False) -> Split:
    """Part the chunks of a job.

    Args:
        job: The save.
        owned_extents: What may be read in place; None: everything.
        is_cuda_only: Whether nothing on the CPU may be.
    """
    devices = job.table.extent_devices
    copied: list[Chunk] = []
    live: list[Chunk] = []
    for chunk in job.chunk_order:
        is_owned = owned_extents is None or all(extent in owned_extents for extent in chunk.extents)
        is_live = is_owned and not (is_cuda_only and devices[chunk.first_extent].type == "cpu")
        (live if is_live else copied).append(chunk)
    live.sort(key=lambda chunk: devices[chunk.first_extent].type != "cpu")  # behind a GPU's they would wait for room
    copied_on_cpu = tuple(chunk for chunk in copied if devices[chunk.first_extent].type == "cpu")
    return Split(
        copied=tuple(copied),
        copied_on=_on_cuda(copied, devices),
        copied_on_cpu=copied_on_cpu,
        live=tuple(live),
        live_devices=tuple(devices[chunk.first_extent] for chunk in live),
        live_on=_on_cuda(live, devices),
        host_copied=_viewing(copied_on_cpu, job.table.tensor_extent),
        read_in_place=_viewing(live, job.table.tensor_extent),
    )


def _on_cuda(chunks: Iterable[Chunk], devices: Sequence[torch.device]) -> dict[torch.device, tuple[Chunk, ...]]:
    found: dict[torch.device, list[Chunk]] = {}
    for chunk in chunks:
        device = devices[chunk.first_extent]
        if device.type == "cuda":
            found.setdefault(device, []).append(chunk)
    return {device: tuple(here) for device, here in found.items()}


def _viewing(chunks: Iterable[Chunk], tensor_extent: Sequence[int]) -> Runs:
    """Return the tensors that view an extent of one of the chunks."""
    extents = {extent for chunk in chunks for extent in chunk.extents}
    return runs_of(i for i, extent in enumerate(tensor_extent) if extent in extents)


@dataclass(frozen=True, slots=True)
class _Known:
    """A split, and what it was made of: kept, so that no other object can take the place of one that is compared.

    `tensor_extent` stands for all columns of tensors and extents but the addresses: tables share it as long as these
    are the same.
    """

    split: Split
    plan: SavePlan
    chunk_order: Sequence[Chunk]
    tensor_extent: Sequence[int]
    owned_extents: Collection[int]

    def is_of(self, job: SaveJob, owned_extents: Collection[int]) -> bool:
        return (
            self.plan is job.plan
            and self.chunk_order is job.chunk_order
            and self.tensor_extent is job.table.tensor_extent
            and self.owned_extents is owned_extents
        )


@dataclass(slots=True)
class Splitter:
    """Splits the states that are saved one after another. Used by the training thread alone.

    Args:
        is_cuda_only: As for `split`.
    """

    is_cuda_only: bool = False
    _copying: _Known | None = None
    _reading: _Known | None = None

    def all_copied(self, job: SaveJob) -> Split:
        """Split a job so that every chunk is copied."""
        if self._copying is None or not self._copying.is_of(job, _NONE):
            self._copying = self._look(job, _NONE)
        return self._copying.split

    def by_owner(self, job: SaveJob, owned_extents: Collection[int]) -> Split:
        """Split a job so that chunks all of whose extents are owned are read in place.

        Args:
            job: The save.
            owned_extents: Numbers of the extents. The same object as in the save before, where they are the same.
        """
        if self._reading is None or not self._reading.is_of(job, owned_extents):
            self._reading = self._look(job, owned_extents)
        return self._reading.split

    def _look(self, job: SaveJob, owned_extents: Collection[int]) -> _Known:
        found = split(job, owned_extents, is_cuda_only=self.is_cuda_only)
        return _Known(found, job.plan, job.chunk_order, job.table.tensor_extent, owned_extents)


_NONE: Collection[int] = frozenset()
