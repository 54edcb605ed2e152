"""Does a pure-Python loop keep its rate while a save is in flight, and does the save keep its speed beside it?

    python -m bench.gil [--tiny] [--codecs rans auto] [--chunk-mib N] [--seconds N] [--folder DIR]

The main thread, which holds the interpreter's lock all the time, counts: alone, then from the return of `save_async` to
the commit, alone, beside the next save, and so on. Each turn beside a save is compared with the turns on both sides of
it, for the core's clock drifts. Some saves run beside an idle main thread.

    rate  = counts a second beside a save / counts a second alone               to be at least 0.95
    lock  = share of time that the loop neither ran nor waited for a core,      to be at most 0.05
            beside a save less alone: no clock enters it (counting.py)
    speed = bytes a second of saves beside the loop / beside an idle thread     each handover of the lock can cost 5 ms

Rate and lock are medians over the turns, speed is the ratio of two medians. Saves go to a sink without a limit (the
worst case: the pipeline never rests), to one of 5 GB/s, and, with `auto`, to a folder. On a CPU the encoder's threads
also compete with the loop for cores: only with some to spare is the rate one of the lock.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch

import tidegate
from tidegate.snapshot import SnapshotMode
from tidegate.storage.base import Store
from tidegate.storage.local import LocalStore
from tidegate.storage.sink import SinkStore

from .counting import Counted, count_for, count_until
from .plots import beside, grouped_bars
from .rig import TimeBudget, arguments, print_table, say, write_results
from .states import State, normal_state, num_bytes_of, tensors_of
from .turns import HEAD, Case, Turns, case_of, round_of

BOUND = 0.95
LOCK_BOUND = 0.05
SINKS = ("no limit", "5 GB/s", "folder")
FOLDER_CODEC = "auto"
DEFAULT_SECONDS = 85.0
NUM_ROUNDS, TINY_ROUNDS = 15, 2
ROUNDS_AN_IDLE_SAVE = 5
ALONE_S, LEAST_BESIDE_S = 0.2, 0.2


class Saves:
    """Saves of one state, one after the other."""

    def __init__(self, store: Store, codec: str, state: State, chunk_bytes: int | None) -> None:
        mode: SnapshotMode = "device" if tensors_of(state)[0].is_cuda else "host"
        self._engine = tidegate.CheckpointEngine(
            store, codec=codec, snapshot=mode, chunk_bytes=chunk_bytes, keep_last=1
        )
        self._state = state
        self._step = 0

    def begin(self) -> tidegate.SaveFuture:
        """Begin the next one; the one before has ended."""
        self._engine.wait()
        self._step += 1
        return self._engine.save_async(self._state, step=self._step)

    def beside_idle(self) -> tidegate.SaveReport:
        """Save while this thread waits without the lock."""
        return self.begin().result()

    def close(self) -> None:
        """Finish."""
        self._engine.close()


def count_beside(saves: Saves, seconds: float) -> tuple[Counted, list[float]]:
    """Count while saves are in flight, for at least so long and one save.

    Returns:
        What was counted between the return of `save_async` and the commit, and raw bytes a second of each save.
    """
    counted = Counted()
    speeds = []
    while counted.wall_s < seconds:
        future = saves.begin()
        counted += count_until(future.done)
        speeds.append(_bytes_per_s(future.result()))
    return counted, speeds


def _bytes_per_s(report: tidegate.SaveReport) -> float:
    return report.raw_bytes / (report.wall_s - report.stall_s)


def take_turns(saves: Saves, num: int, budget: TimeBudget) -> Turns:
    """Take turns, alone, beside, alone, …, after two saves that warm up."""
    turns = Turns()
    for _ in range(2):
        report = saves.beside_idle()
    turns.num_chunks = sum(total.num_frames for total in report.by_codec.values())
    before, round_s = count_for(ALONE_S), ALONE_S + max(report.wall_s, LEAST_BESIDE_S)
    while len(turns.rounds) < num and budget.allows(len(turns.rounds), round_s):
        if len(turns.rounds) % ROUNDS_AN_IDLE_SAVE == 0:
            turns.idle_bytes_per_s.append(_bytes_per_s(saves.beside_idle()))
            before = count_for(ALONE_S)
        counted, speeds = count_beside(saves, LEAST_BESIDE_S)
        after = count_for(ALONE_S)
        turns.rounds.append(round_of(before, counted, after, speeds))
        before = after
    return turns


def open_sink(sink: str, folder: Path) -> Store:
    """Open a store by its name in SINKS."""
    if sink == "folder":
        return LocalStore(folder)
    return SinkStore(bytes_per_s=math.inf if sink == "no limit" else 5e9, name=sink)


def measure(
    state: State, codecs: Sequence[str], chunk_bytes: int | None, folder: Path, num: int, budget: TimeBudget
) -> Iterator[Case]:
    """Yield case after case. The folder, slower than the sinks, gets a quarter of the state."""
    pairs = [(sink, codec) for sink in SINKS[:2] for codec in codecs] + [(SINKS[2], FOLDER_CODEC)]
    for i, (sink, codec) in enumerate(pairs):
        part = dict(list(state.items())[: len(state) // 4]) if sink == "folder" else state
        with (
            closing(open_sink(sink, folder / codec)) as store,
            closing(Saves(store, codec, part, chunk_bytes)) as saves,
        ):
            yield case_of(sink, codec, take_turns(saves, num, budget.share(len(pairs) - i)))


def summed_up(cases: Sequence[Case]) -> dict[str, object]:
    """The worst of all, and what it was to be."""
    worst = min(cases, key=lambda case: case.rate)
    return {
        "bound": BOUND,
        "worst_rate": worst.rate,
        "sink": worst.sink,
        "codec": worst.codec,
        "lock_bound": LOCK_BOUND,
        "worst_lock": max(case.lock for case in cases),
        "worst_speed": min(case.speed for case in cases),
    }


def main() -> None:
    """Make a state, take turns, write the results after every case."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = arguments(__doc__)
    parser.add_argument("--codecs", nargs="+", default=["rans", "auto"] if device == "cuda" else ["zstd"])
    parser.add_argument("--chunk-mib", type=int, help="MiB of a chunk; default: the engine's")
    args = parser.parse_args()
    chunk_bytes = None if args.chunk_mib is None else args.chunk_mib << 20
    num_bytes = 8 << 20 if args.tiny else 4 << 30 if device == "cuda" else 1 << 29
    num, budget = TINY_ROUNDS if args.tiny else NUM_ROUNDS, TimeBudget(args.seconds or DEFAULT_SECONDS)
    state = normal_state(num_bytes, 32, device)
    say(f"a state of {num_bytes_of(state) / 1e9:.2f} GB in {len(tensors_of(state))} tensors on {device}")
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for case in measure(state, args.codecs, chunk_bytes, Path(name), num, budget):
            cases.append(case)
            print_table(HEAD, [case.cells()])
            summary = summed_up(cases)
            found: dict[str, object] = {"device": device, "cores": os.cpu_count(), "chunk_mib": args.chunk_mib}
            found |= {"summary": summary, "cases": [asdict(c) for c in cases]}
            path = write_results("gil-tiny" if args.tiny else "gil", found, checkpoints=Path(name))
    print_table(HEAD, [case.cells() for case in cases])
    groups = [f"{c.codec}\n{c.sink}" for c in cases]
    series = {"the loop's rate": [c.rate for c in cases], "the save's speed": [c.speed for c in cases]}
    title = "Do a Python loop and a save leave each other alone?"
    grouped_bars(beside(path), title, groups, series, unit="beside the other / alone", limits={f"{BOUND}": BOUND})
    print(f"{summary}\nwritten to {path}", flush=True)


if __name__ == "__main__":
    main()
