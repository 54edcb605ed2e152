"""What does a save of a trained state cost on a GPU, for each codec and snapshot mode?

    python -m bench.gpu_save [--tiny] [--folder DIR]

Ceilings in the same run: one device-to-device copy of the state, its copy to pinned memory, and a raw write to the same
folder. Every checkpoint is loaded back to the GPU and compared bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

import tidegate

from .models import Training
from .networks import Size
from .rig import print_table, repeat, write_results
from .save import raw_write

CODECS = ("raw", "zstd", "ans", "rans")
MODES = ("device", "lazy", "host")
HEAD = ("codec", "mode", "stall ms", "snapshot ms", "encode s", "write s", "wall s", "overlap", "ratio")


def tensors_of(state: object) -> list[torch.Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, torch.Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for child in children for tensor in tensors_of(child)]


def same_bits(a: object, b: object) -> bool:
    """Whether two states' tensors are equal byte for byte."""
    pairs = zip(tensors_of(a), tensors_of(b), strict=True)
    return all(torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in pair)) for pair in pairs)


def ceilings(state: object, folder: Path, num: int) -> dict[str, float]:
    """Copies of the state, and a raw write of as many bytes, in seconds."""
    tensors = [t.detach() for t in tensors_of(state) if t.is_cuda]
    copies = [torch.empty_like(t) for t in tensors]
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)

    def copy_on_device() -> None:
        torch._foreach_copy_(copies, tensors)
        torch.cuda.synchronize()

    pinned = torch.empty(min(num_bytes, 1 << 30), dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(pinned.numel(), dtype=torch.uint8, device="cuda")

    def copy_to_host() -> None:
        pinned.copy_(flat, non_blocking=True)
        torch.cuda.synchronize()

    view = memoryview(pinned.numpy()).cast("B")  # type: ignore[arg-type]
    write = repeat(lambda: raw_write(view, folder / "ceiling"), num=num)
    return {
        "bytes": num_bytes,
        "device_copy_s": repeat(copy_on_device, num=num).median_s,
        "host_copy_s": repeat(copy_to_host, num=num).median_s * num_bytes / pinned.numel(),
        "raw_write_bytes_per_s": pinned.numel() / write.median_s,
    }


def bench(training: Training, folder: Path, codec: str, mode: str, num: int) -> dict[str, object]:
    """Save `num` times after two saves that warm up; medians, and the last timeline."""
    reports: list[tidegate.SaveReport] = []
    with tidegate.CheckpointEngine(folder / f"{codec}-{mode}", codec=codec, snapshot=mode, keep_last=1) as engine:  # type: ignore[arg-type]
        engine.attach(training.optimizer)
        for step in range(num + 2):
            engine.save_async(training.state(), step=step)
            report = engine.wait()
            if report is not None:
                reports.append(report)
        exact = same_bits(engine.load(map_location="cuda"), training.state())
    kept = reports[2:]
    if not exact:
        raise RuntimeError(f"{codec} in {mode} mode did not come back bit for bit")
    names = ("stall_s", "snapshot_s", "encode_s", "write_s", "wall_s", "overlap", "ratio", "fence_s")
    found: dict[str, object] = {name: statistics.median(getattr(r, name) for r in kept) for name in names}
    found |= {"walls_s": [r.wall_s for r in kept], "stalls_s": [r.stall_s for r in kept], "exact": exact}
    last = kept[-1]
    found |= {"raw_bytes": last.raw_bytes, "stored_bytes": last.stored_bytes, "notes": last.notes}
    found |= {"peak_device_bytes": last.peak_device_bytes, "peak_host_bytes": last.peak_host_bytes}
    found["timeline"] = [[s.chunk, s.stage, round(s.start_s, 5), round(s.end_s, 5)] for s in last.timeline][:400]
    return found


def component_ratios(training: Training, folder: Path) -> dict[str, dict[str, float]]:
    """Raw over stored bytes by role and codec."""
    found: dict[str, dict[str, float]] = {}
    for role, tensors in training.components().items():
        found[role] = {c: tidegate.save(tensors, folder / f"{role}.tg", codec=c).ratio for c in CODECS}
    print_table(("component", *CODECS), [(role, *ratios.values()) for role, ratios in found.items()])
    return found


def main() -> None:
    """Train, save, compare, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    width, num_layers, steps, num = (128, 2, 3, 1) if args.tiny else (1024, 16, 100, 5)
    training = Training(Size(width, num_layers), torch.device("cuda"))
    for _ in range(steps):
        training.train_step()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        limits = ceilings(training.state(), folder, num)
        runs = {f"{c}/{m}": bench(training, folder, c, m, num) for c in CODECS for m in MODES}
        ratios = component_ratios(training, folder)
    rows = []
    for key, r in runs.items():
        values = [float(r[n]) for n in ("stall_s", "snapshot_s", "encode_s", "write_s", "wall_s", "overlap", "ratio")]  # type: ignore[arg-type]
        rows.append((*key.split("/"), values[0] * 1e3, values[1] * 1e3, *values[2:]))
    print_table(HEAD, rows)
    print({key: f"{value:.4g}" for key, value in limits.items()})
    results = {"parameters": training.num_parameters, "steps": steps, "ceilings": limits, "ratios": ratios}
    results["saves"] = runs
    print(f"written to {write_results('gpu-save-tiny' if args.tiny else 'gpu-save', results)}")


if __name__ == "__main__":
    main()
