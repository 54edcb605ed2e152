"""What does a save in flight cost the steps of a training loop?

    python -m bench.interference [--tiny] [--seconds N] [--layers 24] [--only GPU,device,rans …]

A dense model trains, each step waited for as loops with `loss.item()` do. Phases without and with a save alternate,
A B A B …; a phase with a save begins with the call of `save_async` and ends with the first step that finds the save
committed. What is compared is the mean time a step over those phases, stalls and fences included:

    cost  = mean step while a save is in flight / mean step without one − 1    to be at most 0.02
    error = standard error of the costs that the single saves had

That bound is on saves to a sink of 5 GB/s. A sink without a limit shows the worst case: the encoder never rests. Two
loops: one that the GPU bounds, its batch so large that a step takes twice as long as with a batch of one; and one that
Python bounds, with a batch of one, in which the GPU mostly waits to be told what to do.

Python's garbage collector runs between the phases only, as torchtitan, Megatron and others have it: a full pass takes
0.19 s in a process as large as this, and comes every few hundred steps, whoever made the objects.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch

import tidegate
from tidegate.snapshot import SnapshotMode
from tidegate.storage.sink import SinkStore

from .models import Training, train
from .phases import HEAD, Case, Phases, summed_up
from .plots import beside, grouped_bars
from .rig import TimeBudget, arguments, print_table, require_cuda, say, write_results

BOUND = 0.02
LIMITED_BYTES_PER_S = 5e9
CODECS = ("rans", "ans", "zstd", "auto")
SHORT_CHUNK_MIB = 64
NUM_LAYERS = 24
WhatToSave = tuple[str, float, SnapshotMode, str, int | None]
"""What bounds the loop, the sink's rate, snapshot mode, codec, and MiB of a chunk; None: the engine's default."""
CASES: tuple[WhatToSave, ...] = (
    *(("GPU", LIMITED_BYTES_PER_S, "device", codec, None) for codec in CODECS),
    ("Python", LIMITED_BYTES_PER_S, "device", "rans", None),
    ("Python", LIMITED_BYTES_PER_S, "device", "rans", SHORT_CHUNK_MIB),
    ("Python", LIMITED_BYTES_PER_S, "device", "auto", None),
    *(("GPU", LIMITED_BYTES_PER_S, "lazy", codec, None) for codec in ("rans", "ans")),
    ("GPU", math.inf, "device", "rans", None),
    ("GPU", math.inf, "lazy", "ans", None),
)
LEAST_STEP_S = 0.05
MAX_BATCH = 256
NUM_WARM_UPS = 2
NUM_SAVES = 40
"""At most: as many as there is time for."""
LEAST_QUIET_STEPS = 6
DEFAULT_SECONDS = 160.0


def name_of(case: WhatToSave) -> str:
    """Spell a case for `--only`: what bounds the loop, mode, codec, and what else sets it apart."""
    loop, bytes_per_s, mode, codec, chunk_mib = case
    chunk = "" if chunk_mib is None else f",{chunk_mib}"
    return f"{loop},{mode},{codec}{chunk}{',unlimited' if math.isinf(bytes_per_s) else ''}"


def step_s(training: Training, batch: int) -> float:
    """Do one step, wait for it, and return how long it took."""
    start_s = time.perf_counter()
    training.train_step(batch)
    training.loss.item()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def find_batch(training: Training) -> int:
    """Find a batch with which the GPU bounds the steps: they take twice as long as with a batch of one, and 50 ms."""
    least_s = min(step_s(training, 1) for _ in range(6))
    say(f"batch 1: {1e3 * least_s:.1f} ms a step")
    batch = 16
    while True:
        took_s = min(step_s(training, batch) for _ in range(4))
        say(f"batch {batch}: {1e3 * took_s:.1f} ms a step")
        if took_s >= max(2 * least_s, LEAST_STEP_S) or 2 * batch > MAX_BATCH:
            return batch
        batch *= 2


def saving_phase(training: Training, engine: tidegate.CheckpointEngine, step: int, batch: int, phases: Phases) -> None:
    """Call `save_async` and train until the save has ended; then wait for what follows its commit."""
    gc.collect()
    start_s = time.perf_counter()
    future = engine.save_async(training.state(), step=step)
    steps = [step_s(training, batch)]
    while not future.done():
        steps.append(step_s(training, batch))
    lasted_s = time.perf_counter() - start_s
    report = engine.wait()
    if report is None:
        raise RuntimeError("the engine has no report of the save that just ended")
    phases.saving_s.append(steps)
    phases.lasted_s.append(lasted_s)
    phases.reports.append(report)


def alternate(
    training: Training, engine: tidegate.CheckpointEngine, batch: int, num_saves: int, budget: TimeBudget
) -> Phases:
    """Do quiet and saving phases of as many steps by turns, beginning and ending with a quiet one."""
    warm_up, phases = Phases(), Phases()
    for step in range(NUM_WARM_UPS):
        saving_phase(training, engine, step, batch, warm_up)
    num_quiet = max(LEAST_QUIET_STEPS, len(warm_up.saving_s[-1]))
    for step in range(NUM_WARM_UPS, NUM_WARM_UPS + num_saves):
        gc.collect()
        phases.quiet_s.append([step_s(training, batch) for _ in range(num_quiet)])
        saving_phase(training, engine, step, batch, phases)
        if not budget.allows(len(phases.lasted_s), phases.lasted_s[-1] + sum(phases.quiet_s[-1])):
            break
    phases.quiet_s.append([step_s(training, batch) for _ in range(num_quiet)])
    return phases


def measure(
    training: Training, cases: Sequence[WhatToSave], batch: int, num_saves: int, budget: TimeBudget
) -> Iterator[Case]:
    """Yield case after case."""
    for i, (loop, bytes_per_s, mode, codec, chunk_mib) in enumerate(cases):
        chosen = batch if loop == "GPU" else 1
        chunk_bytes = None if chunk_mib is None else chunk_mib << 20
        with (
            closing(SinkStore(bytes_per_s=bytes_per_s, name=f"{mode}-{codec}")) as store,
            tidegate.CheckpointEngine(
                store, codec=codec, snapshot=mode, chunk_bytes=chunk_bytes, keep_last=1
            ) as engine,
        ):
            engine.attach(training.optimizer)
            phases = alternate(training, engine, chosen, num_saves, budget.share(len(cases) - i))
        yield summed_up(phases, loop, chosen, bytes_per_s, mode, codec, chunk_mib)


def main() -> None:
    """Train, save beside it, write the results after every case."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="of the model: 14 bytes × 12.6 M a layer")
    names = [name_of(case) for case in CASES]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="CASE", help=" ".join(names))
    args = parser.parse_args()
    if args.tiny:
        training = train("dense-tiny", require_cuda(), steps=5)
    else:
        training = train("dense", require_cuda(), steps=5, num_layers=args.layers)
    chosen = [case for case in CASES if name_of(case) in args.only]
    batch = 4 if args.tiny else find_batch(training)
    budget = TimeBudget(args.seconds or DEFAULT_SECONDS)
    cases: list[Case] = []
    gc.disable()
    for case in measure(training, chosen, batch, 1 if args.tiny else NUM_SAVES, budget):
        say(f"{case.loop}, {case.mode}, {case.codec}, {case.chunk}")
        print_table(HEAD, [case.cells()])
        cases.append(case)
        limited = [c for c in cases if c.bytes_per_s is not None]
        worst = max(limited, key=lambda c: c.cost)
        summary = {"bound": BOUND, "worst_cost": worst.cost, "loop": worst.loop}
        summary |= {"mode": worst.mode, "codec": worst.codec}
        found = {"parameters": training.num_parameters, "batch": batch, "summary": summary}
        found["cases"] = [asdict(c) for c in cases]
        path = write_results("interference-tiny" if args.tiny else "interference", found)
    print_table(HEAD, [c.cells() for c in cases])
    plot(beside(path), cases)
    print(f"{summary}\nwritten to {path}", flush=True)


def plot(path: Path, cases: list[Case]) -> None:
    """The cost by codec, mode and sink."""

    def way(c: Case) -> str:
        chunk = "" if c.chunk_mib is None else f", {c.chunk}"
        return f"{c.loop}, {c.mode}{chunk}, {'5 GB/s' if c.bytes_per_s else 'no limit'}"

    costs = {(way(c), c.codec): 100 * c.cost for c in cases}
    names, codecs = (list(dict.fromkeys(key[i] for key in costs)) for i in (0, 1))
    series = {name: [costs.get((name, codec)) for codec in codecs] for name in names}
    title = "What does a save in flight cost the steps beside it?"
    grouped_bars(path, title, codecs, series, unit="cost (%)", limits={"2 %": 100 * BOUND})


if __name__ == "__main__":
    main()
