"""Do the memory budgets hold, and does a state thirty times as large as they come back bit for bit?

    python -m bench.memory [--tiny] [--gigabytes 30] [--folder DIR]

A state of 30 GB on the GPU that an attached optimizer owns is saved lazily, with 1 GiB of device memory and 1 GiB of
host memory, to shared memory if that has room. Peaks are measured from outside: what PyTorch reserved, what the driver
gave away (nvCOMP and CuPy included), what the kernel counts as resident (page-locked memory included), each above what
it was before the engine was made; libraries and kernels have been loaded by small saves before. Then the tensors are
zeroed in place, loaded from the checkpoint, and compared by digests that were taken before the save.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import tidegate

from .folders import fast_folder
from .held import Watch
from .plots import beside, grouped_bars
from .rig import arguments, print_table, require_cuda, say, write_results
from .states import State, digests_of, normal_state, num_bytes_of, tensors_of

GIB = 1 << 30
BUDGET_BYTES = GIB
CODECS = ("ans", "auto")
BYTES_A_LAYER = 1 << 30
SMALL_BYTES = 8 << 20
HEAD: tuple[str, ...] = (
    "codec",
    "raw GB",
    "stored GB",
    "wall s",
    "GB/s",
    "load s",
    "torch MiB",
    "device MiB",
    "reported",
    "host MiB",
)
HEAD += ("reported", "exact")


@dataclass(frozen=True, slots=True)
class Case:
    """One codec: times in seconds, peaks in bytes above what was in use before, as reported and as measured."""

    codec: str
    raw_bytes: int
    stored_bytes: int
    wall_s: float
    load_s: float
    snapshot: str
    torch_reserved_bytes: int
    device_bytes: int
    reported_device_bytes: int
    host_bytes: int
    reported_host_bytes: int
    load_host_bytes: int
    load_device_bytes: int
    is_exact: bool
    by_codec: dict[str, int]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether every peak is within its budget."""
        return max(self.torch_reserved_bytes, self.device_bytes, self.host_bytes) <= BUDGET_BYTES

    def cells(self) -> tuple[object, ...]:
        """For the table."""
        device = (self.torch_reserved_bytes >> 20, self.device_bytes >> 20, self.reported_device_bytes >> 20)
        host = (self.host_bytes >> 20, self.reported_host_bytes >> 20)
        times = (self.wall_s, self.raw_bytes / self.wall_s / 1e9, self.load_s)
        return (self.codec, self.raw_bytes / 1e9, self.stored_bytes / 1e9, *times, *device, *host, self.is_exact)


def save_within(state: State, root: Path, codec: str) -> tuple[tidegate.SaveReport, Watch]:
    """Save lazily under the budgets, watched from before the engine is made. Blocks."""
    optimizer = torch.optim.SGD([tensor.requires_grad_() for tensor in tensors_of(state)], lr=0.0)
    with (
        Watch() as watch,
        tidegate.CheckpointEngine(
            root, codec=codec, snapshot="lazy", device_budget_bytes=BUDGET_BYTES, host_budget_bytes=BUDGET_BYTES
        ) as engine,
    ):
        engine.attach(optimizer)
        report = engine.save_async(state, step=0).result()
    return report, watch


def load_back(state: State, root: Path, digests: list[int]) -> tuple[float, bool, Watch]:
    """Zero the tensors, fill them from the checkpoint, and compare. Returns seconds, whether all are as they were."""
    with torch.no_grad():
        for tensor in tensors_of(state):
            tensor.zero_()
    with Watch() as watch, tidegate.CheckpointEngine(root) as engine:
        start_s = time.perf_counter()
        engine.load(into=state)
        torch.cuda.synchronize()
        load_s = time.perf_counter() - start_s
    return load_s, digests_of(state) == digests, watch


def bench(state: State, digests: list[int], folder: Path, codec: str) -> Case:
    """Save and load with one codec."""
    root = folder / codec
    report, saving = save_within(state, root, codec)
    say(f"{codec}: saved in {report.wall_s:.1f} s")
    load_s, is_exact, loading = load_back(state, root, digests)
    say(f"{codec}: loaded in {load_s:.1f} s, {'exact' if is_exact else 'NOT what was saved'}")
    shutil.rmtree(root)
    return Case(
        codec=codec,
        raw_bytes=report.raw_bytes,
        stored_bytes=report.stored_bytes,
        wall_s=report.wall_s,
        load_s=load_s,
        snapshot=report.snapshot,
        torch_reserved_bytes=saving.reserved_bytes,
        device_bytes=saving.device_bytes,
        reported_device_bytes=report.peak_device_bytes,
        host_bytes=saving.host_bytes,
        reported_host_bytes=report.peak_host_bytes,
        load_host_bytes=loading.host_bytes,
        load_device_bytes=loading.device_bytes,
        is_exact=is_exact,
        by_codec={name: total.raw_bytes for name, total in report.by_codec.items()},
        notes=report.notes,
    )


def warm_up(folder: Path, codec: str, device: torch.device) -> None:
    """Save and load a small state in the same way: libraries and kernels stay loaded. Blocks."""
    small = normal_state(SMALL_BYTES, 4, device)
    save_within(small, folder / "small", codec)
    load_back(small, folder / "small", [])
    shutil.rmtree(folder / "small")


def main() -> None:
    """Make the state, save and load it with each codec, write the results after each."""
    parser = arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, default=30.0, help="of the state")
    args = parser.parse_args()
    device = require_cuda()
    num_bytes = 64 << 20 if args.tiny else int(args.gigabytes * 1e9)
    state = normal_state(num_bytes, max(1, num_bytes // BYTES_A_LAYER), device)
    digests = digests_of(state)
    say(f"a state of {num_bytes_of(state) / 1e9:.1f} GB in {len(tensors_of(state))} tensors")
    cases: list[Case] = []
    with fast_folder(num_bytes + SMALL_BYTES, args.folder) as folder:
        for codec in CODECS:
            warm_up(folder, codec, device)
        for codec in CODECS:
            cases.append(bench(state, digests, folder, codec))
            print_table(HEAD, [case.cells() for case in cases])
            summary = {"fits": all(c.fits for c in cases), "is_exact": all(c.is_exact for c in cases)}
            found: dict[str, object] = {"budget_bytes": BUDGET_BYTES, "summary": summary}
            found["cases"] = [asdict(c) for c in cases]
            path = write_results("memory-tiny" if args.tiny else "memory", found, checkpoints=folder)
    plot(beside(path), cases)
    print(f"{summary}\nwritten to {path}", flush=True)


def plot(path: Path, cases: list[Case]) -> None:
    """Peaks beside the budget."""
    names = {
        "device, PyTorch's reserve": "torch_reserved_bytes",
        "device, the driver's word": "device_bytes",
        "device, reported": "reported_device_bytes",
        "host, resident": "host_bytes",
        "host, reported": "reported_host_bytes",
    }
    series = {label: [getattr(case, name) / 2**20 for case in cases] for label, name in names.items()}
    title = f"What a save of {cases[0].raw_bytes / 1e9:.0f} GB holds at most"
    limits = {"budget": BUDGET_BYTES / 2**20}
    grouped_bars(path, title, [case.codec for case in cases], series, unit="peak (MiB)", limits=limits)


if __name__ == "__main__":
    main()
