"""See from version counters that tensors were changed in place while their bytes were being read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from .sources import versions_of

Runs = tuple[range, ...]
"""Indices of tensors, as runs of neighbours: so most of a state are taken in few slices."""


def runs_of(indices: Iterable[int]) -> Runs:
    """Gather ascending indices into runs."""
    found: list[range] = []
    for i in indices:
        if found and found[-1].stop == i:
            found[-1] = range(found[-1].start, i + 1)
        else:
            found.append(range(i, i + 1))
    return tuple(found)


class VersionWatch:
    """The version counters of some tensors as they are now. Holds none of the tensors.

    Args:
        tensors: All tensors of a state.
        watched: Which counters to remember.
    """

    __slots__ = ("_versions", "_watched")

    def __init__(self, tensors: Sequence[torch.Tensor], watched: Runs) -> None:
        self._watched = watched
        self._versions = self._now(tensors)

    def first_changed(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Return the index of the first tensor whose counter is another; None if there is none.

        Args:
            tensors: The same as before.
        """
        now = self._now(tensors)
        if now == self._versions:
            return None
        rows = zip(chain.from_iterable(self._watched), self._versions, now, strict=True)
        return next(i for i, before, after in rows if before != after)

    def _now(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        found: list[int] = []
        for run in self._watched:
            found += versions_of(tensors[run.start : run.stop])
        return found
