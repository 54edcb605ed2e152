"""Pickles in place of every part of a checkpoint: nothing is run, whatever the command (A23)."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import tidegate
from tests.hostile.refusing import state
from tidegate.cli import main as run_cli


class Touch:
    """A pickle of this touches a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_pickles_in_place_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is run, by any command (A23)."""
    touched = tmp_path / "touched"
    poison = pickle.dumps(Touch(touched), protocol=4)
    torch.save(Touch(touched), tmp_path / "poison.pt")
    for octets in (poison, (tmp_path / "poison.pt").read_bytes(), poison + bytes(-len(poison) % 4096)):
        for victim in ("COMMIT", "manifest.json", "rank-00000.tg"):
            root = tmp_path / f"{victim}-{len(octets)}"
            with tidegate.CheckpointEngine(root) as engine:
                engine.save_async(state(), step=1).result(60)
                path = next(root.rglob(victim))
                path.write_bytes(octets)
                for step in (1, "latest"):
                    with pytest.raises(tidegate.CorruptCheckpointError):
                        engine.load(step)  # type: ignore[arg-type]
            assert [run_cli([name, str(root)]) for name in ("inspect", "verify")] == [1, 1]
            run_cli(["list", str(root)])
        (tmp_path / "one.tg").write_bytes(octets)
        with pytest.raises(tidegate.CorruptCheckpointError):
            tidegate.load(tmp_path / "one.tg")
        assert [run_cli([name, str(tmp_path / "one.tg")]) for name in ("inspect", "verify")] == [1, 1]
    capsys.readouterr()
    assert not touched.exists()
    pickle.loads(poison)
    assert touched.exists(), "the poison works"
