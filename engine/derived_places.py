"""Where a load puts chunks where some of the state is derived: each source also gives the bytes of what follows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .derived import Derivation
from .load_plan import ReadItem
from .locate import MapLocation
from .places import Places
from .plan import Chunk
from .rules import Rule, follow
from .sources import scatter
from .table import StateTable

_SMALL_BYTES = 32 << 10
_BATCH_STEPS = 256


@dataclass(frozen=True, slots=True)
class _Step:
    """Bytes [start, end) of an extent, which follow from those of a source by a rule."""

    rule: Rule
    extent: int
    start: int
    end: int


class DerivingPlaces(Places):
    """As Places. A source that is not loaded itself is never kept: what follows from it is made of each of its chunks.

    On a GPU so is what follows from sources that share a chunk, unless all are small, while others are read. The rest
    is made in the end.

    Args:
        table: As for Places, and so are the next three.
        wanted: There.
        targets: There.
        map_location: There.
        chunks: The chunks of the checkpoint.
        derived: Those of them that have no frame.
    """

    def __init__(
        self,
        table: StateTable,
        wanted: Sequence[int],
        targets: Sequence[torch.Tensor | None],
        map_location: MapLocation,
        chunks: Sequence[Chunk],
        derived: Sequence[Derivation],
    ) -> None:
        super().__init__(table, wanted, targets, map_location)
        self._steps: dict[int, list[_Step]] = {}
        for derivation in derived:
            for source, step in _steps(table, chunks[derivation.chunk], derivation):
                if self._devices[step.extent] is not None:
                    self._steps.setdefault(source, []).append(step)
        self._passing = {source for source in self._steps if self._devices[source] is None}
        self._early: set[int] = set()
        is_read = (device is not None or i in self._passing for i, device in enumerate(self._devices))
        self._read_starts = list(itertools.accumulate(is_read, initial=0))

    def needed(self, items: Iterable[ReadItem]) -> list[ReadItem]:
        """Return the frames that hold a byte of a wanted tensor's extent, or of a source of one."""
        starts = self._read_starts
        return [item for item in items if starts[item.chunk.end_extent] > starts[item.chunk.first_extent]]

    def device(self, chunk: Chunk) -> torch.device:
        """Return the device of the first extent that is wanted, or wanted for what follows from it."""
        for extent in chunk.extents:
            at = self._steps[extent][0].extent if extent in self._passing else extent
            device = self._devices[at]
            if device is not None:
                return device
        return super().device(chunk)

    def prepare(self, chunk: Chunk) -> None:
        """As there; also the extents that will be made from this chunk."""
        super().prepare(chunk)
        early = [extent for extent in chunk.extents if not chunk.is_piece and self._may_be_made_early(extent)]
        if any(not self._is_small_and_new(extent, self._steps[extent][0]) for extent in early):
            for extent in early:
                self._room_for(self._steps[extent][0])
            self._early.update(early)
        for extent in chunk.extents:
            if extent in self._passing:
                for step in self._steps[extent]:
                    self._room_for(step)

    def place(self, chunk: Chunk, packed: torch.Tensor) -> None:
        """As there; and make what follows from sources that are not kept, or that are here as a whole."""
        if not (chunk.is_piece and chunk.first_extent in self._passing):
            super().place(chunk, packed)
        at = 0
        run: list[_Step] = []
        for extent in chunk.extents:
            start, num_bytes = chunk.span(extent, self._table.extent_bytes)
            if extent in self._passing:
                for step in self._steps[extent]:
                    self._make_step(step, packed[at : at + num_bytes], start)
            whole = self._steps[extent][0] if extent in self._early else None
            if run and (whole is None or not self._goes_with(whole, run[0])):
                self._make_run(run, packed[:at])
                run = []
            if whole is not None:
                run.append(whole)
            at += num_bytes
        if run:
            self._make_run(run, packed)

    def finish(self) -> list[torch.Tensor | None]:
        """Make what follows from sources that are loaded too; then as there."""
        batches: dict[tuple[Rule, torch.device | None], list[tuple[int, _Step]]] = {}
        for source, steps in self._steps.items():
            if source in self._passing or source in self._early:
                continue
            for step in steps:
                if self._is_small_and_new(source, step):
                    batches.setdefault((step.rule, self._devices[step.extent]), []).append((source, step))
                else:
                    self._room_for(step)
                    self._make_step(step, self._made(source), 0)
        for batch in batches.values():
            for first in range(0, len(batch), _BATCH_STEPS):
                self._make_together(batch[first : first + _BATCH_STEPS])
        return super().finish()

    def _may_be_made_early(self, source: int) -> bool:
        """Whether an extent follows as a whole from this source, which is kept, on its GPU.

        On the CPU all cores read and decode until the end.
        """
        steps, device = self._steps.get(source, ()), self._devices[source]
        if len(steps) != 1 or device is None or device.type != "cuda":
            return False
        step, sizes = steps[0], self._table.extent_bytes
        is_whole = step.start == 0 and step.end == sizes[step.extent] == sizes[source] // step.rule.ratio
        return is_whole and device == self._devices[step.extent]

    def _goes_with(self, step: _Step, other: _Step) -> bool:
        return step.rule is other.rule and self._devices[step.extent] == self._devices[other.extent]

    def _make_run(self, run: Sequence[_Step], sources: torch.Tensor) -> None:
        """Make whole extents of sources that lie side by side, the last of them at the end of these bytes."""
        rule, sizes = run[0].rule, [step.end for step in run]
        sources = sources[sources.numel() - sum(sizes) * rule.ratio :]
        outs = [memory for step in run if (memory := self._memory[step.extent]) is not None]
        if sources.device != outs[0].device:
            sources = sources.to(outs[0].device)
        if len(outs) == 1:
            follow(rule, sources, outs[0])
            return
        made = torch.empty(sum(sizes), dtype=torch.uint8, device=sources.device)
        follow(rule, sources, made)
        torch.split_with_sizes_copy(made, sizes, out=outs)

    def _is_small_and_new(self, source: int, step: _Step) -> bool:
        """Whether a step makes all of a small extent that has no memory yet, on the device of its source."""
        num_bytes, devices = self._table.extent_bytes[step.extent], self._devices
        is_alone = step.end - step.start == num_bytes <= _SMALL_BYTES and self._found(step.extent) is None
        return is_alone and devices[source] == devices[step.extent]

    def _make_together(self, batch: Sequence[tuple[int, _Step]]) -> None:
        """Make small extents in a few calls for all of them."""
        rule = batch[0][1].rule
        sources = torch.cat([self._made(source) for source, _ in batch])
        made = torch.empty(sources.numel() // rule.ratio, dtype=torch.uint8, device=sources.device)
        follow(rule, sources, made)
        pieces = scatter(made, [step.end - step.start for _, step in batch])
        for (_, step), piece in zip(batch, pieces, strict=True):
            self._memory[step.extent] = piece

    def _room_for(self, step: _Step) -> None:
        device = self._devices[step.extent]
        if self._found(step.extent) is None and device is not None:
            self._memory[step.extent] = self._empty(step.extent, device)

    def _make_step(self, step: _Step, source: torch.Tensor, source_at: int) -> None:
        """Make what follows from bytes of a source that begin at `source_at` of it."""
        ratio = step.rule.ratio
        start = max(step.start, source_at // ratio)
        end = min(step.end, (source_at + source.numel()) // ratio)
        memory = self._memory[step.extent]
        if start >= end or memory is None:
            return
        here, there = source[start * ratio - source_at : end * ratio - source_at], memory[start:end]
        if here.device == there.device:
            follow(step.rule, here, there)
        else:
            made = torch.empty(end - start, dtype=torch.uint8, device=here.device)
            follow(step.rule, here, made)
            there.copy_(made)


def _steps(table: StateTable, chunk: Chunk, derivation: Derivation) -> Iterator[tuple[int, _Step]]:
    for extent, source in enumerate(derivation.sources, chunk.first_extent):
        start, num_bytes = chunk.span(extent, table.extent_bytes)
        yield source, _Step(derivation.rule, extent, start, start + num_bytes)
