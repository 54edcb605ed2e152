"""The plan of the state that was saved last, used again as long as its names, shapes, dtypes and devices stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Chunk, SavePlan, plan_save
from .table import StateTable


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, the order in which its chunks are staged and encoded, and whether some of them lie on CUDA devices."""

    plan: SavePlan
    chunk_order: tuple[Chunk, ...]
    has_cuda: bool


class PlanCache:
    """Plans states; remembers the last. Used by the training thread alone.

    Args:
        chunk_bytes: The longest chunk; a multiple of 4,096.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._key: tuple[int, bytes] | None = None
        self._planned: Planned | None = None

    def of(self, table: StateTable) -> Planned:
        """Plan a state."""
        if self._planned is None or self._key is None or not self._is_same(table, self._key):
            self._planned = plan_table(table, self._chunk_bytes)
        self._key = (table.extents_id, table.signature)
        return self._planned

    @staticmethod
    def _is_same(table: StateTable, key: tuple[int, bytes]) -> bool:
        return table.extents_id == key[0] or table.signature == key[1]


def plan_table(table: StateTable, chunk_bytes: int) -> Planned:
    """Plan a state, and mix its chunks of a device so that those of every word type and role come all along.

    Codecs differ in speed from role to role. If all chunks of a slow one came last, the store would idle then.
    """
    devices = [str(device) for device in table.extent_devices]
    plan = plan_save(table.extent_bytes, table.extent_words, devices, table.extent_roles, chunk_bytes)
    groups = [(devices[c.first_extent], c.word, table.extent_roles[c.first_extent]) for c in plan.chunks]
    has_cuda = any(device.type == "cuda" for device in table.extent_devices)
    return Planned(plan, tuple(_mixed(plan.chunks, groups)), has_cuda)


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
