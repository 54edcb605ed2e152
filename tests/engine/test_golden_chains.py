"""Chains of every version so far load for ever, bit for bit: tests/golden/make_chains.py wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tidegate
from tests.engine.test_golden import read_expected
from tests.golden.describe import Describer
from tests.golden.make_chains import FOLDER, STEPS, state
from tests.kit.bits import assert_same_bits
from tidegate.cli import main as run_cli

VERSIONS = sorted(path for path in FOLDER.iterdir() if path.is_dir())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_a_golden_chain_is_what_it_was(folder: Path, step: int) -> None:
    """By structure and bytes that were written down beside it, without tidegate."""
    structure, contents = read_expected(folder, f"step-{step}")
    with tidegate.CheckpointEngine(folder / "root") as engine:
        found = engine.load(step)
        part = engine.load(step, part="bf16")
    describer = Describer()
    assert json.loads(json.dumps(describer.describe(found))) == structure
    assert describer.contents == contents
    assert_same_bits(found, state(step))
    assert_same_bits(part, state(step)["bf16"])
    assert run_cli(["verify", str(folder / "root"), "--step", str(step)]) == 0


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_it_has_everything_in_it(folder: Path) -> None:
    manifests = [json.loads(path.read_text()) for path in folder.rglob("manifest.json")]
    assert {item["rule"] for fields in manifests for item in fields["derived"]} == {"same", "bf16-of-f32", "f16-of-f32"}
    kinds = {kind for fields in manifests if "delta" in fields for _, kind, _ in fields["delta"]["chunks"]}
    assert kinds == {"xor", "difference"}
