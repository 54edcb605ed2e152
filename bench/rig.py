"""What every benchmark shares: arguments, a time budget, the machine line, repeats, a table, and one JSON a run."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .machine import filesystem_of as filesystem_of
from .machine import machine

RESULTS = Path(__file__).parent / "results"
MIN_REPEATS = 3
HOLD_UP_CYCLES = 4_000_000  # about 2 ms of a GPU: longer than the host takes to queue what is measured
_BEGAN_S = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the repeats of one thing."""

    values_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle one."""
        return statistics.median(self.values_s)

    def json(self) -> dict[str, float | int]:
        """For the results file."""
        values = self.values_s
        return {"median_s": self.median_s, "min_s": min(values), "max_s": max(values), "n": len(values)}


@dataclass(slots=True)
class TimeBudget:
    """How long a bench may go on repeating itself. When it is used up, what was measured so far is what counts.

    Args:
        seconds: From now on; None: no limit.
    """

    seconds: float | None = None
    _began_s: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a limit, never negative."""
        if self.seconds is None:
            return float("inf")
        return max(0.0, self.seconds - (time.perf_counter() - self._began_s))

    def allows(self, num_done: int, last_s: float = 0.0) -> bool:
        """Whether one more repeat of about `last_s` is worth its time.

        Up to MIN_REPEATS the budget may be overrun by half; the first repeat is always done.
        """
        if num_done == 0 or self.seconds is None:
            return True
        if num_done < MIN_REPEATS:
            return last_s <= self.left_s + self.seconds / 2
        return last_s <= self.left_s

    def share(self, num_parts: int) -> TimeBudget:
        """Return the budget of the next of `num_parts` parts that are still to come, of equal length."""
        return TimeBudget(None if self.seconds is None else self.left_s / max(1, num_parts))


def arguments(question: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every bench takes: --tiny, --folder and --seconds.

    Args:
        question: The module's docstring.
    """
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="as small as can be: does it run?")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; default: a temporary folder")
    parser.add_argument("--seconds", type=float, help="stop repeating after about so long, and write what there is")
    return parser


def require_cuda() -> torch.device:
    """Return the CUDA device to measure on; without one, say so and end the process with status 2."""
    if not torch.cuda.is_available():
        print(f"this benchmark needs an NVIDIA GPU, and torch {torch.__version__} sees none", file=sys.stderr)
        raise SystemExit(2)
    return torch.device("cuda", torch.cuda.current_device())


def say(text: str) -> None:
    """Print a line of progress, with the seconds since the start, at once."""
    print(f"[{time.perf_counter() - _BEGAN_S:6.1f} s] {text}", flush=True)


def repeat(
    work: Callable[[], object],
    *,
    num: int = 5,
    warm_up: int = 1,
    before: Callable[[], object] | None = None,
    budget: TimeBudget | None = None,
) -> Times:
    """Time `work` several times by the host's clock.

    Args:
        work: What is timed. Where it queues GPU work, it must wait for it.
        num: How often, at most.
        warm_up: Untimed runs ahead.
        before: Runs ahead of each, untimed.
        budget: Ends the repeats early.
    """
    values: list[float] = []
    for i in range(warm_up + num):
        if budget is not None and i > warm_up and not budget.allows(len(values), values[-1]):
            break
        if before is not None:
            before()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        work()
        if i >= warm_up:
            values.append(time.perf_counter() - start_s)
    return Times(tuple(values))


def repeat_on_gpu(
    work: Callable[[], object],
    *,
    stream: torch.cuda.Stream | None = None,
    num: int = 5,
    warm_up: int = 1,
    budget: TimeBudget | None = None,
) -> Times:
    """Time what `work` queues on a CUDA stream, by events. The stream is held up first, so that launching is not timed.

    Args:
        work: Queues GPU work, all of it on `stream`, which is current meanwhile. Must not wait for the stream.
        stream: A stream of the current device; by default the current one.
        num: How often, at most.
        warm_up: Untimed runs ahead.
        budget: Ends the repeats early.
    """
    values: list[float] = []
    stream = stream or torch.cuda.current_stream()
    for i in range(warm_up + num):
        if budget is not None and i > warm_up and not budget.allows(len(values), values[-1]):
            break
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(HOLD_UP_CYCLES)
            start.record(stream)
            work()
            end.record(stream)
        end.synchronize()
        if i >= warm_up:
            values.append(start.elapsed_time(end) / 1e3)
    return Times(tuple(values))


def interleave(
    works: dict[str, Callable[[], object]], *, num: int = 5, warm_up: int = 1, budget: TimeBudget | None = None
) -> dict[str, Times]:
    """Time several things in turn, A B C A B C …, so that a machine whose speed drifts drifts for all alike."""
    values: dict[str, list[float]] = {name: [] for name in works}
    for i in range(warm_up + num):
        rounds = [sum(found) / len(found) for found in values.values() if found]
        if budget is not None and i > warm_up and not budget.allows(i - warm_up, sum(rounds)):
            break
        for name, work in works.items():
            start_s = time.perf_counter()
            work()
            if i >= warm_up:
                values[name].append(time.perf_counter() - start_s)
    return {name: Times(tuple(found)) for name, found in values.items()}


def write_results(
    name: str, results: dict[str, object], folder: Path | None = None, *, checkpoints: Path | None = None
) -> Path:
    """Write one run's JSON and return its path.

    Args:
        name: Of the file, without ".json".
        results: What was measured.
        folder: Where it goes; by default $OUT where that is set, else bench/results/.
        checkpoints: Where the checkpoints went, for the machine line.
    """
    folder = folder or Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(checkpoints), **results}, indent=1) + "\n")
    return path


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns."""
    cells = [list(head), *([f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)
