"""How much faster, smaller and quieter is a save to S3 than with what else saves there?

    python -m bench.s3 [--tiny] [--seconds N] [--folder DIR] [--megabytes 1000]

A state of bf16 weights on the CPU; a SeaweedFS server on loopback, a new one for every turn, with its files in shared
memory where that has room; every way in a process of its own, whose second save counts. Ways take turns.

    wall  = seconds from the call until the checkpoint is durable     fastest other / tidegate to be at least 1.3
    stall = seconds until the training could go on
    sent  = bytes of the objects that are there then
    host  = the most memory of the process above what it had before, as the kernel counts it
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.seaweed import Seaweed

from .folders import fast_folder
from .plots import beside, grouped_bars
from .rig import TimeBudget, Times, arguments, print_table, say, write_results
from .s3_ways import WAYS

BOUND = 1.3
OURS = tuple(name for name in WAYS if name.startswith("tidegate"))
NUM_ROUNDS = 5
HEAD = ("way", "wall s", "min", "max", "stall s", "sent MB", "host MB", "of tidegate auto")


@dataclass(slots=True)
class Series:
    """What one way took, round by round."""

    walls_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """The median."""
        return statistics.median(self.walls_s)

    def json(self) -> dict[str, object]:
        """For the results file."""
        return {
            "wall": Times(tuple(self.walls_s)).json(),
            "stall": Times(tuple(self.stalls_s)).json(),
            "host_bytes": statistics.median(self.host_bytes),
            "sent_bytes": self.sent_bytes[-1],
        }


def run_ways(names: Sequence[str], num_bytes: int, asked: Path | None, found: dict[str, Series]) -> None:
    """Save in a child to a server that is new, by several ways one after the other. Blocks."""
    with fast_folder(4 * num_bytes, asked) as folder:
        server = Seaweed(folder / "server")
        try:
            server.start()
            command = [sys.executable, "-m", "bench.s3_ways", server.bucket, str(num_bytes), str(folder), *names]
            environment = {**os.environ, **server.environment()}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        finally:
            server.stop()
    if done.returncode:
        raise RuntimeError(f"{', '.join(names)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    for took in map(json.loads, done.stdout.splitlines()[-len(names) :]):
        series = found[took["way"]]
        series.walls_s.append(took["wall_s"])
        series.stalls_s.append(took["stall_s"])
        series.host_bytes.append(took["host_bytes"])
        series.sent_bytes.append(took["sent_bytes"])
        say(f"{took['way']}: wall {series.walls_s[-1]:.2f} s, stall {series.stalls_s[-1]:.2f} s")


def measure(
    num_bytes: int, num: int, asked: Path | None, budget: TimeBudget, *, is_together: bool
) -> tuple[dict[str, Series], list[float]]:
    """Take turns; return what each way took, and the machine's load at the start of each round.

    Args:
        num_bytes: Of the state.
        num: How many rounds, at most.
        asked: Where the server's files go, if somebody says so.
        budget: Ends the rounds early.
        is_together: Whether all ways of a round share one process and one server, which starts them once.
    """
    found = {name: Series() for name in WAYS}
    loads: list[float] = []
    round_s = 0.0
    while len(loads) < num and budget.allows(len(loads), round_s):
        start_s = time.perf_counter()
        loads.append(os.getloadavg()[0])
        for names in [list(found)] if is_together else [[name] for name in found]:
            run_ways(names, num_bytes, asked, found)
        round_s = time.perf_counter() - start_s
    return found, loads


def summary_of(found: dict[str, Series]) -> dict[str, object]:
    """The fastest other way against ours, and whether any of ours is the slowest in anything."""
    others = {name: series for name, series in found.items() if name not in OURS}
    fastest = min(others, key=lambda name: others[name].wall_s)
    faster = {name: others[fastest].wall_s / found[name].wall_s for name in OURS}
    slowest = {
        "wall_s": max(found, key=lambda name: found[name].wall_s),
        "stall_s": max(found, key=lambda name: statistics.median(found[name].stalls_s)),
        "sent_bytes": max(found, key=lambda name: found[name].sent_bytes[-1]),
        "host_bytes": max(found, key=lambda name: statistics.median(found[name].host_bytes)),
    }
    return {"bound": BOUND, "fastest_other": fastest, "fastest_other_of_ours": faster, "worst": slowest}


def main() -> None:
    """Take turns, write the results, draw them."""
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="of the state")
    args = parser.parse_args()
    num_bytes, num = (4 << 20, 1) if args.tiny else (args.megabytes * 10**6, NUM_ROUNDS)
    found, loads = measure(num_bytes, num, args.folder, TimeBudget(args.seconds), is_together=args.tiny)
    summary = summary_of(found)
    results: dict[str, object] = {"raw_bytes": num_bytes, "loads": loads, "summary": summary}
    results["ways"] = {name: series.json() for name, series in found.items()}
    path = write_results("s3-tiny" if args.tiny else "s3", results)
    rows = []
    for name, series in found.items():
        walls = (series.wall_s, min(series.walls_s), max(series.walls_s), statistics.median(series.stalls_s))
        sizes = (series.sent_bytes[-1] / 1e6, statistics.median(series.host_bytes) / 1e6)
        rows.append((name, *walls, *sizes, series.wall_s / found[OURS[0]].wall_s))
    print_table(HEAD, rows)
    bars = {"until durable": [s.wall_s for s in found.values()]}
    bars["stall"] = [statistics.median(s.stalls_s) for s in found.values()]
    names = [name.replace(" + ", "\n+ ").replace(", ", ",\n").replace("tidegate ", "tidegate\n") for name in found]
    grouped_bars(beside(path), f"A save of {num_bytes / 1e9:.1f} GB of bf16 to S3", names, bars, unit="s")
    print(f"{summary}\nwritten to {path}", flush=True)


if __name__ == "__main__":
    main()
