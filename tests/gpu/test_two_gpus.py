"""FSDP2 over NCCL on two GPUs: what they save while they train comes back at two ranks, at one, and without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import Replicate, Shard

import tidegate
from tests.kit.crew import Crew
from tests.kit.sharding import distributed, mesh_of, train, training, whole_bits, whole_tensors, zeros_like
from tidegate.dcp import TidegateReader, TidegateStager, TidegateWriter
from tidegate.snapshot import SnapshotMode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs; here are {torch.cuda.device_count()}"),
]
NUM_RANKS = 2


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(NUM_RANKS, "cuda")
    yield crew
    crew.close()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def save_while_training(rank: int, root: str, snapshot: SnapshotMode, codec: str) -> dict[int, dict[str, object]]:
    model, optimizer = training(device="cuda")
    train(model, optimizer, 1)
    expected: dict[int, dict[str, object]] = {}
    with tidegate.CheckpointEngine(
        root, process_group=dist.group.WORLD, snapshot=snapshot, codec=codec, rank_deadline_s=60.0
    ) as engine:
        if snapshot == "lazy":
            engine.attach(optimizer)
        for step in range(1, 4):
            state = state_of(model, optimizer, step)
            expected[step] = whole_bits(state)
            engine.save_async(state, step=step)
            train(model, optimizer, 2)
    return expected


def load_in_place(rank: int, root: str, step: int) -> dict[str, object]:
    model, optimizer = training(seed=9, device="cuda")
    train(model, optimizer, 1)
    with tidegate.CheckpointEngine(root, process_group=dist.group.WORLD, rank_deadline_s=60.0) as engine:
        return whole_bits(engine.load(step, into=state_of(model, optimizer, 0)))


@pytest.mark.parametrize("codec", ["auto", "raw", "rans"])
@pytest.mark.parametrize("snapshot", ["device", "lazy", "host"])
def test_saved_while_training_and_loaded(crew: Crew, tmp_path: Path, snapshot: str, codec: str) -> None:
    expected = crew.run(NUM_RANKS, save_while_training, str(tmp_path), snapshot, codec)[0]
    for num_ranks in (1, NUM_RANKS):
        for step in (1, 3):
            for loaded in crew.run(num_ranks, load_in_place, str(tmp_path), step):
                assert loaded == expected[step], (num_ranks, step)
    with tidegate.CheckpointEngine(tmp_path) as engine:
        assert whole_bits(engine.load(3, map_location="cpu")) == expected[3]


def save_by_dcp(rank: int, root: str, mode: Literal["copy", "lazy"]) -> None:
    model, optimizer = training(device="cuda")
    train(model, optimizer, 1)
    group = dist.new_group(backend="gloo")
    expected, futures = {}, []
    with TidegateWriter(root) as writer:
        stager = TidegateStager(writer, mode=mode, optimizers=[optimizer])
        for step in range(1, 4):
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            expected[step] = whole_bits(state)
            futures.append(
                dcp.async_save(
                    state,
                    storage_writer=writer,
                    async_stager=stager,
                    checkpoint_id=f"step-{step}",
                    process_group=group,
                )
            )
            train(model, optimizer, 2)
        for future in futures:
            future.result()
        stager.close()
    dist.barrier(group)
    for step in range(1, 4):
        weights, moments = get_state_dict(model, optimizer)
        state = zeros_like({"model": weights, "optimizer": moments, "step": step})
        dcp.load(state, storage_reader=TidegateReader(root, step=step), process_group=group)
        assert whole_bits(state) == expected[step], step
    dist.barrier(group)


@pytest.mark.parametrize("mode", ["copy", "lazy"])
def test_by_dcp(crew: Crew, tmp_path: Path, mode: str) -> None:
    crew.run(NUM_RANKS, save_by_dcp, str(tmp_path), mode)


def save_rows(rank: int, root: str) -> dict[str, object]:
    tensors = {name: tensor.cuda() for name, tensor in whole_tensors().items()}
    state = distributed(tensors, mesh_of(NUM_RANKS, device="cuda"), [Shard(0)])
    with TidegateWriter(root) as writer:
        dcp.save(state, storage_writer=writer, checkpoint_id="step-1")
    return whole_bits(state)


def load_otherwise(rank: int, root: str, placement: str) -> dict[str, object]:
    tensors = {name: tensor.cuda() for name, tensor in whole_tensors().items()}
    placements = [Shard(1) if placement == "columns" else Replicate()]
    state = zeros_like(distributed(tensors, mesh_of(NUM_RANKS, device="cuda"), placements))
    dcp.load(state, storage_reader=TidegateReader(root))
    return whole_bits(state)


@pytest.mark.parametrize("placement", ["columns", "whole"])
def test_rows_are_loaded_otherwise(crew: Crew, tmp_path: Path, placement: str) -> None:
    expected = crew.run(NUM_RANKS, save_rows, str(tmp_path))[0]
    for loaded in crew.run(NUM_RANKS, load_otherwise, str(tmp_path), placement):
        assert loaded == expected
