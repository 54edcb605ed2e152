"""How long does a save keep the training loop, and what would others take?

    python -m bench.stall [--tiny] [--folder DIR] [--seconds N] [--share 0.25]

A training state of 8.7 GB in 2,115 tensors lies on the GPU, idle. Of every save:

    host    until `save_async` returns                                        to be at most 5 ms, lazy 3 ms
    stall   until a kernel that the training queues next can start            to be at most 2.5 copies of the state
    fence   lazy: how long `optimizer.step()` waits if it comes right after

A copy is one device-to-device copy of the state as one flat tensor. tidegate saves to a sink that drops what it gets,
which takes little time, and then a few times to the folder of the others. Those are torch.save, DCP (save,
async_save in a thread, in a process, and with page-locked staging) and a loop over nvCOMP's Python API, all to shared
memory if that has room. The slowest of them save a part of the state; its size is in the results, and the table scales
it. Without a GPU the same runs on the CPU, where a stall is a copy to other host memory.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import tidegate
from tidegate.snapshot import SnapshotMode

from .folders import fast_folder
from .models import Training, train
from .models import num_bytes as total_bytes
from .others import (
    DcpPinned,
    NvcompLoop,
    Other,
    Save,
    dcp_async,
    dcp_process,
    dcp_save,
    measure,
    single_rank,
    torch_save,
)
from .ours import Ours, save_ours
from .plots import bars, beside, timeline
from .rig import TimeBudget, arguments, print_table, repeat, repeat_on_gpu, say, write_results

HOST_BOUNDS_S = {"device": 0.005, "lazy": 0.003}
COPIES_BOUND = 2.5
OF_DCP_ASYNC_BOUND = 1 / 200
DEFAULT_SECONDS = 150.0
DCP_ASYNC = "dcp.async_save"
HEAD = ("", "stall ms", "host ms", "fence ms", "copies", "wall s", "GB saved")

State = dict[str, torch.Tensor]


def flat_state(training: Training) -> State:
    """Every tensor of the state by a name of its own."""
    found = {f"{role}.{i}": t for role, tensors in training.components().items() for i, t in enumerate(tensors)}
    steps = [training.optimizer.state[p]["step"] for p in training.master]
    return found | {f"step.{i}": step for i, step in enumerate(steps)}


def part_of(training: Training, share: float) -> State:
    """The first layers' part of the state."""
    count = max(1, round(len(training.weights) * share))
    return {name: t for name, t in flat_state(training).items() if int(name.rpartition(".")[2]) < count}


def copies(state: State, num: int) -> dict[str, float]:
    """Seconds of one copy of the state in the memory where it lies: as one flat tensor, and tensor by tensor."""
    tensors = list(state.values())
    device = tensors[0].device
    num_bytes = total_bytes(tensors)
    flat = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def copy_flat() -> object:
        return flat[0].copy_(flat[1])

    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.detach())
    targets = {dtype: [torch.empty_like(t) for t in group] for dtype, group in groups.items()}

    def copy_each() -> None:
        for dtype, group in groups.items():
            torch._foreach_copy_(targets[dtype], group)

    timed = repeat_on_gpu if device.type == "cuda" else repeat
    return {"flat_s": timed(copy_flat, num=num).median_s, "foreach_s": timed(copy_each, num=num).median_s}


def save_to_folder(training: Training, codec: str, folder: Path, num: int) -> list[float]:
    """Seconds until tidegate has committed a checkpoint in a folder, after one save that warms up. Blocks."""
    mode: SnapshotMode = "device" if training.device.type == "cuda" else "host"
    walls_s = []
    with tidegate.CheckpointEngine(folder / "tidegate", codec=codec, snapshot=mode, keep_last=1) as engine:
        for step in range(1 + num):
            engine.save_async(training.state(), step=step)
            report = engine.wait()
            if report is not None and step:
                walls_s.append(report.wall_s)
    shutil.rmtree(folder / "tidegate")
    return walls_s


def others(training: Training, folder: Path, share: float, budget: TimeBudget) -> list[Other]:
    """Run the other ways to save, the one that is compared with first. Blocks."""
    state, part = flat_state(training), part_of(training, share)
    ways: list[tuple[str, Callable[[], Save], State, int]] = [
        (DCP_ASYNC, lambda: dcp_async, state, 2),
        ("torch.save", lambda: torch_save, state, 1),
        ("dcp.save", lambda: dcp_save, state, 1),
        ("dcp.async_save, process", lambda: dcp_process, part, 2),
    ]
    if training.device.type == "cuda":
        ways.append(("dcp.async_save, pinned stager", DcpPinned, part, 2))
        ways.append(("nvCOMP Python loop, ANS", lambda: NvcompLoop("ANS"), part, 1))
        ways.append(("nvCOMP Python loop, Zstd", lambda: NvcompLoop("Zstd"), part, 1))
    found: list[Other] = []
    with single_rank(folder):
        for name, make, chosen, num in ways:
            if found and budget.left_s <= 0:
                found.append(Other(name, total_bytes(chosen.values()), len(chosen), error="no time was left"))
                continue
            found.append(measure(name, make, chosen, folder, num))
    return found


def summary(ours: Sequence[Ours], copy: dict[str, float], rest: Sequence[Other], num_bytes: int) -> dict[str, object]:
    """What the bounds are on."""
    found: dict[str, object] = {"copies_bound": COPIES_BOUND, "of_dcp_async_bound": OF_DCP_ASYNC_BOUND}
    dcp_stall_s = next((o.scaled_stall_s(num_bytes) for o in rest if o.name == DCP_ASYNC), None)
    for one in ours:
        host_s, stall_s = statistics.median(one.hosts_s), statistics.median(one.stalls_s)
        found[one.mode] = {
            "host_s": host_s,
            "host_bound_s": HOST_BOUNDS_S.get(one.mode),
            "stall_s": stall_s,
            "stall_in_flat_copies": stall_s / copy["flat_s"],
            "stall_in_foreach_copies": stall_s / copy["foreach_s"],
            "stall_of_dcp_async": stall_s / dcp_stall_s if dcp_stall_s else None,
            "fence_s": statistics.median(one.fences_s),
            "most_allocations": max(one.allocations, default=0),
            "most_driver_allocations": max(one.driver_allocations, default=0),
            "waits_for_the_device": one.waits,
        }
    return found


def rows_of(
    ours: Sequence[Ours], copy: dict[str, float], rest: Sequence[Other], num_bytes: int
) -> list[tuple[object, ...]]:
    """The table."""
    rows: list[tuple[object, ...]] = [
        (name, 1e3 * copy[key], "", "", copy[key] / copy["flat_s"], "", num_bytes / 1e9)
        for name, key in (("copy, flat", "flat_s"), ("copy, foreach", "foreach_s"))
    ]
    for one in ours:
        medians = [statistics.median(values) for values in (one.stalls_s, one.hosts_s, one.fences_s, one.walls_s)]
        stall_s, host_s, fence_s, wall_s = medians
        name = f"tidegate, {one.mode} ({one.codec}, to a sink)"
        milliseconds = (1e3 * stall_s, 1e3 * host_s, 1e3 * fence_s)
        rows.append((name, *milliseconds, stall_s / copy["flat_s"], wall_s, num_bytes / 1e9))
    for other in rest:
        scaled_s = other.scaled_stall_s(num_bytes)
        if scaled_s is None:
            rows.append((f"{other.name}: {other.error[:60]}", "", "", "", "", "", other.num_bytes / 1e9))
            continue
        wall_s = min(other.walls_s) * num_bytes / other.num_bytes
        name = other.name + (" (scaled)" if other.num_bytes < num_bytes else "")
        rows.append((name, 1e3 * scaled_s, "", "", scaled_s / copy["flat_s"], wall_s, other.num_bytes / 1e9))
    return rows


def plot(path: Path, rows: Sequence[Sequence[object]], ours: Sequence[Ours]) -> None:
    """All stalls on one axis; the timeline of each mode's last save."""
    stalls = {str(row[0]): float(row[1]) for row in rows if isinstance(row[1], float)}
    title = "How long does a save keep the training loop?"
    bars(beside(path), title, stalls, unit="stall (ms, logarithmic)", log=True)
    for one in ours:
        if one.report is not None and one.report.timeline:
            title = f"What does each stage do, and when? ({one.mode}, {one.codec})"
            timeline(beside(path, one.mode), title, one.report.timeline, stall_s=one.report.stall_s)


def main() -> None:
    """Train, save, compare, write the results after ours and after all."""
    parser = arguments(__doc__)
    parser.add_argument("--codec", help="of tidegate's saves; default: ans on a GPU, else zstd")
    parser.add_argument("--share", type=float, default=0.25, help="of the state that the slowest of the others save")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codec = args.codec or ("ans" if device.type == "cuda" else "zstd")
    modes: tuple[SnapshotMode, ...] = ("device", "lazy") if device.type == "cuda" else ("host", "lazy")
    training = train("large-tiny" if args.tiny else "large", device, steps=2 if args.tiny else 5)
    state = flat_state(training)
    num, num_bytes = 2 if args.tiny else 15, total_bytes(state.values())
    say(f"{len(state)} tensors, {num_bytes / 1e9:.2f} GB")
    budget = TimeBudget(args.seconds or DEFAULT_SECONDS)
    copy = copies(state, 5)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    ours = []
    for mode in modes:
        ours.append(save_ours(training, mode, codec, num, budget.share(6)))
        say(f"{mode}: host {1e3 * statistics.median(ours[-1].hosts_s):.2f} ms, "
            f"stall {1e3 * statistics.median(ours[-1].stalls_s):.2f} ms")  # fmt: skip
    results: dict[str, object] = {"num_bytes": num_bytes, "num_tensors": len(state)}
    results |= {"parameters": training.num_parameters, "copy": copy, "ours": [one.json() for one in ours]}
    name = "stall-tiny" if args.tiny else "stall"
    rest: list[Other] = []
    path = write_results(name, results | {"summary": summary(ours, copy, rest, num_bytes)}, checkpoints=args.folder)
    with fast_folder(2 * num_bytes, args.folder) as folder:
        walls_s = save_to_folder(training, codec, folder, 1 if args.tiny else 3)
        rest = others(training, folder, args.share, budget)
        rows = rows_of(ours, copy, rest, num_bytes)
        results |= {"folder_walls_s": walls_s, "others": [asdict(other) for other in rest]}
        results |= {"summary": summary(ours, copy, rest, num_bytes)}
        path = write_results(name, results, checkpoints=folder)
    print_table(HEAD, rows)
    plot(path, rows, ours)
    print(f"{results['summary']}\nwritten to {path}", flush=True)


if __name__ == "__main__":
    main()
