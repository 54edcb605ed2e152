"""A state that changes between two saves, in whatever way, is saved as it is now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.crew import Crew
from tests.kit.sharding import mesh_of
from tidegate.dcp import TidegateReader

State = dict[str, Any]
NUM_RANKS = 2


def start(step: int) -> State:
    """Whole tensors; `spread` makes DTensors of those under "sharded"."""
    x = torch.arange(24.0).view(6, 4) + step
    return {
        "sharded": {"a": x, "b": x + 1, "c": (x + 2).bfloat16()},
        "rows": {0: {"exp_avg": x[0].clone(), "step": torch.tensor(step)}, 1: {"exp_avg": x[1].clone()}},
        "groups": [{"lr": 0.1 * step, "params": ["a", "b"]}],
        "step": step,
    }


CHANGES: dict[str, Callable[[State], object]] = {
    "nothing": lambda state: None,
    "value becomes a tensor": lambda state: state.update(step=torch.tensor(7)),
    "tensor becomes a value": lambda state: state["rows"][0].update(step=7),
    "value gets a tensor": lambda state: state["groups"][0].update(lr=torch.tensor(0.1)),
    "dtype": lambda state: state["sharded"].update(a=state["sharded"]["a"].double()),
    "shape": lambda state: state["sharded"].update(a=state["sharded"]["a"].view(3, 8)),
    "gradient": lambda state: state["sharded"]["b"].requires_grad_(),
    "order": lambda state: state.update(sharded=dict(reversed(state["sharded"].items()))),
    "kind": lambda state: state.update(sharded=OrderedDict(state["sharded"])),
    "type of a key": lambda state: state.update(rows={str(key): row for key, row in state["rows"].items()}),
    "moved between rows": lambda state: state["rows"][1].update(step=state["rows"][0].pop("step")),
    "removed": lambda state: state["rows"].pop(1),
    "added": lambda state: state["groups"].append({"lr": 1, "x": torch.ones(2)}),
    "sharded no more": lambda state: state.update(plain=state.pop("sharded")),
    "tied": lambda state: state["rows"][1].update(exp_avg=state["rows"][0]["exp_avg"]),
}


def spread(state: State, is_replicated: bool) -> State:
    mesh = mesh_of(NUM_RANKS)
    for name, tensor in state.get("sharded", {}).items():
        sharded = distribute_tensor(tensor.detach(), mesh, [Replicate() if is_replicated else Shard(0)])
        state["sharded"][name] = sharded.requires_grad_(tensor.requires_grad)
    return state


def save_all(rank: int, root: str) -> None:
    with tidegate.CheckpointEngine(root, process_group=dist.group.WORLD, rank_deadline_s=60.0) as engine:
        step = 0
        for change in CHANGES.values():
            for is_changed, is_replicated in ((False, False), (True, False), (True, True)):
                state = start(step)
                if is_changed:
                    change(state)
                state = spread(state, is_replicated)
                engine.save_async(state, step=step)
                _spoil(state)
                step += 1


def _spoil(state: Any) -> None:
    """Change what was staged."""
    if isinstance(state, DTensor):
        state = state.to_local()
    if isinstance(state, torch.Tensor):
        state.detach().zero_()
    elif isinstance(state, dict | list):
        for inner in state.values() if isinstance(state, dict) else state:
            _spoil(inner)


def test_after_a_change_the_state_is_saved_as_it_is(crew: Crew, tmp_path: Path) -> None:
    crew.run(NUM_RANKS, save_all, str(tmp_path))
    with tidegate.CheckpointEngine(tmp_path) as engine:
        assert len(engine.steps()) == 3 * len(CHANGES)
        for step in engine.steps():
            expected = start(step)
            if step % 3:
                list(CHANGES.values())[step // 3](expected)
            metadata = TidegateReader(tmp_path, step=step).read_metadata().state_dict_metadata.get("sharded.b")
            loaded: Any = engine.load(step)
            if isinstance(metadata, TensorStorageMetadata):
                grad = expected["sharded"]["b"].requires_grad
                assert metadata.properties.requires_grad == loaded["sharded"]["b"].requires_grad == grad
            assert_same_bits(loaded, expected, aliasing=False)
            assert_order(loaded, expected)


def assert_order(loaded: Any, expected: Any) -> None:
    assert type(loaded) is type(expected)
    if isinstance(expected, dict):
        assert list(loaded) == list(expected)
        for key, value in expected.items():
            assert_order(loaded[key], value)
