"""The demo: one run that is never interrupted, one that is killed in the middle of saves; both must end alike.

    python -m demo.run [--steps 60] [--save-every 10] [--kills 2] [--folder demo-run] [--tiny]

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

import tidegate

from .compare import compare

POLL_S = 0.0005
RUN_TIMEOUT_S = 900.0


def start(folder: Path, name: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the training script on the root `folder/name`."""
    command = [sys.executable, "-m", "demo.train", str(folder / name), "--log", str(folder / f"{name}.jsonl")]
    command += ["--steps", str(args.steps), "--save-every", str(args.save_every)]
    command += ["--size", "tiny" if args.tiny else "small"]
    return subprocess.Popen(command, text=True)


def run_to_end(folder: Path, name: str, args: argparse.Namespace) -> None:
    """Train to the last step; raise if the script fails."""
    process = start(folder, name, args)
    if process.wait(RUN_TIMEOUT_S) != 0:
        raise RuntimeError(f"training on {folder / name} ended with exit code {process.returncode}")


def kill_in_a_save(folder: Path, name: str, args: argparse.Namespace) -> bool | None:
    """Train until a save is half written that is not the first, and SIGKILL the script.

    Returns:
        Whether that save was half written still; None if the training ended before.
    """
    root = folder / name
    old_step, old_halves = last_commit(root), half_written(root)
    process = start(folder, name, args)
    while process.poll() is None:
        time.sleep(POLL_S)
        if half_written(root) - old_halves and last_commit(root) > old_step:
            process.send_signal(signal.SIGKILL)
            process.wait()
            halves = sorted(path.parent.parent.name for path in half_written(root) - old_halves)
            what = f"while {halves[-1]} was being written" if halves else "just after a commit"
            print(f"killed with SIGKILL {what}; the newest whole checkpoint is step {newest_step(root)}", flush=True)
            return bool(halves)
    if process.returncode != 0:
        raise RuntimeError(f"training on {root} ended with exit code {process.returncode}")
    return None


def last_commit(root: Path) -> int:
    """The highest committed step; -1 if there is none."""
    return max((int(path.parent.name.removeprefix("step-")) for path in root.glob("step-*/COMMIT")), default=-1)


def half_written(root: Path) -> set[Path]:
    """Files of saves that have not ended, or never will."""
    return set(root.glob("step-*/*/.*.partial"))


def newest_step(root: Path) -> object:
    """Load the newest committed checkpoint, every checksum looked at, and return the step that it holds."""
    with tidegate.CheckpointEngine(root) as engine:
        state = engine.load()
    return state["step"] if isinstance(state, dict) else None


def table(log: Path) -> str:
    """Format a run's saves."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    head = f"{'step':>6} {'raw MB':>8} {'stored MB':>10} {'ratio':>6} {'stall ms':>9} {'wall ms':>8} {'overlap':>8}"
    lines = [f"{head}  codecs"]
    lines += [
        f"{r['step']:>6} {r['raw_bytes'] / 1e6:>8.1f} {r['stored_bytes'] / 1e6:>10.1f} {r['ratio']:>6.3f} "
        f"{r['stall_s'] * 1e3:>9.1f} {r['wall_s'] * 1e3:>8.1f} {r['overlap']:>8.2f}  {r['codecs']}"
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
    parser.add_argument("--tiny", action="store_true", help="a model of 0.5 MB: does it run?")
    args = parser.parse_args()
    for name in ("whole", "killed"):
        shutil.rmtree(args.folder / name, ignore_errors=True)
        for suffix in ("tg", "jsonl"):
            (args.folder / f"{name}.{suffix}").unlink(missing_ok=True)
    args.folder.mkdir(parents=True, exist_ok=True)

    print("— a run that is never interrupted", flush=True)
    run_to_end(args.folder, "whole", args)
    print("— a run that is killed in the middle of saves", flush=True)
    num_kills = 0
    while num_kills < args.kills and (is_hit := kill_in_a_save(args.folder, "killed", args)) is not None:
        num_kills += is_hit
    run_to_end(args.folder, "killed", args)

    print(f"\nsaves of the run that was killed in {num_kills} of them:\n{table(args.folder / 'killed.jsonl')}\n")
    code = compare(args.folder / "whole.tg", args.folder / "killed.tg")
    if code == 0 and num_kills == 0:
        print("no kill hit a save: run again, with more --steps")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
