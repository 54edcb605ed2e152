"""Saving from a signal handler, whatever it has interrupted (A08)."""

from __future__ import annotations

import concurrent.futures
import itertools
import linecache
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import FORKS, TIMEOUT_S, forked
from tests.kit.states import filled
from tests.kit.stores import GateStore, SlowStore
from tidegate.storage.local import LocalStore

CHUNK = 1 << 16
_STEPPED = (os.path.dirname(tidegate.__file__) + os.sep, threading.__file__, concurrent.futures._base.__file__)
GRACE_S = 20.0
LAST_STEP = 10**6


def save_and_leave(engine: tidegate.CheckpointEngine, state: object) -> bool:
    """What a handler does when the scheduler says that time is up; whether it could save."""
    try:
        engine.save_async(state, step=LAST_STEP)
        engine.wait(GRACE_S)
    except tidegate.SaveError as exc:
        assert "signal handler that interrupted save_async" in str(exc)
        with pytest.raises(tidegate.SaveError):
            engine.wait()
        return False
    return True


# At random times


def train(root: Path, ready: Connection, number: int) -> None:
    """Save in a loop until a signal comes; save once more in its handler, or right after it."""
    torch.set_num_threads(1)
    state = filled(0.0, num_tensors=1, num_bytes=1 << 20)  # one, so that no handler finds it half filled
    is_over = False

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal is_over
        is_over = True
        if save_and_leave(engine, state):
            os._exit(3)  # the handler's save is committed, or the step before it
        # else it has interrupted save_async: the loop sees the flag

    store = SlowStore(LocalStore(root, sync=False), bytes_per_s=20e6)
    engine = tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec="raw", keep_last=2)
    signal.signal(number, on_signal)
    ready.send("training")
    for step in itertools.count(1):
        for tensor in state.values():
            tensor.fill_(step)
        engine.save_async(state, step=step)
        if is_over:
            engine.close()
            os._exit(4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_A08_a_signal_at_a_random_time(tmp_path: Path, number: signal.Signals) -> None:
    outcomes = []
    for i in range(8):
        root = tmp_path / str(i)
        here, there = FORKS.Pipe()
        with forked(train, root, there, number) as process:
            assert here.recv() == "training"
            process.join(random.uniform(0.05, 0.2))
            assert process.pid is not None
            os.kill(process.pid, number)
            process.join(30)  # then a scheduler would send SIGKILL
            outcomes.append(process.exitcode)
        assert outcomes[-1] in (3, 4), "it has ended within its grace"
        with tidegate.CheckpointEngine(root) as engine:
            steps = engine.steps()
            assert (steps[-1] == LAST_STEP) == (outcomes[-1] == 3)
            for step in steps:
                state = engine.load(step)
                assert isinstance(state, dict)
                value = float(state["t0"][0])
                assert step in (value, LAST_STEP)
                assert_same_bits(state, filled(value, num_tensors=1, num_bytes=1 << 20))


# At every line


class Stepper:
    """Calls something before the nth line of our own, or of the locks below it, in the thread that it is started in.

    A signal handler runs between two instructions of the main thread; this puts it before each line in turn.

    Args:
        nth: Which line, from 1.
        interrupt: What is called there.
        before_blocking: What is called whenever the thread may be about to block.
    """

    def __init__(self, nth: int, interrupt: Callable[[], None], before_blocking: Callable[[], None]) -> None:
        self.where = ""
        self._nth = nth
        self._interrupt = interrupt
        self._before_blocking = before_blocking
        self._num_lines = 0

    def __enter__(self) -> Stepper:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        return self._line if frame.f_code.co_filename.startswith(_STEPPED) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        if event == "line":
            self._num_lines += 1
            if self._num_lines == self._nth:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self._interrupt()
            if "acquire" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
                self._before_blocking()
        return self._line


Operation = Callable[[tidegate.CheckpointEngine, tidegate.SaveFuture, int], None]


def wait(engine: tidegate.CheckpointEngine, future: tidegate.SaveFuture, step: int) -> None:
    engine.wait()


def save(engine: tidegate.CheckpointEngine, future: tidegate.SaveFuture, step: int) -> None:
    engine.save_async({"x": torch.full((10,), float(step))}, step=step)


def wait_staged(engine: tidegate.CheckpointEngine, future: tidegate.SaveFuture, step: int) -> None:
    future.wait_staged()


def result(engine: tidegate.CheckpointEngine, future: tidegate.SaveFuture, step: int) -> None:
    while not future.done():
        future.exception()
    future.result()


def step_optimizer(engine: tidegate.CheckpointEngine, future: tidegate.SaveFuture, step: int) -> None:
    with engine.fence():
        pass


def sweep(root: Path, progress: Connection, operation: Operation, first: int, stride: int) -> None:
    """Interrupt an operation before its lines, while a save that is held up is in flight."""
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gate = GateStore(LocalStore(root, sync=False))
    with tidegate.CheckpointEngine(gate, chunk_bytes=CHUNK, snapshot="lazy", keep_last=3) as engine:
        engine.attach(optimizer)
        for nth in itertools.count(first, stride):
            saved: list[int] = []

            def interrupt(nth: int = nth, saved: list[int] = saved) -> None:
                gate.open()
                try:
                    engine.save_async({"x": torch.full((10,), 3 * nth + 2.0)}, step=3 * nth + 2)
                    saved.append(3 * nth + 2)
                    if nth % 2:  # or leave it in flight
                        engine.wait(GRACE_S)
                except tidegate.SaveError as exc:
                    assert "signal handler that interrupted save_async" in str(exc)

            gate.shut()
            future = engine.save_async({"x": weight, "step": nth}, step=3 * nth)
            with Stepper(nth, interrupt, gate.open) as stepper:
                progress.send(f"line {nth}")
                operation(engine, future, 3 * nth + 1)
            gate.open()
            engine.wait()
            if not stepper.where:
                progress.send("done")
                return
            progress.send(stepper.where)
            for step in saved + ([3 * nth + 1] if operation is save else []):
                if step in engine.steps():
                    assert_same_bits(engine.load(step), {"x": torch.full((10,), float(step))})
            assert engine.steps()


@pytest.mark.parametrize(
    ("operation", "stride"), [(wait, 1), (wait_staged, 1), (result, 1), (step_optimizer, 1), (save, 9)]
)
def test_A08_a_signal_before_every_line(tmp_path: Path, operation: Operation, stride: int) -> None:
    """Every ninth of a save, which has hundreds: another ninth with another seed."""
    here, there = FORKS.Pipe()
    lines: list[str] = []
    with forked(sweep, tmp_path, there, operation, random.randint(1, stride), stride) as process:
        there.close()
        while not lines or lines[-1] != "done":
            assert here.poll(GRACE_S), f"it hangs after {lines[-2:]}"
            lines.append(here.recv())
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    assert len(lines) > 5
