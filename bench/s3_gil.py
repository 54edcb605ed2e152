"""How much does a Python loop lose while parts travel to S3, by who sends them?

    python -m bench.s3_gil [--tiny] [--seconds N] [--folder DIR]

The main thread counts without pause: alone, and from the return of `save_async` to the commit of saves that encode
nothing. The server, in a process of its own, takes 100 MB/s, or all that comes. Parts are sent by urllib3, by awscrt,
or by a store in another process that gets them through shared memory (its parent copies them there, nothing else).

    lock = time that the loop's thread neither ran nor waited for a core / time       to be at most 0.05
    core = time that it waited for a core / time: server, sender and loop share the cores of one machine
    rate = counts a second beside the upload / counts a second alone

The kernel counts what the first two follow from: waiting for the interpreter's lock is all that the loop could wait for
otherwise (counting.py).
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import tidegate
from tests.kit.slow_s3 import SlowS3
from tidegate.storage import S3Options, S3Store

from .counting import Counted, count_for, count_until
from .plots import beside, grouped_bars
from .rig import TimeBudget, arguments, print_table, say, write_results
from .s3_process import ProcessUpload

BOUND = 0.05
SENDERS = ("urllib3", "awscrt", "process")
RATES = {"100 MB/s": 100e6, "no limit": math.inf}
DEFAULT_SECONDS = 240.0
HEAD = ("sender", "rate", "lock", "core", "loop", "MB/s", "MB/s beside", "rounds")
Upload = Callable[[], threading.Event]
"""Begins to upload the state; the event says that it is durable."""


@dataclass(frozen=True, slots=True)
class Round:
    """One turn: shares of the loop's time, its rate, and bytes a second of the upload without and with the loop."""

    lock: float
    core: float
    loop: float
    idle_bytes_per_s: float
    busy_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """Medians over the rounds of one sender at one rate."""

    sender: str
    rate: str
    lock: float
    core: float
    loop: float
    idle_bytes_per_s: float
    busy_bytes_per_s: float
    rounds: list[Round]

    def cells(self) -> tuple[object, ...]:
        """For the table."""
        speeds = (self.idle_bytes_per_s / 1e6, self.busy_bytes_per_s / 1e6)
        return (self.sender, self.rate, self.lock, self.core, self.loop, *speeds, len(self.rounds))


def count_beside(upload: Upload, seconds: float) -> tuple[Counted, float]:
    """Count beside uploads, for at least so long.

    Returns:
        What was counted, and seconds of the median upload.
    """
    counted = Counted()
    took_s = []
    while counted.wall_s < seconds:
        one = count_until(upload().is_set)
        took_s.append(one.wall_s)
        counted += one
    return counted, statistics.median(took_s)


def round_of(upload: Upload, num_bytes: int, seconds: float) -> Round:
    """Take one turn of each."""
    start_s = time.perf_counter()
    upload().wait()
    idle_s = time.perf_counter() - start_s
    alone = count_for(seconds / 4)
    beside, busy_s = count_beside(upload, seconds)
    alone += count_for(seconds / 4)
    loop = beside.per_s / alone.per_s
    return Round(max(0.0, beside.lock), beside.core, loop, num_bytes / idle_s, num_bytes / busy_s)


@contextmanager
def opened(sender: str, server: SlowS3, state: dict[str, torch.Tensor], num_bytes: int) -> Iterator[Upload]:
    """Open what uploads the state again and again, each time when the time before is over."""
    options = S3Options(
        endpoint_url=server.endpoint_url, transport="awscrt" if sender == "awscrt" else "urllib3", max_parts=1000
    )
    if sender == "process":
        with ProcessUpload(options, num_bytes) as process:
            yield process.begin
        return
    with (
        closing(S3Store("bucket", sender, options=options)) as store,
        tidegate.CheckpointEngine(store, codec="raw", keep_last=1) as engine,
    ):
        steps = iter(range(1 << 30))

        def begin() -> threading.Event:
            engine.wait()
            is_done = threading.Event()
            engine.save_async(state, step=next(steps)).add_done_callback(lambda _: is_done.set())
            return is_done

        yield begin


def measure(sender: str, rate: str, num_bytes: int, num: int, budget: TimeBudget) -> Case:
    """Measure one sender at one rate. The first upload warms up."""
    state = {f"w.{i}": torch.randint(0, 256, (num_bytes // 16,), dtype=torch.uint8) for i in range(16)}
    rounds: list[Round] = []
    with SlowS3(RATES[rate]) as server, opened(sender, server, state, num_bytes) as upload:
        upload().wait()
        round_s = 0.0
        while len(rounds) < num and budget.allows(len(rounds), round_s):
            start_s = time.perf_counter()
            rounds.append(round_of(upload, num_bytes, min(3.0, num_bytes / 1e8)))
            round_s = time.perf_counter() - start_s
    names = ("lock", "core", "loop", "idle_bytes_per_s", "busy_bytes_per_s")
    medians = {name: statistics.median(getattr(each, name) for each in rounds) for name in names}
    return Case(sender=sender, rate=rate, rounds=rounds, **medians)


def main() -> None:
    """Measure every sender at every rate and write the results after each."""
    args = arguments(__doc__).parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}
    num_bytes, num = (8 << 20, 1) if args.tiny else (256 << 20, 7)
    budget = TimeBudget(args.seconds or DEFAULT_SECONDS)
    cases: list[Case] = []
    pairs = [(sender, rate) for rate in list(RATES)[: 1 if args.tiny else None] for sender in SENDERS]
    for i, (sender, rate) in enumerate(pairs):
        cases.append(measure(sender, rate, num_bytes, num, budget.share(len(pairs) - i)))
        say(f"{sender}, {rate}: lock {cases[-1].lock:.3f}, loop {cases[-1].loop:.2f}")
        ours = [case for case in cases if case.sender == "awscrt"]
        found: dict[str, object] = {"bound": BOUND, "num_bytes": num_bytes, "cores": os.cpu_count()}
        found |= {"worst_lock": max((case.lock for case in ours), default=0.0), "load": os.getloadavg()[0]}
        found["cases"] = [asdict(case) for case in cases]
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            path = write_results("s3-gil-tiny" if args.tiny else "s3-gil", found, checkpoints=Path(folder))
    print_table(HEAD, [case.cells() for case in cases])
    groups = [f"{case.sender}\n{case.rate}" for case in cases]
    series = {"without the lock": [case.lock for case in cases], "without a core": [case.core for case in cases]}
    title = "What does a Python loop lose while parts travel to S3?"
    grouped_bars(beside(path), title, groups, series, unit="share of its time", limits={f"lock, {BOUND}": BOUND})
    print(f"written to {path}", flush=True)


if __name__ == "__main__":
    main()
