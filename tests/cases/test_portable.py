"""Written where there are GPUs, opened where there are none (A15)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import run
from tests.kit.forging import edit_manifest
from tests.kit.states import random_state

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

_LOAD = """
    import sys
    from pathlib import Path
    import torch, tidegate
    from tests.kit.bits import assert_same_bits
    from tidegate import cli

    assert not torch.cuda.is_available()
    root, expected = Path(sys.argv[1]), tidegate.load(sys.argv[2])
    with tidegate.CheckpointEngine(root) as engine:
        assert_same_bits(engine.load(), expected)
        assert_same_bits(engine.load(map_location={"cuda:0": "cpu", "cuda:1": "cpu"}), expected)
        for wrong in ("cuda", "cuda:3", {"cuda:0": "cuda:0"}):
            try:
                engine.load(map_location=wrong)
            except tidegate.ConfigError as exc:
                assert "0 CUDA devices" in str(exc), exc
            else:
                raise AssertionError(f"{wrong} was found")
    for command in ("list", "inspect", "verify"):
        assert cli.main([command, str(root)]) == 0
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("cupy", "nvidia", "kvikio")]
    assert not loaded, loaded
"""


def check_without_a_gpu(root: Path, expected: Path) -> None:
    """Load and use the commands in processes that see no GPU."""
    printed = run(_LOAD, root, expected, environment=NO_GPU)
    assert "step 1, 6 tensors" in printed
    assert "bfloat16" in printed
    assert "frames are whole" in printed


def test_A15_tensors_that_say_cuda_load_to_the_cpu(tmp_path: Path) -> None:
    """A checkpoint whose manifest names the GPUs 0 and 1 for its tensors, as one written there does."""
    state = random_state(1 << 20)
    tidegate.save(state, tmp_path / "expected.tg")
    with tidegate.CheckpointEngine(tmp_path / "root") as engine:
        engine.save_async(state, step=1)

    def name_gpus(fields: dict[str, Any]) -> None:
        assert "device" not in str(fields["specs"]), "the CPU is not named"
        for i, spec in enumerate(fields["specs"]):
            spec["device"] = f"cuda:{i % 2}"

    edit_manifest(tmp_path / "root", 1, name_gpus)
    check_without_a_gpu(tmp_path / "root", tmp_path / "expected.tg")


@pytest.mark.gpu
def test_A15_written_on_a_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    state = random_state(8 << 20, device)
    with tidegate.CheckpointEngine(tmp_path / "root") as engine:
        engine.save_async(state, step=1)
        engine.wait()
        assert_same_bits(engine.load(), state, device=False)
        assert_same_bits(engine.load(map_location={str(device): str(device)}), state)
    tidegate.save(on_cpu(state), tmp_path / "expected.tg")
    check_without_a_gpu(tmp_path / "root", tmp_path / "expected.tg")


def on_cpu(state: object) -> object:
    """The same state with its tensors on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    return [on_cpu(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("wrong", ["gpu0", "cuda:99", {"cpu": "cuda:99"}, 3, ["cpu"]])
def test_A15_a_map_location_that_is_not_here_is_refused(tmp_path: Path, wrong: object) -> None:
    tidegate.save({"x": torch.ones(3)}, tmp_path / "x.tg")
    with pytest.raises(tidegate.ConfigError, match="map_location"):
        tidegate.load(tmp_path / "x.tg", map_location=wrong)  # type: ignore[arg-type]
