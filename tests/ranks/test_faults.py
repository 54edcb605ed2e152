"""Any failure of any rank at any step fails the save on all, in time, and leaves nothing; the next save works."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import tidegate
from tests.kit.crew import Crew, Killed
from tests.kit.sharding import distributed, mesh_of, whole_bits
from tests.ranks.faulty import STALL_LIMIT_S, STEPS, Fault, FaultState, FaultStore
from tidegate.cli import main as command_line
from tidegate.errors import RankFailedError
from tidegate.storage import open_store

NUM_RANKS = 3
DEADLINE_S = 4.0
LATEST_S = 4.0 * DEADLINE_S
"""Deadline, twice the grace, and what a busy machine adds."""


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((7, 300), float(step)), "b": torch.arange(5.0) + step}


def state_of(step: int) -> dict[str, Any]:
    return {**whole_state(step), "x": distributed(tensors(step), mesh_of(NUM_RANKS), [Shard(0)])}


def whole_state(step: int) -> dict[str, Any]:
    return {"x": tensors(step), "step": step, "plain": torch.ones(3) * step}


def save_with_fault(rank: int, root: str, step: str, bad_rank: int, kind: str, first: int) -> tuple[list[int], float]:
    """Save three times; the second time a rank fails. Return which ranks were named, and how long that took."""
    fault = Fault(step if rank == bad_rank else "", kind)
    store = open_store(root)
    named: list[int] = []
    with (
        fault.installed(),
        tidegate.CheckpointEngine(
            FaultStore(store, fault),
            process_group=dist.group.WORLD,
            snapshot="host",
            rank_deadline_s=DEADLINE_S if kind == "stall" else 60.0,
            rank_silence_s=1.5,
        ) as engine,
    ):
        engine.save_async(state_of(first), step=first).result()
        dist.barrier()
        fault.arm()
        began_s = time.monotonic()
        topic = {"plan": f"save of step {first + 1}/plan", "stage": f"save of step {first + 1}/written"}.get(step)
        releasing = _release_when_given_up(engine, fault, topic) if topic is not None else None
        try:
            engine.save_async(FaultState(state_of(first + 1), fault), step=first + 1).result()
        except tidegate.CheckpointError as exc:
            named = sorted(exc.failures) if isinstance(exc, RankFailedError) else [rank]
        took_s = time.monotonic() - began_s
        fault.is_released.set()
        if kind != "kill":
            _drain(engine)
            if releasing is not None:
                releasing.join()
            dist.barrier()
            engine.save_async(state_of(first + 2), step=first + 2).result()
        else:
            _drain(engine)
    store.close()
    return named, took_s


def _drain(engine: tidegate.CheckpointEngine) -> None:
    """Wait until the failed save is over on this rank too."""
    job = engine._driver.job
    assert job is None or job.finished.wait(STALL_LIMIT_S)
    for _ in range(2):
        try:
            engine.wait()
        except tidegate.SaveError:
            continue
        return


def _release_when_given_up(engine: tidegate.CheckpointEngine, fault: Fault, topic: str) -> Any:
    """Where the training thread itself stands still, another must see that the others have given up."""
    import threading

    council = engine._ranks.council

    def watch() -> None:
        deadline_s = time.monotonic() + LATEST_S
        while not fault.is_released.wait(0.01) and time.monotonic() < deadline_s:
            if council._is_there(f"{topic}/reply/{council.rank}"):
                fault.is_released.set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def check_store(root: Path, steps: list[int]) -> None:
    """Exactly these steps are there, whole, and nothing else."""
    with tidegate.CheckpointEngine(root) as engine:
        assert engine.steps() == steps
        for step in steps:
            assert whole_bits(engine.load(step)) == whole_bits(whole_state(step)), step
    attempts = [path for path in root.glob("step-*/*") if path.is_dir()]
    assert len(attempts) == len(steps), attempts
    assert not list(root.rglob("*.partial"))


def bad_ranks(step: str) -> tuple[int, ...]:
    return (0,) if step == "commit" else (0, 2)


@pytest.mark.parametrize("kind", ["raise", "full"])
def test_a_rank_that_fails_fails_all(crew: Crew, tmp_path: Path, kind: str) -> None:
    for i, step in enumerate(STEPS):
        for bad_rank in bad_ranks(step):
            root = tmp_path / f"{i}-{bad_rank}"
            for named, _ in crew.run(NUM_RANKS, save_with_fault, str(root), step, bad_rank, kind, 1):
                assert named == [bad_rank], (step, bad_rank)
            check_store(root, [1, 3])


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_stands_still_fails_all_at_the_deadline(crew: Crew, tmp_path: Path, step: str) -> None:
    bad_rank = 0 if step in ("commit", "write") else 2
    outcomes = crew.run(NUM_RANKS, save_with_fault, str(tmp_path), step, bad_rank, "stall", 1)
    for rank, (named, took_s) in enumerate(outcomes):
        assert took_s < LATEST_S, (rank, took_s)
        assert named == [bad_rank] or rank == bad_rank, (rank, named)
    steps = [1, 3]
    if step == "commit":  # the coordinator stood still between the decision and COMMIT: it alone knows the outcome
        steps = [1, 2, 3]
    check_store(tmp_path, steps)


def load_and_save(rank: int, root: str, step: int) -> dict[str, object]:
    with tidegate.CheckpointEngine(root, process_group=dist.group.WORLD) as engine:
        loaded = whole_bits(engine.load())
        engine.save_async(state_of(step), step=step, overwrite=True).result()
    return loaded


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_is_killed_fails_all(crew: Crew, tmp_path: Path, step: str) -> None:
    bad_rank = 0 if step in ("commit", "encode") else 2
    outcomes = crew.outcomes(NUM_RANKS, save_with_fault, str(tmp_path), step, bad_rank, "kill", 1)
    for rank, outcome in enumerate(outcomes):
        if rank == bad_rank:
            assert isinstance(outcome, Killed)
        else:
            assert not isinstance(outcome, BaseException | Killed), outcome
            assert outcome[0] == [bad_rank]
    for loaded in crew.run(NUM_RANKS, load_and_save, str(tmp_path), 2):
        assert loaded == whole_bits(whole_state(1))
    assert command_line(["gc", str(tmp_path), "--min-age-s", "0"]) == 0
    check_store(tmp_path, [1, 2])
