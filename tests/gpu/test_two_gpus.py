"""FSDP2 over NCCL on two GPUs: what they save while they train comes back at two ranks, at one, and without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

import tidegate
from tests.kit.crew import Crew
from tests.kit.sharding import distributed, mesh_of, whole_bits, whole_tensors, zeros_like
from tests.ranks.test_dcp_async import train_and_save
from tests.ranks.test_ranks_engine import load_in_place, save_while_training
from tidegate.dcp import TidegateReader, TidegateWriter

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


@pytest.mark.parametrize("codec", ["auto", "raw", "rans"])
@pytest.mark.parametrize("snapshot", ["device", "lazy", "host"])
def test_saved_while_training_and_loaded(crew: Crew, tmp_path: Path, snapshot: str, codec: str) -> None:
    expected = crew.run(NUM_RANKS, save_while_training, str(tmp_path), snapshot, codec, "cuda")[0]
    for num_ranks in (1, NUM_RANKS):
        for step in (1, 4):
            for loaded in crew.run(num_ranks, load_in_place, str(tmp_path), step, "cuda"):
                assert loaded == expected[step], (num_ranks, step)
    with tidegate.CheckpointEngine(tmp_path) as engine:
        assert whole_bits(engine.load(4, map_location="cpu")) == expected[4]


@pytest.mark.parametrize("mode", ["copy", "lazy"])
def test_by_dcp(crew: Crew, tmp_path: Path, mode: str) -> None:
    crew.run(NUM_RANKS, train_and_save, str(tmp_path), mode, True, "cuda")


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
