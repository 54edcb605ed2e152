"""dcp.async_save with our stager: the values of the call are saved, whatever the training does meanwhile."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.kit.crew import Crew
from tests.kit.sharding import train, training, whole_bits, zeros_like
from tests.kit.stores import FailOnceStore, WrappedStore
from tidegate.dcp import TidegateReader, TidegateStager, TidegateWriter
from tidegate.errors import TornSnapshotError
from tidegate.storage import Store, StoreFullError, open_store


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def train_and_save(rank: int, root: str, mode: Literal["copy", "lazy"], cached: bool, device: str = "cpu") -> None:
    """Save steps 1 to 3 while training, load each, and compare."""
    model, optimizer = training(device=device)
    train(model, optimizer, 1)
    writer = TidegateWriter(root)
    stager = TidegateStager(writer, mode=mode, optimizers=[optimizer])
    expected: dict[int, dict[str, object]] = {}
    group = dist.new_group(backend="gloo")
    futures = []
    for step in range(1, 4):
        expected[step] = whole_bits(state_of(model, optimizer, step))
        futures.append(
            dcp.async_save(
                state_of(model, optimizer, step),
                storage_writer=writer,
                async_stager=stager,
                checkpoint_id=f"step-{step}",
                process_group=group,
                planner=DefaultSavePlanner(enable_plan_caching=cached),
            )
        )
        train(model, optimizer, 2)
        model.seen.add_(1)
    for future in futures:
        future.result()
    stager.close()
    writer.close()
    dist.barrier()
    for step in range(1, 4):
        state = zeros_like(state_of(model, optimizer, 0))
        dcp.load(state, storage_reader=TidegateReader(root, step=step))
        assert whole_bits(state) == expected[step], step
    dist.barrier()


@pytest.mark.parametrize("mode", ["copy", "lazy"])
@pytest.mark.parametrize("cached", [False, True], ids=["planned", "cached"])
def test_A01_values_of_the_call_are_saved(crew: Crew, tmp_path: Path, mode: str, cached: bool) -> None:
    crew.run(2, train_and_save, str(tmp_path), mode, cached)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"COMMIT", "manifest.json", "rank-00000.tg", "rank-00001.tg"}


def change_what_is_read(rank: int, root: str) -> str:
    model, optimizer = training()
    train(model, optimizer, 1)
    with TidegateWriter(root) as writer:
        stager = TidegateStager(writer, mode="lazy", optimizers=[optimizer])
        staged = stager.stage(state_of(model, optimizer, 1))
        with torch.no_grad():
            next(model.parameters()).add_(1)  # past the fence
        try:
            dcp.save(staged, storage_writer=writer, checkpoint_id="1")
        except CheckpointException as exc:
            return repr(sorted(type(failure[0]).__name__ for failure in exc.failures.values()))
        finally:
            stager.close()
    return "saved"


def test_a_lazy_save_whose_tensors_change_fails(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(2, change_what_is_read, str(tmp_path)) == [repr([TornSnapshotError.__name__] * 2)] * 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def fail_once(rank: int, root: str, operation: str) -> list[str]:
    """Fail on rank 1 at the first save; then save again with the same writer."""
    store = open_store(root)
    writer = TidegateWriter(_failing(store, operation) if rank == 1 else store)
    told = []
    for step in (1, 2):
        model, optimizer = training(seed=step)
        state = state_of(model, optimizer, step)
        future = dcp.async_save(
            state, storage_writer=writer, async_stager=TidegateStager(writer), checkpoint_id=str(step)
        )
        future.add_done_callback(writer.abort_if_failed)
        try:
            future.result()
            told.append("saved")
        except CheckpointException as exc:
            told.append(f"{sorted(exc.failures)}: {'no room is left' in str(exc)}")
    writer.close()
    store.close()
    return told


def _failing(store: Store, operation: str) -> WrappedStore:
    failing = FailOnceStore(store)
    failing.fail(operation, 1, StoreFullError("no room is left", errno=errno.ENOSPC))
    return failing


def test_A02_a_failure_on_one_rank_fails_all_and_leaves_nothing(crew: Crew, tmp_path: Path) -> None:
    for i, operation in enumerate(("create", "append", "seal")):
        root = tmp_path / str(i)
        for told in crew.run(3, fail_once, str(root), operation):
            assert told[0] == "[1]: True", told
            assert told[1] == "saved"
        assert {path.name for path in root.rglob("step-*")} == {"step-0000000002"}
