"""The demo: one run that is never interrupted, one that is killed in the middle of saves; both must end bit for bit alike.

    python -m demo.run [--steps 60] [--save-every 10] [--kills 3] [--folder demo-run]

Exits with 1 if a single bit differs, or if no kill hit a save.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import tidegate

POLL_S = 0.0005
RUN_TIMEOUT_S = 900.0


def start(folder: Path, name: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the training script on the root `folder/name`."""
    command = [sys.executable, "-m", "demo.train", str(folder / name), "--log", str(folder / f"{name}.jsonl")]
    command += ["--steps", str(args.steps), "--save-every", str(args.save_every)]
    return subprocess.Popen(command, text=True)


def run_to_end(folder: Path, name: str, args: argparse.Namespace) -> None:
    """Train to the last step; raise if the script fails."""
    process = start(folder, name, args)
    if process.wait(RUN_TIMEOUT_S) != 0:
        raise RuntimeError(f"training on {folder / name} ended with exit code {process.returncode}")


def kill_in_a_save(folder: Path, name: str, args: argparse.Namespace) -> bool:
    """Train until a save is half written that is not the first, and SIGKILL the script; False if it ended before."""
    root = folder / name
    process = start(folder, name, args)
    committed = len(list(root.glob("step-*/COMMIT")))
    while process.poll() is None:
        time.sleep(POLL_S)
        is_first = len(list(root.glob("step-*/COMMIT"))) <= committed
        if not is_first and any(root.glob("step-*/*/.*.partial")):
            process.send_signal(signal.SIGKILL)
            process.wait()
            half = [p.parent.parent.name for p in root.glob("step-*/*/.*.partial")]
            newest = newest_step(root)
            print(f"killed with SIGKILL while {', '.join(half) or 'a step'} was being written; newest whole: {newest}")
            return True
    return False


def newest_step(root: Path) -> object:
    """Load the newest committed checkpoint, every checksum looked at, and return the step that it holds."""
    with tidegate.CheckpointEngine(root) as engine:
        state = engine.load()
    return state["step"] if isinstance(state, dict) else None


def differing(a: object, b: object, path: str = "state") -> list[str]:
    """Name what differs between two states, tensors compared by their bytes."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        bits = [t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        return [] if same and torch.equal(*bits) else [path]
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        return [d for key in a for d in differing(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return [d for i in range(len(a)) for d in differing(a[i], b[i], f"{path}.{i}")]
    return [] if type(a) is type(b) and a == b else [path]


def table(log: Path) -> str:
    """Format a run's saves."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [f"{'step':>6} {'raw MB':>8} {'stored MB':>10} {'ratio':>6} {'stall ms':>9} {'wall ms':>8} {'overlap':>8}"]
    lines += [
        f"{r['step']:>6} {r['raw_bytes'] / 1e6:>8.1f} {r['stored_bytes'] / 1e6:>10.1f} {r['ratio']:>6.3f} "
        f"{r['stall_s'] * 1e3:>9.1f} {r['wall_s'] * 1e3:>8.1f} {r['overlap']:>8.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the demo; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("demo-run"))
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)

    print("— a run that is never interrupted", flush=True)
    run_to_end(args.folder, "whole", args)
    print("— a run that is killed in the middle of saves", flush=True)
    num_kills = sum(kill_in_a_save(args.folder, "killed", args) for _ in range(args.kills))
    run_to_end(args.folder, "killed", args)

    print(f"\nsaves of the run that was killed {num_kills} times:\n{table(args.folder / 'killed.jsonl')}\n")
    found = differing(tidegate.load(args.folder / "whole.tg"), tidegate.load(args.folder / "killed.tg"))
    if found:
        print(f"DIFFERENT: {', '.join(found)}")
        return 1
    if num_kills == 0:
        print("no kill hit a save: run again with more --steps")
        return 1
    print("the weights of both runs are equal, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
