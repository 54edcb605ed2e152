"""Turns of a counting loop beside saves and alone, and what they say together; for gil.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from .counting import Counted

HEAD: tuple[str, ...] = ("sink", "codec", "chunks", "rounds", "counts/s alone", "beside saves", "rate", "quartiles")
HEAD += ("lock", "core", "GB/s beside idle", "beside loop", "speed")


@dataclass(frozen=True, slots=True)
class Round:
    """A turn beside saves, and those alone on both sides of it: counts a second, and shares of the loop's time."""

    alone_per_s: float
    beside_per_s: float
    rate: float
    lock: float
    core: float
    busy_bytes_per_s: float
    num_saves: int


@dataclass(slots=True)
class Turns:
    """All rounds of one sink and codec, bytes a second of the saves beside an idle thread, and chunks of a save."""

    rounds: list[Round] = field(default_factory=list)
    idle_bytes_per_s: list[float] = field(default_factory=list)
    num_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """Medians over the rounds of one sink and codec, and the quartiles of what is judged."""

    sink: str
    codec: str
    num_chunks: int
    rate: float
    rate_quartiles: tuple[float, float]
    lock: float
    lock_quartiles: tuple[float, float]
    core: float
    speed: float
    alone_per_s: float
    beside_per_s: float
    idle_bytes_per_s: float
    busy_bytes_per_s: float
    num_saves: int
    rounds: list[Round]

    def cells(self) -> tuple[object, ...]:
        """For the table."""
        spread = "–".join(f"{value:.3f}" for value in self.rate_quartiles)
        counts = (self.num_chunks, len(self.rounds), self.alone_per_s, self.beside_per_s)
        speeds = (self.idle_bytes_per_s / 1e9, self.busy_bytes_per_s / 1e9, self.speed)
        return (self.sink, self.codec, *counts, self.rate, spread, self.lock, self.core, *speeds)


def round_of(before: Counted, counted: Counted, after: Counted, speeds: Sequence[float]) -> Round:
    """Compare what was counted beside saves with what was counted alone before and after."""
    alone_per_s = (before.per_s + after.per_s) / 2
    return Round(
        alone_per_s=alone_per_s,
        beside_per_s=counted.per_s,
        rate=counted.per_s / alone_per_s,
        lock=counted.lock - (before + after).lock,
        core=counted.core,
        busy_bytes_per_s=statistics.median(speeds),
        num_saves=len(speeds),
    )


def case_of(sink: str, codec: str, turns: Turns) -> Case:
    """Sum up the rounds."""
    rounds = turns.rounds
    names = ("rate", "lock", "core", "alone_per_s", "beside_per_s", "busy_bytes_per_s")
    medians = {name: statistics.median(getattr(each, name) for each in rounds) for name in names}
    idle_bytes_per_s = statistics.median(turns.idle_bytes_per_s)
    return Case(
        sink=sink,
        codec=codec,
        num_chunks=turns.num_chunks,
        rate_quartiles=quartiles([each.rate for each in rounds]),
        lock_quartiles=quartiles([each.lock for each in rounds]),
        speed=medians["busy_bytes_per_s"] / idle_bytes_per_s,
        idle_bytes_per_s=idle_bytes_per_s,
        num_saves=sum(each.num_saves for each in rounds),
        rounds=rounds,
        **medians,
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return first, third
