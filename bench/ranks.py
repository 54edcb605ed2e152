"""What does a save of several ranks cost, beside DCP's own ways, and does a second rank make it twice as fast?

    python -m bench.ranks [--tiny] [--ranks N] [--folder DIR] [--seconds N]

One process a GPU (with --tiny and no GPU: two on the CPU) trains a transformer of 1.01 G parameters with FSDP2 over
NCCL. Then each way saves what they hold twice to one folder, in shared memory if that has room, and loads it back in
place. Of every way, the most of all ranks:

    stall   until a kernel that the training queues next can start
    wall    until the checkpoint is there; not synced to a disk, except by tidegate
    load    of a checkpoint just written, in place, and whether every bit came back, also where the training took steps
            while the save was in flight
    host    and device memory beyond what was in use, while it saved

After that each rank's part is saved to a sink of its own, by one rank alone and by all: to a sink without limit,
which asks how fast they encode, and to one of 5 GB/s, which bounds a save.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tidegate
from tidegate.storage.sink import SinkStore

from .folders import fast_folder
from .held import Watch
from .models import num_bytes as total_bytes
from .ranks_training import SIZES, RankTraining, State, erase, local_tensors, same_bits
from .ranks_ways import WAYS, Way, timed_save
from .rig import TimeBudget, arguments, print_table, say, write_results

SINK_BYTES_PER_S = 5e9
SCALING_BOUND = 1.9
NUM_SINK_SAVES = 3
_HEAD = ("way", "stall s", "wall s", "load s", "GB stored", "host GB", "device GB", "exact")


@dataclass(slots=True)
class Found:
    """What one way took; lists by save, the most of all ranks."""

    stalls_s: list[float] = field(default_factory=list)
    walls_s: list[float] = field(default_factory=list)
    load_s: float = 0.0
    stored_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    exact: bool = False
    error: str = ""

    def row(self, name: str) -> tuple[object, ...]:
        """Of the table."""
        if not self.stalls_s:
            return (f"{name}: {self.error[:80]}", *[""] * 7)
        sizes = (self.stored_bytes / 1e9, self.host_bytes / 1e9, self.device_bytes / 1e9)
        times = (min(self.stalls_s), min(self.walls_s), self.load_s)
        return (name, *times, *sizes, self.error[:80] or self.exact)


class WayError(RuntimeError):
    """A way to save or load did not work."""


class Ranks:
    """What the ranks tell each other, over gloo."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.rank, self.num = dist.get_rank(), dist.get_world_size()

    def most(self, *values: float) -> list[float]:
        """The greatest of each value of all ranks. Every rank waits here for the others."""
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in found]

    def most_of(self, work: Callable[[], tuple[float, ...]], num: int) -> list[float]:
        """Do something on all ranks; return the greatest of the `num` numbers of each.

        Raises:
            WayError: It failed on some rank, perhaps on this one.
        """
        why, values = "", (0.0,) * num
        try:
            values = work()
        except Exception as exc:  # noqa: BLE001 - how a way fails is part of the answer
            why = f"{type(exc).__name__}: {exc}"[:500]
        failed, *most = self.most(bool(why), *values)
        if failed:
            raise WayError(why or "it failed on another rank")
        return most

    def say(self, text: str) -> None:
        """Print a line, once."""
        if self.rank == 0:
            say(text)


def measure(ranks: Ranks, training: RankTraining, name: str, root: Path) -> Found:
    """Save and load in one way. All ranks together. Blocks."""
    found = Found()
    way = WAYS[name](training, root, ranks.group)
    with closing(way):
        try:
            with Watch() as watch:
                for step in range(way.num_saves):
                    ranks.most(0)
                    stall_s, wall_s = ranks.most_of(lambda step=step: timed_save(way, training.state(), step), 2)
                    found.stalls_s.append(stall_s)
                    found.walls_s.append(wall_s)
                    ranks.say(f"{name}: stall {stall_s:.3f} s, wall {wall_s:.3f} s")
            memory = ranks.most(watch.host_bytes, watch.device_bytes)
            found.host_bytes, found.device_bytes = int(memory[0]), int(memory[1])
            num_kept = len(list(root.glob("step-*"))) or 1
            found.stored_bytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // num_kept
            differs, found.load_s = ranks.most_of(lambda: load_back(ranks, way), 2)
            found.exact = not differs
        except WayError as exc:
            found.error = f"save {len(found.stalls_s) + 1}: {exc}"
            ranks.say(f"{name}: {found.error}")
    ranks.most(0)
    return found


def load_back(ranks: Ranks, way: Way) -> tuple[float, float]:
    """Load a checkpoint; return whether bits differ from those of the state that was saved, and seconds.

    It is the last one, or, where the training may go on meanwhile, one more, with steps of the training beside it.
    """
    training, step = way.training, way.num_saves - 1
    state = training.state()
    expected = {name: tensor.clone() for name, tensor in local_tensors(state).items()}
    if way.during_save:
        step += 1
        wait = way.start(state, step)
        training.train(2)
        wait()
        state = training.state()
    erase(state)
    dist.barrier(ranks.group)
    start_s = time.perf_counter()
    way.load(state, step)
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    took_s = time.perf_counter() - start_s
    return float(not same_bits(state, expected)), took_s


def sink_speed(group: dist.ProcessGroup, part: State, bytes_per_s: float | None, device: torch.device) -> float:
    """GB/s of one rank's raw bytes into a sink of its own, saves of all ranks of the group together. Blocks."""
    options: dict[str, Any] = {"codec": "rans" if device.type == "cuda" else "zstd"}
    options["snapshot"] = "device" if device.type == "cuda" else "host"
    with (
        closing(SinkStore(bytes_per_s=bytes_per_s, from_device=bytes_per_s is None)) as store,
        tidegate.CheckpointEngine(store, process_group=group, keep_last=1, **options) as engine,
    ):
        speeds = []
        for step in range(2 + NUM_SINK_SAVES):
            dist.barrier(group)
            start_s = time.perf_counter()
            engine.save_async(part, step=step)
            report = engine.wait()
            assert report is not None
            speeds.append(total_bytes(part[next(iter(part))].values()) / 1e9 / (time.perf_counter() - start_s))
    return statistics.median(speeds[2:])


def scaling(ranks: Ranks, training: RankTraining) -> dict[str, dict[str, float]]:
    """Speed of one rank alone, and of all, by what bounds a save. Blocks."""
    alone = dist.new_group([0], backend="gloo")
    part = {f"part_{ranks.rank}": local_tensors(training.state())}
    found: dict[str, dict[str, float]] = {}
    for name, rate in (("encode", None), ("write", SINK_BYTES_PER_S)):
        one = sink_speed(alone, part, rate, training.device) if ranks.rank == 0 else 0.0
        one = ranks.most(one)[0]
        mine = torch.tensor([sink_speed(ranks.group, part, rate, training.device)], dtype=torch.float64)
        dist.all_reduce(mine, group=ranks.group)
        found[name] = {"one_gb_per_s": one, "all_gb_per_s": float(mine), "times": float(mine) / one}
        ranks.say(f"{name}: {one:.2f} GB/s by one rank, {float(mine):.2f} by {ranks.num}")
    return found


def run(rank: int, num_ranks: int, size: str, folder: str, seconds: float | None, ways: list[str]) -> None:
    """What each process does."""
    budget = TimeBudget(seconds)
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    ranks = Ranks()
    training = RankTraining(SIZES[size], device)
    loss = training.train(3)
    tensors = local_tensors(training.state())
    mine_bytes = total_bytes(tensors.values())
    ranks.say(
        f"{training.num_parameters / 1e6:.0f} M parameters, loss {loss:.2f}; rank 0 has {mine_bytes / 1e9:.2f} GB"
    )
    found = {name: Found(error="no time was left") for name in ways}
    speeds: dict[str, dict[str, float]] = {}

    def write() -> None:
        if rank == 0:
            told = {name: asdict(one) for name, one in found.items()}
            about = {"ranks": num_ranks, "parameters": training.num_parameters, "bytes_of_rank_0": mine_bytes}
            name = "ranks-tiny" if size == "tiny" else "ranks"
            write_results(name, {**about, "ways": told, "scaling": speeds, "bound": SCALING_BOUND})

    for name in ("", *ways):  # "": the scaling
        if ranks.most(budget.left_s <= 0)[0]:
            break
        if name:
            found[name] = measure(ranks, training, name, Path(folder) / name)
            if rank == 0:
                shutil.rmtree(Path(folder) / name)
        else:
            speeds |= scaling(ranks, training)
        write()
    if rank == 0:
        report(found, speeds, num_ranks)
    dist.destroy_process_group()


def report(found: dict[str, Found], speeds: dict[str, dict[str, float]], num_ranks: int) -> None:
    """Print the tables."""
    print_table(_HEAD, [one.row(name) for name, one in found.items()])
    rows: Sequence[Sequence[object]] = [
        (name, one["one_gb_per_s"], one["all_gb_per_s"], one["times"]) for name, one in speeds.items()
    ]
    print_table(("bound by", "1 rank GB/s", f"{num_ranks} ranks GB/s", "times"), rows)


def main() -> None:
    """Start a process a rank and wait for them."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, help="how many; default: one a GPU, two without")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what is measured")
    args = parser.parse_args()
    num_ranks = args.ranks or torch.cuda.device_count() or 2
    size = "tiny" if args.tiny else "large"
    needed_bytes = 10**9 if args.tiny else 3 * 12 * 1_100_000_000
    with fast_folder(needed_bytes, args.folder) as folder:
        mp.spawn(run, (num_ranks, size, str(folder), args.seconds, args.ways), nprocs=num_ranks)


if __name__ == "__main__":
    main()
