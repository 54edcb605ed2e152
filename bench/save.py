"""How much faster, smaller and quieter is a tidegate save than torch.save and torch.distributed.checkpoint, on a CPU?

    python -m bench.save [--tiny] [--folder DIR]

Baselines and ceilings run in the same process, in turn. DCP runs as its users run it: FileSystemWriter with its
ZStandard extension, with one and with two threads; ratios are against the faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

import tidegate

from .rig import interleave, print_table, repeat, write_results

GB = 1e9


def large_state(num_bytes: int) -> dict[str, torch.Tensor]:
    """Half bf16 weights N(0, 0.02), half fp32 N(0, 0.02), 16 tensors each."""
    torch.manual_seed(0)
    each = num_bytes // 32
    state = {f"weight.{i}": torch.randn(each // 2).mul_(0.02).to(torch.bfloat16) for i in range(16)}
    return state | {f"master.{i}": torch.randn(each // 4).mul_(0.02) for i in range(16)}


def small_state(num_tensors: int) -> dict[str, torch.Tensor]:
    """Many fp32 tensors of 8 values."""
    torch.manual_seed(0)
    return {f"t{i}": torch.randn(8) for i in range(num_tensors)}


def dcp_save(state: dict[str, torch.Tensor], folder: Path, *, threads: int, zstd: bool) -> None:
    """Save as DCP's users do on one process."""
    extensions = [ZStandard()] if zstd else None
    writer = dcp.FileSystemWriter(folder, thread_count=threads, _extensions=extensions, overwrite=True)
    dcp.save(state, storage_writer=writer, no_dist=True)


def stored_bytes(path: Path) -> int:
    """Length of a file, or of all files below a folder."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def raw_write(view: memoryview, path: Path) -> None:
    """The ceiling: bytes that need no work, written past the page cache and synced."""
    from tidegate.storage.local import LocalStore

    store = LocalStore(path.parent)
    writer = store.create(path.name, replace=True)
    for at in range(0, len(view), 64 << 20):
        writer.append(view[at : at + (64 << 20)])
    writer.seal()
    store.close()


def bench_large(folder: Path, num_bytes: int, num: int) -> dict[str, object]:
    """Wall and bytes of one whole save."""
    from tidegate.storage.aligned import aligned_buffer

    state = large_state(num_bytes)
    copy = {name: torch.empty_like(t) for name, t in state.items()}
    random = aligned_buffer(num_bytes // 4096 * 4096)
    torch.frombuffer(random, dtype=torch.int64).random_()
    paths = {name: folder / name for name in ("tidegate.tg", "torch.pt", "dcp1", "dcp2", "raw")}

    times = interleave(
        {
            "tidegate": lambda: tidegate.save(state, paths["tidegate.tg"]),
            "torch.save": lambda: _torch_save_synced(state, paths["torch.pt"]),
            "dcp+zstd 1 thread": lambda: dcp_save(state, paths["dcp1"], threads=1, zstd=True),
            "dcp+zstd 2 threads": lambda: dcp_save(state, paths["dcp2"], threads=2, zstd=True),
            "copy": lambda: [copy[name].copy_(t) for name, t in state.items()],
            "raw write": lambda: raw_write(random, paths["raw"]),
        },
        num=num,
    )
    sizes = {
        "tidegate": stored_bytes(paths["tidegate.tg"]),
        "torch.save": stored_bytes(paths["torch.pt"]),
        "dcp+zstd 1 thread": stored_bytes(paths["dcp1"]),
        "dcp+zstd 2 threads": stored_bytes(paths["dcp2"]),
        "copy": num_bytes,
        "raw write": num_bytes,
    }
    loads = interleave(
        {
            "tidegate": lambda: tidegate.load(paths["tidegate.tg"]),
            "torch.load": lambda: torch.load(paths["torch.pt"]),
        },
        num=num,
    )
    for name, tensor in tidegate.load(paths["tidegate.tg"]).items():  # type: ignore[attr-defined]
        if not torch.equal(tensor.view(torch.uint8), state[name].view(torch.uint8)):
            raise RuntimeError(f"{name} came back changed")
    bf16 = {name: t for name, t in state.items() if t.dtype == torch.bfloat16}
    report = tidegate.save(bf16, folder / "bf16.tg")
    fastest = min(times["dcp+zstd 1 thread"].median_s, times["dcp+zstd 2 threads"].median_s)
    print_table(
        ("save of the large state", "wall s", "GB/s", "stored MB", "ratio"),
        [
            (name, t.median_s, num_bytes / t.median_s / GB, sizes[name] // 10**6, num_bytes / sizes[name])
            for name, t in times.items()
        ],
    )
    print_table(("load", "wall s"), [(name, t.median_s) for name, t in loads.items()])
    return {
        "raw_bytes": num_bytes,
        "save": {name: {**t.json(), "stored_bytes": sizes[name]} for name, t in times.items()},
        "load": {name: t.json() for name, t in loads.items()},
        "wall_of_dcp_zstd": times["tidegate"].median_s / fastest,
        "bytes_of_dcp_zstd": sizes["tidegate"] / sizes["dcp+zstd 1 thread"],
        "load_of_torch_load": loads["tidegate"].median_s / loads["torch.load"].median_s,
        "bf16_ratio": report.ratio,
    }


def _torch_save_synced(state: object, path: Path) -> None:
    torch.save(state, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def bench_small(folder: Path, num_tensors: int) -> dict[str, object]:
    """Many tiny tensors: time by their number, bytes of overhead each."""
    results: dict[str, object] = {}
    rows = []
    for count in (num_tensors // 10, num_tensors):
        found = _bench_small_once(small_state(count), folder / f"small-{count}")
        results[str(count)] = found
        rows.append((count, *found.values()))
    growth = rows[1][1] / rows[0][1]
    results["growth_for_ten_times_the_tensors"] = growth
    print_table(("tensors", *HEAD_SMALL), rows)
    return results


HEAD_SMALL = ("save_s", "torch_save_s", "dcp_save_s", "load_s", "torch_load_s", "bytes_each")


def _bench_small_once(state: dict[str, torch.Tensor], path: Path) -> dict[str, float]:
    tg, pt = path.with_suffix(".tg"), path.with_suffix(".pt")
    once = {"num": 1, "warm_up": 0}
    return {
        "save_s": repeat(lambda: tidegate.save(state, tg), num=3).median_s,
        "torch_save_s": repeat(lambda: torch.save(state, pt), **once).median_s,
        "dcp_save_s": repeat(lambda: dcp_save(state, path, threads=1, zstd=False), **once).median_s,
        "load_s": repeat(lambda: tidegate.load(tg), num=3).median_s,
        "torch_load_s": repeat(lambda: torch.load(pt), **once).median_s,
        "overhead_bytes_per_tensor": (stored_bytes(tg) - len(state) * 32) / len(state),
    }


def bench_stall(folder: Path, num_bytes: int, num: int) -> dict[str, object]:
    """How long save_async keeps the training thread, against a plain copy of the state."""
    state = large_state(num_bytes)
    copy = {name: torch.empty_like(t) for name, t in state.items()}
    copies, stalls, walls = [], [], []
    budget = int(num_bytes * 1.6) + (1 << 30)
    with tidegate.CheckpointEngine(folder / "stall", host_budget_bytes=budget, keep_last=1) as engine:
        for step in range(num + 2):
            engine.wait()
            start_s = time.perf_counter()
            for name, tensor in state.items():
                copy[name].copy_(tensor)
            copies.append(time.perf_counter() - start_s)
            engine.save_async(state, step=step)
            report = engine.wait()
            if report is not None:
                stalls.append(report.stall_s)
                walls.append(report.wall_s)
    copy_s, stall_s = sorted(copies[2:])[num // 2], sorted(stalls[2:])[num // 2]
    rows = [("plain copy", copy_s), ("stall of save_async", stall_s), ("wall", sorted(walls)[num // 2])]
    print_table(("", "s"), rows)
    return {"copy_s": copies[2:], "stall_s": stalls[2:], "wall_s": walls[2:], "stall_of_copy": stall_s / copy_s}


MEMORY_CHILD = """
import resource, sys, threading, time, torch
import tidegate
from bench.save import large_state
num_bytes, budget, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
state = large_state(num_bytes)
small = {"x": torch.randn(1 << 20)}
with tidegate.CheckpointEngine(folder + "/warm", host_budget_bytes=64 << 20) as engine:
    engine.save_async(small, step=0)
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
base, peak, stop = rss(), 0, False
def watch():
    global peak
    while not stop:
        peak = max(peak, rss())
        time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
with tidegate.CheckpointEngine(folder + "/root", host_budget_bytes=budget) as engine:
    engine.save_async(state, step=1)
    engine.wait()
stop = True; thread.join()
print(peak - base)
"""


def bench_memory(folder: Path, num_bytes: int) -> dict[str, object]:
    """The most extra memory of a save, as the kernel counts it, against the host budget."""
    results: dict[str, object] = {}
    rows = []
    for budget in (num_bytes // 8, num_bytes // 2, num_bytes * 2):
        command = [sys.executable, "-c", MEMORY_CHILD, str(num_bytes), str(budget), str(folder / f"memory-{budget}")]
        peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        results[str(budget)] = {"peak_extra_bytes": peak, "peak_of_budget": peak / budget}
        rows.append((budget // 10**6, peak // 10**6, peak / budget))
    print_table(("host budget MB", "peak extra MB", "of budget"), rows)
    return results


def main() -> None:
    """Run every part and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="1 MiB instead of 1 GB: does it run?")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; default: a temporary folder")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed.*")
    num_bytes, num_tensors, num = (1 << 20, 1000, 1) if args.tiny else (10**9 // 4096 * 4096, 100_000, 5)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        results: dict[str, object] = {
            "large": bench_large(folder, num_bytes, num),
            "stall": bench_stall(folder, num_bytes, num),
            "memory": bench_memory(folder, max(num_bytes, 64 << 20)),
            "small": bench_small(folder, num_tensors),
        }
    parts = [part for part in results.values() if isinstance(part, dict)]
    summary = {key: value for part in parts for key, value in part.items() if isinstance(value, float)}
    print(json.dumps(summary, indent=1))
    path = write_results("save-cpu-tiny" if args.tiny else "save-cpu", results)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
