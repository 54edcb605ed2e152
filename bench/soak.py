"""Does anything grow over a thousand saves?

    python -m bench.soak [--tiny] [--saves 1000] [--megabytes 200] [--codec auto] [--seconds N] [--folder DIR]

A state of 200 MB in 400 tensors changes and is saved again and again, keeping the two newest checkpoints, to shared
memory if that has room. After every tenth save, when nothing is in flight, the process is counted: device memory as
PyTorch and as the driver see it, resident and page-locked host memory, open files, threads, and the files in the root.
The most of the first tenth of the saves is compared with the most of the last tenth: nothing may be larger, resident
memory not by more than 4 MiB, which the C allocator's free lists come and go by.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch

import tidegate

from .folders import fast_folder
from .held import in_use
from .plots import beside, lines
from .rig import arguments, print_table, say, write_results
from .states import State, normal_state, num_bytes_of, tensors_of

SLACK_BYTES = {"rss_bytes": 4 << 20}
NUM_LAYERS = 100
SAY_EVERY_SAVES = 100
HEAD = ("", "first tenth", "last tenth", "growth", "a save")

Samples = dict[str, list[int]]
"""For each thing that is counted, its samples in order; "save" numbers the save before each."""


def pinned_bytes() -> int:
    """Page-locked memory in PyTorch's own cache of it; 0 without a GPU. The engine's buffers are in RSS only."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def sample(root: Path, save: int) -> dict[str, int]:
    """Count everything now."""
    gc.collect()
    found = in_use()
    found.pop("peak_rss_bytes", None)
    found["torch_pinned_bytes"] = pinned_bytes()
    found["num_root_files"] = sum(1 for path in root.rglob("*"))
    return {"save": save, **found}


def soak(state: State, root: Path, codec: str, num_saves: int, seconds: float | None) -> Samples:
    """Save again and again; stop early where `seconds` are over. Blocks."""
    samples: Samples = {}
    every = max(1, min(10, num_saves // 20))
    end_s = time.perf_counter() + (seconds or float("inf"))
    changing = [tensors["master"] for tensors in state.values()]
    with tidegate.CheckpointEngine(root, codec=codec, keep_last=2) as engine:
        for save in range(1, num_saves + 1):
            torch._foreach_mul_(changing, 1.0001)
            engine.save_async(state, step=save)
            if save % every == 0:
                report = engine.wait()
                for name, value in sample(root, save).items():
                    samples.setdefault(name, []).append(value)
                if report is not None and (save % SAY_EVERY_SAVES == 0 or save == every):
                    say(
                        f"save {save}: wall {1e3 * report.wall_s:.0f} ms, {samples['rss_bytes'][-1] >> 20} MiB resident"
                    )
                if time.perf_counter() > end_s:
                    break
    return samples


def growth(samples: Samples) -> dict[str, dict[str, float]]:
    """The most of the first and of the last tenth of each count, and their difference in all and by save."""
    saves = samples["save"]
    tenth = max(1, len(saves) // 10)
    num_between = max(1, saves[-1] - saves[tenth - 1])
    found = {}
    for name, values in samples.items():
        if name != "save":
            first, last = max(values[:tenth]), max(values[-tenth:])
            found[name] = {"first": first, "last": last, "growth": last - first, "a_save": (last - first) / num_between}
    return found


def main() -> None:
    """Save, count, compare, write the results."""
    parser = arguments(__doc__)
    parser.add_argument("--saves", type=int, help="how many; default 1000")
    parser.add_argument("--megabytes", type=float, help="of the state; default 200")
    parser.add_argument("--codec", default="auto")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_saves = args.saves or (20 if args.tiny else 1000)
    num_bytes = int((args.megabytes or (2 if args.tiny else 200)) * 1e6)
    state = normal_state(num_bytes, NUM_LAYERS // (10 if args.tiny else 1), device)
    raw_bytes, num_tensors = num_bytes_of(state), len(tensors_of(state))
    say(f"a state of {raw_bytes / 1e6:.0f} MB in {num_tensors} tensors on {device}")
    with fast_folder(4 * raw_bytes, args.folder) as folder:
        start_s = time.perf_counter()
        samples = soak(state, folder / "root", args.codec, num_saves, args.seconds)
        took_s = time.perf_counter() - start_s
    found = growth(samples)
    print_table(HEAD, [(name, *values.values()) for name, values in found.items()])
    grew = [name for name, values in found.items() if values["growth"] > SLACK_BYTES.get(name, 0)]
    summary = {"saves": samples["save"][-1], "grew": grew, "seconds": took_s}
    results: dict[str, object] = {"summary": summary, "raw_bytes": raw_bytes, "tensors": num_tensors, "device": device}
    results |= {"codec": args.codec, "growth": found, "samples": samples}
    path = write_results("soak-tiny" if args.tiny else "soak", results, checkpoints=folder)
    plot(beside(path), samples)
    print(f"{summary}\nwritten to {path}", flush=True)


def plot(path: Path, samples: Samples) -> None:
    """Memory over saves."""
    saves = [float(save) for save in samples["save"]]
    names = {"resident": "rss_bytes", "GPU, by the driver": "device_used_bytes", "GPU, by PyTorch": "reserved_bytes"}
    series = {
        label: (saves, [value / 2**20 for value in samples[name]]) for label, name in names.items() if name in samples
    }
    title = f"Does anything grow over {samples['save'][-1]} saves?"
    lines(path, title, series, x_unit="saves", y_unit="MiB in use")


if __name__ == "__main__":
    main()
