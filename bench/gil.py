"""Does a pure-Python loop keep its rate while a save is in flight, and does the save keep its speed beside it?

    python -m bench.gil [--tiny] [--seconds N] [--folder DIR]

The main thread, which holds the interpreter's lock all the time, counts: alone, and from the return of `save_async` to
the commit of save after save. Counting alone, counting beside saves, and saves beside an idle main thread take turns.

    rate  = counts a second beside saves / counts a second alone                to be at least 0.95
    speed = bytes a second of saves beside the loop / beside an idle thread     each handover of the lock can cost 5 ms

Saves go to a sink without a limit (the worst case: the pipeline never rests), to one of 5 GB/s, and to a folder. On a
CPU the encoder's threads also compete with the loop for cores: only with some to spare is the rate one of the lock.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import tidegate
from tidegate.snapshot import SnapshotMode
from tidegate.storage.base import Store
from tidegate.storage.local import LocalStore
from tidegate.storage.sink import SinkStore

from .counting import COUNTS_A_LOOK, count_for
from .plots import beside, grouped_bars
from .rig import TimeBudget, arguments, print_table, say, write_results
from .states import State, normal_state, num_bytes_of, tensors_of

BOUND = 0.95
SINKS = ("no limit", "5 GB/s", "folder")
"""Each with one codec: see `main`."""
DEFAULT_SECONDS = 75.0
TURN_S = (0.4, 1.0)
TINY_TURN_S = (0.05, 0.1)
HEAD = ("sink", "codec", "counts/s alone", "beside saves", "rate", "GB/s beside idle", "beside loop", "speed", "saves")


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of the three: counts a second, and raw bytes a second."""

    alone_per_s: float
    beside_per_s: float
    idle_bytes_per_s: float
    busy_bytes_per_s: float
    num_saves: int


@dataclass(frozen=True, slots=True)
class Case:
    """Medians over the rounds of one sink and codec; the ratios are medians of each round's own."""

    sink: str
    codec: str
    rate: float
    speed: float
    alone_per_s: float
    beside_per_s: float
    idle_bytes_per_s: float
    busy_bytes_per_s: float
    num_saves: int
    rounds: list[Round]

    def cells(self) -> tuple[object, ...]:
        """For the table."""
        speeds = (self.idle_bytes_per_s / 1e9, self.busy_bytes_per_s / 1e9, self.speed)
        return (self.sink, self.codec, self.alone_per_s, self.beside_per_s, self.rate, *speeds, self.num_saves)


class Saves:
    """Saves of one state, one after the other."""

    def __init__(self, store: Store, codec: str, state: State) -> None:
        mode: SnapshotMode = "device" if tensors_of(state)[0].is_cuda else "host"
        self._engine = tidegate.CheckpointEngine(store, codec=codec, snapshot=mode, keep_last=1)
        self._state = state
        self._step = 0

    def begin(self) -> tidegate.SaveFuture:
        """Begin the next one; the one before has ended."""
        self._engine.wait()
        self._step += 1
        return self._engine.save_async(self._state, step=self._step)

    def close(self) -> None:
        """Finish."""
        self._engine.close()


def count_beside(saves: Saves, seconds: float) -> tuple[float, float, int]:
    """Count while saves are in flight, for at least so long and one save.

    Returns:
        Counts a second between the return of `save_async` and the commit, raw bytes a second of the median save, and
        the number of saves.
    """
    count, counted_s = 0, 0.0
    speeds = []
    while counted_s < seconds:
        future = saves.begin()
        start_s = time.perf_counter()
        while not future.done():
            for _ in range(COUNTS_A_LOOK):
                count += 1
        counted_s += time.perf_counter() - start_s
        speeds.append(_bytes_per_s(future.result()))
    return count / counted_s, statistics.median(speeds), len(speeds)


def save_for(saves: Saves, seconds: float) -> float:
    """Save while this thread waits without the lock; return raw bytes a second of the median save."""
    speeds: list[float] = []
    end_s = time.perf_counter() + seconds
    while not speeds or time.perf_counter() < end_s:
        speeds.append(_bytes_per_s(saves.begin().result()))
    return statistics.median(speeds)


def _bytes_per_s(report: tidegate.SaveReport) -> float:
    return report.raw_bytes / (report.wall_s - report.stall_s)


def rounds_of(saves: Saves, num: int, turn_s: tuple[float, float], budget: TimeBudget) -> list[Round]:
    """Take turns, each as long as two saves or so, after two saves that warm up."""
    for _ in range(2):
        seconds = min(turn_s[1], max(turn_s[0], 2 * saves.begin().result().wall_s))
    found: list[Round] = []
    while len(found) < num and budget.allows(len(found), 3 * seconds):
        before_per_s = count_for(seconds / 2)
        beside_per_s, busy, num_saves = count_beside(saves, seconds)
        alone_per_s = (before_per_s + count_for(seconds / 2)) / 2  # the core's speed drifts from second to second
        found.append(Round(alone_per_s, beside_per_s, save_for(saves, seconds), busy, num_saves))
    return found


def case_of(sink: str, codec: str, rounds: list[Round]) -> Case:
    """Sum up the rounds."""
    return Case(
        sink=sink,
        codec=codec,
        rate=statistics.median(r.beside_per_s / r.alone_per_s for r in rounds),
        speed=statistics.median(r.busy_bytes_per_s / r.idle_bytes_per_s for r in rounds),
        alone_per_s=statistics.median(r.alone_per_s for r in rounds),
        beside_per_s=statistics.median(r.beside_per_s for r in rounds),
        idle_bytes_per_s=statistics.median(r.idle_bytes_per_s for r in rounds),
        busy_bytes_per_s=statistics.median(r.busy_bytes_per_s for r in rounds),
        num_saves=sum(r.num_saves for r in rounds),
        rounds=rounds,
    )


def open_sink(sink: str, folder: Path) -> Store:
    """Open a store by its name in SINKS."""
    if sink == "folder":
        return LocalStore(folder)
    return SinkStore(bytes_per_s=math.inf if sink == "no limit" else 5e9, name=sink)


def measure(state: State, codecs: Sequence[str], folder: Path, is_tiny: bool, budget: TimeBudget) -> Iterator[Case]:
    """Yield case after case. The folder, slower than the sinks, gets a quarter of the state."""
    num, turn_s = (1, TINY_TURN_S) if is_tiny else (7, TURN_S)
    pairs = list(zip(SINKS, codecs, strict=True))
    for i, (sink, codec) in enumerate(pairs):
        part = dict(list(state.items())[: len(state) // 4]) if sink == "folder" else state
        with closing(open_sink(sink, folder / codec)) as store, closing(Saves(store, codec, part)) as saves:
            yield case_of(sink, codec, rounds_of(saves, num, turn_s, budget.share(len(pairs) - i)))


def main() -> None:
    """Make a state, take turns, write the results after every case."""
    args = arguments(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codecs = ("ans", "ans", "auto") if device == "cuda" else ("zstd", "zstd", "auto")
    num_bytes = 8 << 20 if args.tiny else 4 << 30 if device == "cuda" else 1 << 29
    state = normal_state(num_bytes, 32, device)
    say(f"a state of {num_bytes_of(state) / 1e9:.2f} GB in {len(tensors_of(state))} tensors on {device}")
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for case in measure(state, codecs, Path(name), args.tiny, TimeBudget(args.seconds or DEFAULT_SECONDS)):
            cases.append(case)
            print_table(HEAD, [case.cells()])
            worst = min(cases, key=lambda c: c.rate)
            summary = {"bound": BOUND, "worst_rate": worst.rate, "sink": worst.sink, "codec": worst.codec}
            summary["worst_speed"] = min(c.speed for c in cases)
            found: dict[str, object] = {"device": device, "cores": os.cpu_count(), "summary": summary}
            found["cases"] = [asdict(c) for c in cases]
            path = write_results("gil-tiny" if args.tiny else "gil", found, checkpoints=Path(name))
    print_table(HEAD, [case.cells() for case in cases])
    groups = [f"{c.codec}\n{c.sink}" for c in cases]
    series = {"the loop's rate": [c.rate for c in cases], "the save's speed": [c.speed for c in cases]}
    title = "Do a Python loop and a save leave each other alone?"
    grouped_bars(beside(path), title, groups, series, unit="beside the other / alone", limits={f"{BOUND}": BOUND})
    print(f"{summary}\nwritten to {path}", flush=True)


if __name__ == "__main__":
    main()
