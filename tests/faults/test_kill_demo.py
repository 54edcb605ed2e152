"""SIGKILL at 200 random instants of the demo's training: no committed checkpoint is lost, no bit is changed (A05)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SEED

NUM_KILLS = 200
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_200_kills(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.faults.kill_loop",
        str(tmp_path),
        "--kills",
        str(NUM_KILLS),
        "--seed",
        str(SEED),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # a process that forks must have no threads yet
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["errors"] == []
    assert found["kills"] == NUM_KILLS
    assert found["in_a_save"] > NUM_KILLS // 10, "too few kills hit a save to show anything"
    assert found["loads"] > NUM_KILLS // 2
    assert found["last_step"] >= 10, "hardly anything was trained between the kills"
    assert found["leftovers_before_gc"] > 0, "a killed save leaves something, which gc has removed"
    assert found["steps_left"] == 2, "keep_last has caught up"
