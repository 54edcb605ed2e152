"""The plan of the state that was saved last, used again as long as its names, shapes, dtypes and devices stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from .chunk_sizes import ChunkSizes
from .derived import Candidates, Pair, find_candidates
from .plan import Chunk, SavePlan, plan_save
from .table import StateTable

_LEAST_DERIVED_BYTES = 64 << 10
"""A run of extents that may be derived is not worth chunks of its own below this."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what follows from it and the state.

    Attributes:
        plan: The plan.
        chunk_order: Its chunks in the order in which they are staged and encoded.
        has_cuda: Whether some of them lie on CUDA devices.
        candidates: Those that may be derived.
    """

    plan: SavePlan
    chunk_order: tuple[Chunk, ...]
    has_cuda: bool
    candidates: Candidates = field(default_factory=Candidates)


class PlanCache:
    """Plans states; remembers the last. Used by the training thread alone.

    Args:
        sizes_for: Tells the longest chunks of a state; asked at each call, as they may become shorter.
    """

    def __init__(self, sizes_for: Callable[[StateTable], ChunkSizes]) -> None:
        self._sizes_for = sizes_for
        self._key: tuple[int, bytes] | None = None
        self._pairs: Mapping[int, Pair] = {}
        self._planned: Planned | None = None

    def of(self, table: StateTable, pairs: Mapping[int, Pair]) -> Planned:
        """Plan a state.

        Args:
            table: The state.
            pairs: Which of its extents may follow from others.
        """
        sizes = self._sizes_for(table)
        is_same = self._pairs is pairs and self._key is not None and self._is_same(table, self._key)
        if self._planned is None or not is_same or self._planned.plan.sizes != sizes:
            self._planned = plan_table(table, sizes, pairs)
        self._key, self._pairs = (table.extents_id, table.signature), pairs
        return self._planned

    @staticmethod
    def _is_same(table: StateTable, key: tuple[int, bytes]) -> bool:
        return table.extents_id == key[0] or table.signature == key[1]


def plan_table(table: StateTable, sizes: ChunkSizes, pairs: Mapping[int, Pair] | None = None) -> Planned:
    """Plan a state, and mix its chunks of a device so that those of every word type and role come all along.

    Codecs differ in speed from role to role. If all chunks of a slow one came last, the store would idle then.

    Args:
        table: The state.
        sizes: The longest chunks.
        pairs: Which of its extents may follow from others: they get chunks of their own.
    """
    devices = [str(device) for device in table.extent_devices]
    pairs = pairs or {}
    kept = _in_long_runs(table, pairs)
    roles = _roles_apart(table.extent_roles, kept) if kept else table.extent_roles
    plan = plan_save(table.extent_bytes, table.extent_words, devices, roles, sizes)
    groups = [(devices[c.first_extent], c.word, table.extent_roles[c.first_extent]) for c in plan.chunks]
    has_cuda = any(device.type == "cuda" for device in table.extent_devices)
    candidates = find_candidates(plan.chunks, table.extent_bytes, kept)
    order = _sources_first(_mixed(plan.chunks, groups), candidates)
    return Planned(plan, tuple(order), has_cuda, candidates)


def _in_long_runs(table: StateTable, pairs: Mapping[int, Pair]) -> dict[int, Pair]:
    """Leave out the pairs of short runs of extents, which would be cut out of chunks that they can share."""
    kept: dict[int, Pair] = {}
    # Numbers less their ranks are alike in a run of neighbours.
    ranked = enumerate(sorted(pairs))
    for _, run in groupby(ranked, key=lambda item: (item[1] - item[0], pairs[item[1]].rule.name)):
        extents = [extent for _, extent in run]
        if sum(table.extent_bytes[extent] for extent in extents) >= _LEAST_DERIVED_BYTES:
            kept |= {extent: pairs[extent] for extent in extents}
    return kept


def _roles_apart(roles: Sequence[str], pairs: Mapping[int, Pair]) -> list[str]:
    """Name the roles so that no chunk holds extents of a pair's target and others."""
    return [f"{role} {pairs[i].rule.name}" if i in pairs else role for i, role in enumerate(roles)]


def _sources_first(chunks: Sequence[Chunk], candidates: Candidates) -> list[Chunk]:
    """Put the chunks that may be derived behind the last of those they may follow from."""
    if not candidates.derivations:
        return list(chunks)
    places = {chunk.index: place for place, chunk in enumerate(chunks)}
    last = {target: max(places[link.source] for link in links) for target, links in candidates.by_target.items()}
    return sorted(chunks, key=lambda c: (max(places[c.index], last.get(c.index, 0)), c.index in last, places[c.index]))


def _mixed(chunks: Sequence[Chunk], groups: Sequence[tuple[str, int, str]]) -> list[Chunk]:
    sizes = Counter(groups)
    seen: Counter[tuple[str, int, str]] = Counter()
    places = []
    for chunk, group in zip(chunks, groups, strict=True):
        place = (seen[group] + 0.5) / sizes[group]
        seen[group] += 1
        # The CPU's chunks stay behind and in their order: nothing is gained by mixing them.
        places.append((group[0] == "cpu", 0.0 if group[0] == "cpu" else place, chunk.index))
    return [chunks[index] for *_, index in sorted(places)]
