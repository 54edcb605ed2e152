"""dcp.save and dcp.load with our writer and reader: any number of ranks to any other, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import Replicate, Shard

from tests.kit.crew import Crew
from tests.kit.sharding import distributed, mesh_of, train, training, whole_bits, whole_tensors, zeros_like
from tidegate.dcp import TidegateReader, TidegateWriter


def save_training(rank: int, root: str) -> dict[str, object]:
    model, optimizer = training()
    train(model, optimizer, 2)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 2, "names": ["a", ("b", None)]}
    with TidegateWriter(root) as writer:
        metadata = dcp.save(state, storage_writer=writer, checkpoint_id="step-2")
    rebuilt = TidegateReader(root).read_metadata()
    assert rebuilt.state_dict_metadata == metadata.state_dict_metadata
    assert rebuilt.planner_data == metadata.planner_data
    return whole_bits(state)


def load_training(rank: int, root: str) -> dict[str, object]:
    model, optimizer = training(seed=4)
    train(model, optimizer, 1)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0, "names": ["", ()]}
    dcp.load(state, storage_reader=TidegateReader(root), checkpoint_id="step-2")
    return whole_bits(state)


def test_a_training_saved_at_four_ranks_comes_back_at_any_number(crew: Crew, tmp_path: Path) -> None:
    saved = crew.run(4, save_training, str(tmp_path))
    for num_ranks in (1, 2, 3, 4, 8):
        assert all(loaded == saved[0] for loaded in crew.run(num_ranks, load_training, str(tmp_path))), num_ranks


PLACEMENTS = {
    "rows": ((-1,), [Shard(0)]),
    "columns": ((-1,), [Shard(1)]),
    "whole": ((-1,), [Replicate()]),
    "replicated rows": ((2, -1), [Replicate(), Shard(0)]),
    "tiles": ((2, -1), [Shard(0), Shard(1)]),
    "rows of rows": ((2, -1), [Shard(0), Shard(0)]),
}


def placed(num_ranks: int, placement: str) -> dict[str, torch.Tensor]:
    sizes, placements = PLACEMENTS[placement]
    shape = [num_ranks // 2 if len(sizes) == 2 else num_ranks] if sizes[-1] == -1 else []
    return distributed(whole_tensors(), mesh_of(*sizes[:-1], *shape), list(placements))


def save_placed(rank: int, root: str, num_ranks: int, placement: str, step: int) -> None:
    with TidegateWriter(root, chunk_bytes=1 << 16) as writer:
        dcp.save({"x": placed(num_ranks, placement)}, storage_writer=writer, checkpoint_id=f"step-{step}")


def load_placed(rank: int, root: str, num_ranks: int, placement: str, step: int) -> dict[str, object]:
    state = {"x": zeros_like(placed(num_ranks, placement))}
    dcp.load(state, storage_reader=TidegateReader(root, step=step))
    return whole_bits(state)


def test_A16_every_layout_loads_into_every_other(crew: Crew, tmp_path: Path) -> None:
    expected = whole_bits({"x": whole_tensors()})
    for step, (placement, num_saving) in enumerate(zip(PLACEMENTS, (4, 4, 2, 4, 4, 4), strict=True)):
        crew.run(num_saving, save_placed, str(tmp_path), num_saving, placement, step)
    for step in range(len(PLACEMENTS)):
        for placement, num_loading in (("rows", 1), ("columns", 2), ("whole", 2), ("tiles", 4), ("rows", 8)):
            for loaded in crew.run(num_loading, load_placed, str(tmp_path), num_loading, placement, step):
                assert loaded == expected, (step, placement, num_loading)


@pytest.mark.parametrize("num_ranks", [3])
def test_A16_fewer_rows_than_ranks(crew: Crew, tmp_path: Path, num_ranks: int) -> None:
    expected = whole_bits({"x": whole_tensors()})
    crew.run(8, save_placed, str(tmp_path), 8, "rows", 0)
    for loaded in crew.run(num_ranks, load_placed, str(tmp_path), num_ranks, "rows", 0):
        assert loaded == expected


def test_without_a_process_group(tmp_path: Path) -> None:
    state = {"x": whole_tensors(), "lr": 1e-3}
    with warnings.catch_warnings(), TidegateWriter(tmp_path) as writer:
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, checkpoint_id="1")
        loaded: dict[str, Any] = {"x": zeros_like(state["x"]), "lr": 0.0}
        dcp.load(loaded, storage_reader=TidegateReader(), checkpoint_id=tmp_path / "step-1")
    assert whole_bits(loaded) == whole_bits(state)
