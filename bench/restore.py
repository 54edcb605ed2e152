"""How fast does a checkpoint come back, and does a load wait for anything but its slowest stage?

    python -m bench.restore [--tiny] [--layers 20] [--codecs raw rans] [--folder DIR]

A trained state comes back to the GPU from files that the page cache holds (shared memory, if that has room): with
tidegate into new tensors and into tensors that are there, with torch.load (also mapped) and with
torch.distributed.checkpoint. Everything takes turns. Then the stages of tidegate's loads run alone: reading the file
with as many threads, copying its bytes to the GPU, decoding all its frames there. Beside them, where the store can,
reading right into the GPU's memory, as a load then does.

    stage = slowest stage alone / load       to be at least 0.9
    torch = torch.load / load                to be at least 5

Without a GPU it all happens in host memory, where nothing is copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import tidegate
from tidegate.restore import _NUM_THREADS as NUM_THREADS

from .folders import fast_folder
from .load_stages import Stages
from .models import train
from .plots import beside, grouped_bars
from .rig import TimeBudget, Times, arguments, interleave, print_table, say, write_results
from .states import State, digests_of, normal_state, num_bytes_of, tensors_of, trained_state

STAGE_BOUND = 0.9
TORCH_BOUND = 5.0
NUM_LAYERS = 20
HEAD = ("load", "s", "GB/s", "read s", "copy s", "decode s", "arrive s", "stage", "torch")
STAGES = ("read", "copy", "decode")

Works = dict[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Load:
    """One way to load: seconds, its stages alone where it is tidegate's, and the two ratios."""

    name: str
    times: dict[str, float | int]
    bytes_per_s: float
    stages_s: dict[str, float]
    slowest_stage_of_load: float | None
    times_torch_load: float

    def cells(self) -> tuple[object, ...]:
        """For the table."""
        stages = [self.stages_s.get(name, "") for name in (*STAGES, "arrive")]
        ratio = "" if self.slowest_stage_of_load is None else self.slowest_stage_of_load
        return (self.name, self.times["median_s"], self.bytes_per_s / 1e9, *stages, ratio, self.times_torch_load)


def write_all(state: State, folder: Path, codecs: Sequence[str]) -> None:
    """Write the state with every codec, as a file and as an engine's checkpoint, and with torch and DCP. Blocks."""
    for codec in codecs:
        tidegate.save(state, folder / f"{codec}.tg", codec=codec)
        with tidegate.CheckpointEngine(folder / codec, codec=codec) as engine:
            engine.save_async(state, step=0)
    torch.save(state, folder / "torch.pt")
    writer = dcp.FileSystemWriter(folder / "dcp", thread_count=4, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    say("written: " + ", ".join(f"{path.name} {size_of(path) / 1e9:.2f} GB" for path in sorted(folder.iterdir())))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def loads_of(folder: Path, engines: dict[str, tidegate.CheckpointEngine], device: torch.device, target: State) -> Works:
    """Every way to load, by name; each returns once the tensors may be used."""

    def torch_load(mmap: bool) -> object:
        found = torch.load(folder / "torch.pt", map_location=device, weights_only=True, mmap=mmap)
        if mmap and device.type == "cpu":
            return [tensor.clone() for tensor in tensors_of(found)]  # or nothing would be read
        return found

    def dcp_load() -> None:
        dcp.load(target, storage_reader=dcp.FileSystemReader(folder / "dcp"), no_dist=True)

    works: Works = {}
    for codec, engine in engines.items():
        works[f"{codec}, new"] = partial(tidegate.load, folder / f"{codec}.tg", map_location=device)
        works[f"{codec}, into"] = partial(engine.load, into=target)
    works["torch.load"] = lambda: torch_load(False)
    works["torch.load, mmap"] = lambda: torch_load(True)
    works["DCP, into"] = dcp_load
    return {name: _waiting(work, device) for name, work in works.items()}


def _waiting(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    def run() -> object:
        found = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found

    return run


def check_all(works: Works, target: State, digests: list[int]) -> None:
    """Load once in every way, which also warms caches and libraries, and compare what came back."""
    for name, work in works.items():
        for tensor in tensors_of(target):
            tensor.zero_()
        found = work()
        if not isinstance(found, list) and digests_of(found if isinstance(found, dict) else target) != digests:
            raise RuntimeError(f"{name} did not bring back what was saved")


def summed_up(name: str, times: Times, torch_s: float, raw_bytes: int, stages: dict[str, Times]) -> Load:
    """Put a load beside its stages and torch.load."""
    slowest_s = max((found.median_s for stage, found in stages.items() if stage in STAGES), default=0.0)
    return Load(
        name=name,
        times=times.json(),
        bytes_per_s=raw_bytes / times.median_s,
        stages_s={stage: found.median_s for stage, found in stages.items()},
        slowest_stage_of_load=slowest_s / times.median_s if stages else None,
        times_torch_load=torch_s / times.median_s,
    )


def stages_of(path: Path, device: torch.device, num: int) -> dict[str, Times]:
    """Time each stage of loading one file by itself."""
    stages = Stages(path, device, NUM_THREADS)
    found = {"read": stages.read(num)}
    if device.type == "cuda":
        found["copy"] = stages.copy(num)
    found["decode"] = stages.decode(num)
    arrive = stages.arrive(num)
    return found if arrive is None else found | {"arrive": arrive}


def bench(state: State, folder: Path, codecs: Sequence[str], num: int, budget: TimeBudget) -> list[Load]:
    """Write, load in turns, then run the stages."""
    device = tensors_of(state)[0].device
    raw_bytes = num_bytes_of(state)
    write_all(state, folder, codecs)
    digests = digests_of(state)
    with ExitStack() as stack:
        engines = {codec: stack.enter_context(tidegate.CheckpointEngine(folder / codec)) for codec in codecs}
        works = loads_of(folder, engines, device, state)
        check_all(works, state, digests)
        say("every way brings back what was saved")
        times = interleave(works, num=num, warm_up=0, budget=budget)
    say("loads are timed")
    stages = {codec: stages_of(folder / f"{codec}.tg", device, num) for codec in codecs}
    torch_s = times["torch.load"].median_s
    return [summed_up(name, t, torch_s, raw_bytes, stages.get(name.partition(",")[0], {})) for name, t in times.items()]


def made_state(is_tiny: bool, num_layers: int) -> State:
    """A trained state on a GPU; one of the same kind on a CPU."""
    if not torch.cuda.is_available():
        return normal_state(4 << 20 if is_tiny else 1 << 29, 8, "cpu")
    device = torch.device("cuda", 0)
    training = (
        train("dense-tiny", device, steps=3) if is_tiny else train("dense", device, steps=30, num_layers=num_layers)
    )
    return trained_state(training)


def main() -> None:
    """Make a state, load it in every way, write the results."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="of the model: 14 bytes × 12.6 M a layer")
    parser.add_argument("--codecs", nargs="+", help="of tidegate's checkpoints")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed.*")
    state = made_state(args.tiny, args.layers)
    codecs = args.codecs or (["raw", "zstd", "ans", "rans"] if torch.cuda.is_available() else ["raw", "zstd"])
    raw_bytes = num_bytes_of(state)
    say(f"a state of {raw_bytes / 1e9:.2f} GB in {len(tensors_of(state))} tensors")
    with fast_folder(8 * raw_bytes, args.folder) as folder:
        loads = bench(state, folder, codecs, 1 if args.tiny else 4, TimeBudget(args.seconds))
    print_table(HEAD, [load.cells() for load in loads])
    ours = [load for load in loads if load.slowest_stage_of_load is not None]
    summary = {
        "least_stage_of_load": min(load.slowest_stage_of_load or 0.0 for load in ours),
        "least_times_torch_load": min(load.times_torch_load for load in ours),
        "bounds": {"stage": STAGE_BOUND, "torch": TORCH_BOUND},
    }
    found: dict[str, object] = {"raw_bytes": raw_bytes, "threads": NUM_THREADS, "summary": summary}
    path = write_results(
        "restore-tiny" if args.tiny else "restore", found | {"loads": [asdict(load) for load in loads]}
    )
    plot(beside(path), loads)
    print(f"{summary}\nwritten to {path}", flush=True)


def plot(path: Path, loads: list[Load]) -> None:
    """Times of loads and stages."""
    series: dict[str, list[float | None]] = {"whole load": [load.times["median_s"] for load in loads]}
    series |= {f"{name} alone": [load.stages_s.get(name) for load in loads] for name in STAGES}
    title = "How fast does a checkpoint come back?"
    grouped_bars(path, title, [load.name.replace(", ", "\n") for load in loads], series, unit="seconds", log=True)


if __name__ == "__main__":
    main()
