"""Kill the demo's training again and again: `OMP_NUM_THREADS=1 python -m tests.faults.kill_loop ROOT --kills 200`.

This process imports everything once and forks a child a kill, before it has any thread of its own. A child resumes from
the newest checkpoint, trains and saves as demo/train.py does, and tells through a pipe what it loads, what it begins to
save and what is committed. It is killed at a random instant. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

import tidegate
from demo.model import SIZES, Trainer
from tests.faults.rig import CHUNK, all_keys, held_keys
from tests.kit.bits import physical_bytes
from tidegate.cli import main as run_cli
from tidegate.storage import LocalStore

LOADED, BEGUN, COMMITTED, FAILED, DONE = "loaded", "begun", "committed", "failed", "done"
KEEP_LAST = 2
MAX_RUN_S = 0.15
EARLY_FRACTION = 0.1
CHILD_TIMEOUT_S = 60.0

Message = tuple[str, int, str]


def digest_of(state: object) -> str:
    """Hash a state: keys, types, dtypes, shapes and every bit."""
    found = hashlib.sha256()

    def add(x: object) -> None:
        found.update(type(x).__name__.encode())
        if isinstance(x, torch.Tensor):
            found.update(f"{x.dtype}{tuple(x.shape)}".encode() + physical_bytes(x.detach()))
        elif isinstance(x, dict):
            for key, value in x.items():
                add(key)
                add(value)
        elif isinstance(x, list | tuple):
            for value in x:
                add(value)
        else:
            found.update(repr(x).encode())

    add(state)
    return found.hexdigest()


def train(root: Path, tell: Callable[[str, int, str], None]) -> None:
    """Resume, and train for ever, each save in the background of the next step."""
    trainer = Trainer(torch.device("cpu"), SIZES["tiny"])
    engine = tidegate.CheckpointEngine(root, keep_last=KEEP_LAST, chunk_bytes=CHUNK)
    if engine.steps():
        state = engine.load()
        tell(LOADED, state["step"], digest_of(state))  # type: ignore[index]
        trainer.load_state(state)  # type: ignore[arg-type]
    else:
        tell(LOADED, -1, "")
    while True:
        trainer.train_step()
        report = engine.wait()
        if report is not None:
            tell(COMMITTED, report.step, "")
        tell(BEGUN, trainer.step, digest_of(trainer.state()))
        engine.save_async(trainer.state(), step=trainer.step)


def clean_up(root: Path, tell: Callable[[str, int, str], None]) -> None:
    """Load every step that is left, save once more in peace, collect garbage, and look at what remains."""
    with tidegate.CheckpointEngine(root, keep_last=KEEP_LAST, chunk_bytes=CHUNK) as engine:
        for step in engine.steps():
            state = engine.load(step)
            tell(LOADED, state["step"], digest_of(state))  # type: ignore[index]
        newest = engine.load()
        tell(LOADED, newest["step"], digest_of(newest))  # type: ignore[index]
        engine.save_async(newest, step=newest["step"] + 1)  # type: ignore[index]
        engine.wait()
        num_steps = len(engine.steps())
    store = LocalStore(root)
    num_leftovers = len(all_keys(store) - held_keys(store))
    with contextlib.redirect_stdout(sys.stderr):
        if run_cli(["gc", str(root), "--min-age-s", "0"]) != 0:
            raise RuntimeError("gc failed")
    left = all_keys(store) - held_keys(store)
    if left:
        raise RuntimeError(f"gc left {sorted(left)}")
    tell(DONE, num_steps, str(num_leftovers))


class Child:
    """A forked child that runs a function, and its messages."""

    def __init__(self, run: Callable[[Path, Callable[[str, int, str], None]], None], root: Path) -> None:
        self._read_end, write_end = os.pipe()
        self._text = b""
        self.pid = os.fork()
        if self.pid == 0:
            self._be_child(run, root, write_end)
        os.close(write_end)

    @staticmethod
    def _be_child(run: Callable[[Path, Callable[[str, int, str], None]], None], root: Path, write_end: int) -> None:
        def tell(kind: str, step: int, text: str) -> None:
            os.write(write_end, json.dumps([kind, step, text]).encode() + b"\n")

        try:
            torch.set_num_threads(1)  # torch makes its pool anew after a fork, and not safely from several threads
            run(root, tell)
        except BaseException:  # noqa: BLE001 - told to the parent; a forked child must not return
            tell(FAILED, 0, traceback.format_exc()[-3000:])
        finally:
            os._exit(0)

    def messages(self, deadline_s: float) -> Iterator[Message]:
        """Yield messages until the child has ended or `time.monotonic()` reaches the deadline."""
        while True:
            while b"\n" in self._text:
                line, _, self._text = self._text.partition(b"\n")
                yield tuple(json.loads(line))
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._read_end], [], [], left_s)[0]:
                return
            chunk = os.read(self._read_end, 1 << 16)
            if not chunk:
                return
            self._text += chunk

    def kill(self) -> None:
        """SIGKILL, now."""
        os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> list[Message]:
        """Wait for its end, and return the messages that nobody has read."""
        os.waitpid(self.pid, 0)
        rest = list(self.messages(time.monotonic() + 1))
        os.close(self._read_end)
        return rest


@dataclass(slots=True)
class Ledger:
    """What must be true of every load: it is a step that was committed, or one whose commit was not told in time."""

    digests: dict[int, str] = field(default_factory=dict)
    acknowledged: int = -1
    in_flight: int | None = None
    num_loads: int = 0
    num_new: int = 0
    errors: list[str] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """Check one message against what is known."""
        kind, step, text = message
        if kind == FAILED:
            self.errors.append(text)
        elif kind == COMMITTED:
            self.acknowledged, self.in_flight = step, None
        elif kind == BEGUN:
            self.in_flight = step
            if self.digests.setdefault(step, text) != text:
                self.errors.append(f"step {step} was trained again and is another")
        elif kind == LOADED:
            self._loaded(step, text)

    def _loaded(self, step: int, text: str) -> None:
        self.num_loads += 1
        if step not in (self.acknowledged, self.in_flight):
            self.errors.append(f"loaded step {step}; {self.acknowledged} was committed, {self.in_flight} in flight")
        elif step >= 0 and self.digests[step] != text:
            self.errors.append(f"step {step} came back changed")
        self.num_new += step == self.in_flight
        self.acknowledged, self.in_flight = step, None


def kill_once(root: Path, rng: random.Random, ledger: Ledger) -> bool:
    """Run a child for a random while and kill it; whether that hit a save."""
    is_early = rng.random() < EARLY_FRACTION
    delay_s = rng.random() * MAX_RUN_S
    child = Child(train, root)
    if not is_early:  # the clock starts when it has loaded
        for message in child.messages(time.monotonic() + CHILD_TIMEOUT_S):
            ledger.take(message)
            if message[0] in (LOADED, FAILED):
                break
        else:
            ledger.errors.append(f"a child loaded nothing in {CHILD_TIMEOUT_S} s")
    for message in child.messages(time.monotonic() + delay_s):
        ledger.take(message)
    child.kill()
    for message in child.reap():
        ledger.take(message)
    return ledger.in_flight is not None


def main() -> None:
    """Kill, look, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    Trainer(torch.device("cpu"), SIZES["tiny"]).train_step()  # imports what torch imports at the first step
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("there are threads already, so forking is not safe: set OMP_NUM_THREADS=1")
    rng = random.Random(args.seed)
    ledger = Ledger()
    num_in_a_save = 0
    for _ in range(args.kills):
        num_in_a_save += kill_once(args.root, rng, ledger)
        if ledger.errors:
            break
    last = Child(clean_up, args.root)
    rest = list(last.messages(time.monotonic() + CHILD_TIMEOUT_S)) + last.reap()
    for kind, step, text in rest[-2:]:  # the newest, and the summary; the steps before it are checked below
        ledger.take((kind, step, text))
    for kind, step, text in rest:
        if kind == LOADED and ledger.digests.get(step) != text:
            ledger.errors.append(f"step {step} came back changed at the end")
    summary = [message for message in rest if message[0] == DONE]
    print(
        json.dumps(
            {
                "kills": args.kills,
                "in_a_save": num_in_a_save,
                "loads": ledger.num_loads,
                "commits_not_told": ledger.num_new,
                "last_step": ledger.acknowledged,
                "steps_left": summary[0][1] if summary else None,
                "leftovers_before_gc": int(summary[0][2]) if summary else None,
                "errors": ledger.errors,
            }
        )
    )


if __name__ == "__main__":
    main()
