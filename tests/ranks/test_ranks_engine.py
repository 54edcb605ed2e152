"""CheckpointEngine of several ranks: DTensor states saved in the background, loaded at any number of ranks."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import tidegate
from tests.kit.crew import Crew
from tests.kit.sharding import TiedModel, train, training, whole_bits
from tidegate.dcp import TidegateReader


def engine_of(root: str, **options: Any) -> tidegate.CheckpointEngine:
    options = {"rank_deadline_s": 60.0, **options}
    return tidegate.CheckpointEngine(root, process_group=dist.group.WORLD, **options)


def raw_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """As a training loop has it: nothing is flattened, optimizer states are keyed by number."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "names": ("a", {1: None}, [torch.tensor(step), "x"]),
    }


def save_while_training(
    rank: int, root: str, snapshot: str, codec: str = "auto", device: str = "cpu"
) -> dict[int, dict[str, object]]:
    """Save steps 1 to 4; return the bits that they had."""
    model, optimizer = training(device=device)
    train(model, optimizer, 1)
    expected: dict[int, dict[str, object]] = {}
    with engine_of(root, snapshot=snapshot, codec=codec) as engine:
        if snapshot == "lazy":
            engine.attach(optimizer)
        for step in range(1, 5):
            state = raw_state(model, optimizer, step)
            expected[step] = whole_bits(state)
            engine.save_async(state, step=step)
            train(model, optimizer, 2)
            if snapshot != "lazy":
                model.seen.add_(1)
    return expected


def load_in_place(rank: int, root: str, step: int, device: str = "cpu") -> dict[str, object]:
    model, optimizer = training(seed=9, device=device)
    train(model, optimizer, 1)
    state = raw_state(model, optimizer, 0)
    with engine_of(root) as engine:
        loaded = engine.load(step, into=state)
    assert isinstance(loaded, dict)
    assert loaded["model"]["embedding.weight"] is state["model"]["embedding.weight"]
    return whole_bits(loaded)


@pytest.mark.parametrize("snapshot", ["host", "lazy"])
def test_saved_at_four_ranks_while_training_and_loaded_at_any_number(crew: Crew, tmp_path: Path, snapshot: str) -> None:
    expected = crew.run(4, save_while_training, str(tmp_path), snapshot)[0]
    for num_ranks in (1, 2, 3, 4, 8) if snapshot == "host" else (2,):
        for step in (1, 4):
            for loaded in crew.run(num_ranks, load_in_place, str(tmp_path), step):
                assert loaded == expected[step], (num_ranks, step)


def test_loads_without_other_ranks(crew: Crew, tmp_path: Path) -> None:
    expected = crew.run(2, save_while_training, str(tmp_path), "host")[0]
    with tidegate.CheckpointEngine(tmp_path) as engine:
        assert engine.steps() == [1, 2, 3, 4]
        state = engine.load()
        assert whole_bits(state) == expected[4]
        assert isinstance(state["model"], OrderedDict)
        assert list(state["optimizer"]["state"]) == [0, 1, 2, 3, 4]
        assert isinstance(state["names"], tuple)
        model = TiedModel()
        model.load_state_dict(state["model"])
        assert engine.load(2, part="step") == 2
        weights = engine.load(2, part="model")
        assert whole_bits({"model": weights}) == {k: v for k, v in expected[2].items() if k.startswith(".model")}


def save_and_let_go(rank: int, root: str) -> list[list[object]]:
    alive = []
    with engine_of(root, snapshot="host") as engine:
        for step in range(3):
            model, optimizer = training(seed=step)
            train(model, optimizer, 1)
            state = raw_state(model, optimizer, step)
            locals_ = [x.to_local().detach() if isinstance(x, DTensor) else x for x in model.state_dict().values()]
            held = [weakref.ref(x) for x in (*model.parameters(), model.seen, model, state["model"])]
            held += [weakref.ref(x.untyped_storage()) for x in locals_]
            engine.save_async(state, step=step)
            engine.wait()
            del model, optimizer, state, locals_
            gc.collect()
            alive.append([type(ref()) for ref in held if ref() is not None])
    return alive


def test_a_save_that_is_over_keeps_nothing_of_the_state(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(2, save_and_let_go, str(tmp_path)) == [[[], [], []]] * 2


def load_by_dcp(rank: int, root: str) -> dict[str, object]:
    model, _ = training(seed=9)
    state = {"model": dict(model.state_dict())}
    dcp.load(state, storage_reader=TidegateReader(root))
    return whole_bits(state)


def test_dcp_loads_what_the_engine_saved(crew: Crew, tmp_path: Path) -> None:
    expected = crew.run(2, save_while_training, str(tmp_path), "host")[0]
    for loaded in crew.run(3, load_by_dcp, str(tmp_path)):
        assert loaded == {k: v for k, v in expected[4].items() if k.startswith(".model")}
