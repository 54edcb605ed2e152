"""Checkpoints of every version so far load for ever, bit for bit: tests/golden/make_checkpoints.py wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tidegate
from tests.golden.classes import ALLOWED
from tests.golden.describe import Describer
from tests.golden.make_checkpoints import FOLDER, everything, few
from tests.kit.bits import assert_same_bits
from tidegate.cli import main as run_cli

VERSIONS = sorted(path for path in FOLDER.iterdir() if path.is_dir())
HELD: dict[str, tuple[str, Callable[[], object]]] = {
    "3": ("few", few),
    "7": ("everything", everything),
    "latest": ("everything", everything),
    "one.tg": ("everything", everything),
}


def load(folder: Path, what: str) -> object:
    """Load a step, the latest, or the file of a version."""
    with torch.serialization.safe_globals(ALLOWED):
        if what == "one.tg":
            return tidegate.load(folder / what)
        with tidegate.CheckpointEngine(folder / "root") as engine:
            return engine.load("latest" if what == "latest" else int(what))


def read_expected(folder: Path, name: str) -> tuple[object, dict[str, bytes]]:
    """What a checkpoint held when it was written."""
    fields = json.loads((folder / f"{name}.json").read_text())
    octets = np.load(folder / f"{name}.npz", allow_pickle=False)["octets"].tobytes()
    return fields["state"], {place: octets[at : at + size] for place, (at, size) in fields["contents"].items()}


def test_there_are_golden_checkpoints() -> None:
    assert "v1" in [path.name for path in VERSIONS]


@pytest.mark.parametrize("what", HELD)
@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_a_golden_checkpoint_is_what_it_was(folder: Path, what: str) -> None:
    """By structure and bytes that were written down beside it, without tidegate."""
    structure, contents = read_expected(folder, HELD[what][0])
    describer = Describer()
    found = json.loads(json.dumps(describer.describe(load(folder, what))))
    assert found == structure
    assert describer.contents.keys() == contents.keys()
    for place, octets in contents.items():
        assert describer.contents[place] == octets, place


@pytest.mark.parametrize("what", HELD)
def test_the_newest_golden_checkpoint_is_what_its_maker_makes(what: str) -> None:
    """Ties, strides and Python types too, by the comparer that all tests use."""
    assert_same_bits(HELD[what][1](), load(VERSIONS[-1], what))


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_golden_checkpoints_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["list"], ["verify", "--step", "3"], ["verify"], ["inspect"]):
        assert run_cli([arguments[0], str(folder / "root"), *arguments[1:]]) == 0
    assert run_cli(["verify", str(folder / "one.tg")]) == 0
    capsys.readouterr()
    steps = sorted(path.name for path in (folder / "root").iterdir())
    assert steps == ["step-0000000003", "step-0000000007"], "loading and looking write nothing"
