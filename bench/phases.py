"""Steps of a training loop in phases with and without a save in flight, and what they say of its cost."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import tidegate

HEAD: tuple[str, ...] = (
    "loop",
    "chunk",
    "chunks",
    "sink GB/s",
    "mode",
    "codec",
    "saves",
    "steps",
    "quiet ms",
    "saving ms",
    "p50",
    "p99",
    "stall",
    "fence",
)
HEAD += ("wall ms", "cost", "error", "ms a save")


@dataclass(slots=True)
class Phases:
    """Step times of phases without (quiet) and with a save in flight, in seconds, and the saves' reports.

    A saving phase is longer than its steps by the stall: the time in which the state is gathered and `save_async` runs.
    """

    quiet_s: list[list[float]] = field(default_factory=list)
    saving_s: list[list[float]] = field(default_factory=list)
    lasted_s: list[float] = field(default_factory=list)
    reports: list[tidegate.SaveReport] = field(default_factory=list)

    @property
    def costs(self) -> list[float]:
        """The cost of each saving phase against the quiet phases on both sides of it."""
        found = []
        for i, (steps, lasted_s) in enumerate(zip(self.saving_s, self.lasted_s, strict=True)):
            around = self.quiet_s[i] + (self.quiet_s[i + 1] if i + 1 < len(self.quiet_s) else [])
            found.append(lasted_s / len(steps) / statistics.mean(around) - 1)
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """What the steps cost with one loop, sink, mode and codec; times in seconds."""

    loop: str
    batch: int
    chunk_mib: int | None
    num_chunks: int
    bytes_per_s: float | None
    mode: str
    codec: str
    num_saves: int
    num_steps: int
    quiet_mean_s: float
    quiet_p50_s: float
    quiet_p99_s: float
    saving_mean_s: float
    saving_p50_s: float
    saving_p99_s: float
    stall_s: float
    fence_s: float
    wall_s: float
    cost: float
    cost_error: float | None
    costs: list[float]
    seconds_a_save: float
    snapshot: str
    notes: tuple[str, ...]

    @property
    def chunk(self) -> str:
        """How long a chunk was to be, for people."""
        return "default chunks" if self.chunk_mib is None else f"{self.chunk_mib} MiB"

    def cells(self) -> tuple[object, ...]:
        """For the table."""
        means = (self.quiet_mean_s, self.saving_mean_s, self.saving_p50_s, self.saving_p99_s)
        rest = (self.stall_s, self.fence_s, self.wall_s)
        rate = "no limit" if self.bytes_per_s is None else f"{self.bytes_per_s / 1e9:g}"
        counts = (self.num_saves, self.num_steps)
        milliseconds = [1e3 * value for value in means + rest]
        return (
            self.loop,
            self.chunk,
            self.num_chunks,
            rate,
            self.mode,
            self.codec,
            *counts,
            *milliseconds,
            self.cost,
            "" if self.cost_error is None else self.cost_error,
            1e3 * self.seconds_a_save,
        )


def summed_up(
    phases: Phases, loop: str, batch: int, bytes_per_s: float, mode: str, codec: str, chunk_mib: int | None
) -> Case:
    """Pool the phases of one case."""
    quiet = [value for phase in phases.quiet_s for value in phase]
    saving = [value for phase in phases.saving_s for value in phase]
    costs = phases.costs
    quiet_mean_s, saving_mean_s = statistics.mean(quiet), sum(phases.lasted_s) / len(saving)
    return Case(
        loop=loop,
        batch=batch,
        chunk_mib=chunk_mib,
        num_chunks=sum(total.num_frames for total in phases.reports[-1].by_codec.values()),
        bytes_per_s=bytes_per_s if math.isfinite(bytes_per_s) else None,
        mode=mode,
        codec=codec,
        num_saves=len(phases.reports),
        num_steps=len(saving),
        quiet_mean_s=quiet_mean_s,
        quiet_p50_s=statistics.median(quiet),
        quiet_p99_s=quantile(quiet, 0.99),
        saving_mean_s=saving_mean_s,
        saving_p50_s=statistics.median(saving),
        saving_p99_s=quantile(saving, 0.99),
        stall_s=statistics.median(r.stall_s for r in phases.reports),
        fence_s=statistics.median(r.fence_s for r in phases.reports),
        wall_s=statistics.median(r.wall_s for r in phases.reports),
        cost=saving_mean_s / quiet_mean_s - 1,
        cost_error=statistics.stdev(costs) / math.sqrt(len(costs)) if len(costs) > 1 else None,
        costs=costs,
        seconds_a_save=(sum(phases.lasted_s) - quiet_mean_s * len(saving)) / len(phases.reports),
        snapshot=phases.reports[-1].snapshot,
        notes=phases.reports[-1].notes,
    )


def quantile(values: list[float], share: float) -> float:
    """The value that `share` of all are not above."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
