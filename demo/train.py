"""The training script of the demo: what a user would write. Resumes from the newest checkpoint, if there is one.

python -m demo.train ROOT --steps 60 --save-every 10 [--size small]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

import torch

import tidegate

from .model import SIZES, Size, Trainer


def new_trainer(size: Size) -> Trainer:
    """Make a trainer whose every step is the same, bit for bit, in every run on this machine."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    return Trainer(torch.device("cuda" if torch.cuda.is_available() else "cpu"), size)


def train(root: str, size: Size, num_steps: int, save_every: int, log: Path | None) -> Trainer:
    """Train to `num_steps`, saving every few steps; append each save's figures to `log`."""
    trainer = new_trainer(size)
    with tidegate.CheckpointEngine(root, keep_last=3) as engine:
        if engine.steps():
            trainer.load_state(engine.load())  # type: ignore[arg-type]
            print(f"resumed from step {trainer.step}", flush=True)
        while trainer.step < num_steps:
            loss = trainer.train_step()
            if trainer.step % save_every == 0:
                note(log, engine.wait())
                engine.save_async(trainer.state(), step=trainer.step)
                print(f"step {trainer.step:>4}  loss {loss:.3f}  saving in the background", flush=True)
        note(log, engine.wait())
    return trainer


def note(log: Path | None, report: tidegate.SaveReport | None) -> None:
    """Append a save's figures as a line of JSON."""
    if log is None or report is None:
        return
    fields = {name: value for name, value in dataclasses.asdict(report).items() if name not in ("timeline", "by_codec")}
    fields["codecs"] = "+".join(report.by_codec)
    with log.open("a") as lines:
        lines.write(json.dumps({**fields, "ratio": report.ratio, "overlap": report.overlap}) + "\n")


def main() -> None:
    """Parse the command line, train, and write the last state as one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="a folder, or s3://bucket/prefix")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--result", type=Path, help="where the last state goes; default: ROOT.tg")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trainer = train(args.root, SIZES[args.size], args.steps, args.save_every, args.log)
    tidegate.save(trainer.state(), args.result or f"{args.root.rstrip('/')}.tg")


if __name__ == "__main__":
    main()
