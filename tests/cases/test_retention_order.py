"""Which checkpoint is the newest, and which ones go: no clock and no file time has a say (A07)."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.states import filled
from tidegate.storage.local import LocalStore


def set_times(root: Path, seconds: Callable[[Path], float]) -> None:
    """Set the access and change time of everything below the root."""
    for path in root.rglob("*"):
        os.utime(path, (seconds(path), seconds(path)))


def step_of(path: Path) -> int:
    """The step that a file belongs to."""
    return next(int(part[5:]) for part in path.parts if part.startswith("step-"))


TIMES: dict[str, Callable[[Path], float]] = {
    "all alike": lambda path: 1e9,
    "reversed": lambda path: 2e9 - step_of(path),
    "in the future": lambda path: 4e9 - step_of(path),
}


@pytest.mark.parametrize("times", TIMES)
def test_A07_the_order_is_not_that_of_file_times(tmp_path: Path, times: str) -> None:
    with tidegate.CheckpointEngine(LocalStore(tmp_path, sync=False), keep_last=2) as engine:
        for step in (9800, 9900, 10000, 100_000):
            engine.save_async(filled(float(step)), step=step)
            assert engine.wait() is not None
            assert step in engine.steps(), "the one just committed stays"
            set_times(tmp_path, TIMES[times])
            assert_same_bits(engine.load(), filled(float(step)))
        assert engine.steps() == [10000, 100_000], "by number, not by name"
    with tidegate.CheckpointEngine(tmp_path) as engine:
        assert_same_bits(engine.load(), filled(100_000.0))


def test_A07_the_clock_is_set_back_between_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count()
    real = time.time
    with tidegate.CheckpointEngine(LocalStore(tmp_path, sync=False), keep_last=2) as engine:
        for step in (9800, 9900, 10000):
            back_s = 3600.0 * next(hours)
            monkeypatch.setattr(time, "time", lambda back_s=back_s: real() - back_s)
            engine.save_async(filled(float(step)), step=step)
            assert engine.wait() is not None
            stamp_s = real() - back_s
            set_times(tmp_path / f"step-{step:010d}", lambda path, stamp_s=stamp_s: stamp_s)
            assert_same_bits(engine.load(), filled(float(step)))
        assert engine.steps() == [9900, 10000]


def test_A07_after_a_rollback_the_newest_is_what_was_written_last(tmp_path: Path) -> None:
    """Training goes back from step 1000 to 400 and on from there: 600 comes after 1000."""
    for steps in ((200, 400, 600, 800, 1000), (500, 700)):
        with tidegate.CheckpointEngine(LocalStore(tmp_path, sync=False), keep_last=3) as engine:
            for step in steps:
                engine.save_async(filled(float(step)), step=step)
                assert engine.wait() is not None
                assert step in engine.steps()
                assert_same_bits(engine.load(), filled(float(step)))
    with tidegate.CheckpointEngine(tmp_path) as engine:
        assert engine.steps() == [500, 700, 1000]
        assert_same_bits(engine.load(), filled(700.0))


def test_A07_a_step_that_is_replaced_is_new_again(tmp_path: Path) -> None:
    with tidegate.CheckpointEngine(LocalStore(tmp_path, sync=False), keep_last=2) as engine:
        for step in (1, 2):
            engine.save_async(filled(float(step)), step=step)
        engine.save_async(filled(11.0), step=1, overwrite=True)
        engine.save_async(filled(3.0), step=3)
        engine.wait()
        assert engine.steps() == [1, 3]
        assert_same_bits(engine.load(1), filled(11.0))


def test_A07_keep_every_outlives_keep_last(tmp_path: Path) -> None:
    with tidegate.CheckpointEngine(LocalStore(tmp_path, sync=False), keep_last=1, keep_every=1000) as engine:
        for step in range(0, 3600, 400):
            engine.save_async(filled(float(step), num_bytes=4096), step=step)
        engine.wait()
        assert engine.steps() == [0, 2000, 3200]
