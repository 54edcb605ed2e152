"""The mixin for torchtitan, on a manager of the same shape: torchtitan itself is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from demo.torchtitan import TidegateCheckpoints
from tests.kit.crew import Crew
from tests.kit.sharding import train, training, whole_bits


class ModelWrapper:
    """As torchtitan's: a Stateful over the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return dict(self.model.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict({name: state[name] for name in self.model.state_dict()})


class CheckpointManager:
    """What torchtitan's does with `dcp_save`, `dcp_load` and `_find_load_step`, and nothing else of it."""

    def __init__(self, folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder = folder
        self.states = {"model": ModelWrapper(model)}
        self.optimizer = optimizer
        self.pg = dist.new_group(backend="gloo")
        self.save_future: Any = None
        self._model = model

    def save(self, step: int, async_mode: str) -> None:
        if self.save_future is not None:
            self.save_future.result()
        self.save_future = self.dcp_save(self._flattened(step), f"{self.folder}/step-{step}", async_mode)

    def load(self) -> int:
        step = self._find_load_step()
        state = self._flattened(0)
        self.dcp_load(state, f"{self.folder}/step-{step}", from_hf=False, from_quantized=False)
        return step

    def close(self) -> None:
        if self.save_future is not None:
            self.save_future.result()
        self._close()

    def _flattened(self, step: int) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self._model, self.optimizer)
        return {**self.states["model"].state_dict(), "optimizer": optimizer, "train_state": {"step": step}}

    def dcp_save(self, *args: Any) -> Any:
        raise AssertionError("the mixin comes first")

    def dcp_load(self, *args: Any, **options: Any) -> None:
        raise AssertionError("the mixin comes first")

    def _find_load_step(self, folder: str = "") -> int:
        raise AssertionError("the mixin comes first")

    def _close(self) -> None:
        dist.destroy_process_group(self.pg)


class TidegateCheckpointManager(TidegateCheckpoints, CheckpointManager):
    keep_last = 2


def train_and_resume(rank: int, root: str, async_mode: str) -> None:
    model, optimizer = training()
    train(model, optimizer, 1)
    manager = TidegateCheckpointManager(root, model, optimizer)
    for step in (1, 2, 3):
        expected = whole_bits(dict(model.state_dict()))
        manager.save(step, async_mode)
        train(model, optimizer, 1)
    manager.close()
    dist.barrier()
    fresh, other = training(seed=8)
    train(fresh, other, 1)
    again = TidegateCheckpointManager(root, fresh, other)
    assert again.load() == 3
    again.close()
    assert whole_bits(dict(fresh.state_dict())) == expected


def test_a_manager_saves_and_resumes(crew: Crew, tmp_path: Path) -> None:
    for async_mode in ("disabled", "async"):
        crew.run(2, train_and_resume, str(tmp_path / async_mode), async_mode)
        steps = sorted(path.parent.name for path in (tmp_path / async_mode).glob("step-*/COMMIT"))
        assert steps == ["step-0000000002", "step-0000000003"]
