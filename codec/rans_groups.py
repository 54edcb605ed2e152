"""Which segments of a chunk the rans encoder gives one table: rules 1 and 4 of the writer in RANS.md.

Tables go to segments by what is in them, not by where they lie: layers of one kind are alike wherever they are. Whole
numbers only, so that every device finds the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .rans_tables import NUM_SYMBOLS

SEGMENTS_PER_TABLE = 32
MAX_TABLES = 64

GROUP_SEGMENTS = 8
"""Segments of a group, and of a thread block on a GPU: each block needs one table only."""

MAX_GROUPS = 512
"""A chunk that would have more has larger groups: a GPU compares each with each."""

KEYS_PER_SYMBOL = 4
"""How finely the mean symbols of groups are compared; finer ones tell groups apart that only chance does."""


def num_tables_of(num_segments: int) -> int:
    """Return how many tables a chunk of so many segments has."""
    return min(MAX_TABLES, -(-num_segments // SEGMENTS_PER_TABLE))


def segments_per_group(num_segments: int) -> int:
    """Return how many consecutive segments of such a chunk make a group; the last group may have fewer."""
    segments = GROUP_SEGMENTS
    while num_segments > segments * MAX_GROUPS:
        segments *= 2
    return segments


def tables_of_groups(counts: NDArray[np.int64], num_tables: int) -> NDArray[np.int64]:
    """Deal out tables: groups whose mean symbols are alike share one.

    Args:
        counts: int64[groups, 256], the histograms.
        num_tables: How many tables there are.

    Returns:
        int64[groups], the table of each; 0 for those in which nothing was counted.
    """
    totals = counts.sum(axis=1)
    counted = np.flatnonzero(totals)
    keys = (counts[counted] @ np.arange(NUM_SYMBOLS)) * KEYS_PER_SYMBOL // totals[counted]
    tables = np.zeros(len(counts), dtype=np.int64)
    tables[counted[np.argsort(keys, kind="stable")]] = np.arange(counted.size) * num_tables // max(counted.size, 1)
    return tables
