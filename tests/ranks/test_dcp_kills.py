"""A rank that is killed during dcp.save or async_save: the others raise in time, and nothing is committed by half."""

from __future__ import annotations

import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

import tidegate
import tidegate.dcp_watch
from tests.kit.crew import Crew, Killed, kill_me
from tests.kit.sharding import distributed, mesh_of, whole_bits, whole_tensors, zeros_like
from tests.kit.wrapping import WrappedStore
from tests.ranks.faulty import Fault, FaultStore
from tidegate.cli import main as command_line
from tidegate.dcp import TidegateReader, TidegateStager, TidegateWriter
from tidegate.errors import CheckpointWarning, RankFailedError
from tidegate.storage import Store, open_store

NUM_RANKS = 4
SILENCE_S = 1.0
NOTICED_S = 12.0
"""The silence, and what a busy machine adds; far below the time-out of the group where that is not what is tested."""

LONG_S, SHORT_S = 60.0, 5.0


def whole_state(step: int) -> dict[str, Any]:
    return {"x": whole_tensors(), "w": torch.full((40, 300), float(step)), "step": step}


def state_of(step: int) -> dict[str, Any]:
    return {**whole_state(step), "x": distributed(whole_tensors(), mesh_of(dist.get_world_size()), [Shard(0)])}


class DyingPlanner(dcp.DefaultSavePlanner):
    """Ends its process when it is asked for its plan."""

    def create_local_plan(self) -> Any:
        kill_me()


class DiesAfterCommit(WrappedStore):
    """Ends its process as soon as a step is committed; not the first."""

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        super().compare_and_put(key, data, expected=expected)
        if key.endswith("2/COMMIT"):
            kill_me()


_write_data = TidegateWriter.write_data


def die_after_writing(self: TidegateWriter, plan: Any, planner: Any) -> Any:
    _write_data(self, plan, planner)
    kill_me()


def save_twice(
    rank: int,
    root: str,
    where: str,
    victim: int,
    mode: str,
    group_timeout_s: float,
    is_first: bool = False,
    kind: str = "kill",
    deadline_s: float = 60.0,
) -> tuple[str, list[int], float]:
    """Save twice, or once; the last time a rank is killed, or stands still until another has given the save up.

    Returns:
        What this rank raised, whom it named, and how soon.
    """
    is_victim = rank == victim
    fault = Fault(where if is_victim else "", kind)
    store: Store = FaultStore(open_store(root), fault)
    if is_victim and where == "committed":
        store = DiesAfterCommit(store)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=group_timeout_s))
    writer = TidegateWriter(store, rank_silence_s=SILENCE_S, rank_deadline_s=deadline_s)
    stager = TidegateStager(writer)

    def save(step: int, planner: Any = None) -> None:
        options = {
            "storage_writer": writer, "checkpoint_id": f"step-{step}", "process_group": group, "planner": planner
        }  # fmt: skip
        if mode == "plain":
            dcp.save(state_of(step), **options)
        else:
            dcp.async_save(state_of(step), async_stager=stager, **options).result()

    if not is_first:
        save(1)
    fault.arm()
    began_s = time.monotonic()
    if kind == "stall":
        release_in = threading.Timer(deadline_s * 2, fault.is_released.set)
        release_in.start()
    try:
        with mock.patch.object(
            TidegateWriter, "write_data", die_after_writing if is_victim and where == "results" else _write_data
        ):
            save(2, DyingPlanner() if is_victim and where == "plan" else None)
    except Exception as exc:  # noqa: BLE001 - which one is what the test is about
        named = sorted(exc.failures) if isinstance(exc, RankFailedError | CheckpointException) else []
        outcome = type(exc).__name__, named, time.monotonic() - began_s
    else:
        outcome = "", [], time.monotonic() - began_s
    writer.close()
    stager.close()
    store.close()
    return outcome


def save_next(rank: int, root: str, step: int) -> None:
    with TidegateWriter(root, rank_silence_s=SILENCE_S) as writer:
        dcp.save(state_of(step), storage_writer=writer, checkpoint_id=f"step-{step}", planner=None)


def load_step(rank: int, root: str, step: int) -> dict[str, object]:
    state = zeros_like(state_of(step))
    dcp.load(state, storage_reader=TidegateReader(root, step=step))
    return whole_bits(state)


def check(crew: Crew, root: Path, outcomes: list[Any], victim: int, steps: list[int]) -> None:
    """The victim was killed and nobody else; exactly these steps are there, whole; and a fresh group can save."""
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Killed) if rank == victim else isinstance(outcome, tuple), (rank, outcome)
    assert [int(path.parent.name[5:]) for path in sorted(root.glob("step-*/COMMIT"))] == steps
    crew.run(NUM_RANKS, save_next, str(root), 3)
    if 2 not in steps:
        crew.run(NUM_RANKS, save_next, str(root), 2)
    for step in {*steps, 2, 3}:
        for loaded in crew.run(2, load_step, str(root), step):
            assert loaded == whole_bits(whole_state(step))
    assert command_line(["gc", str(root), "--min-age-s", "0"]) == 0
    with tidegate.CheckpointEngine(root) as engine:
        assert engine.steps() == sorted({*steps, 2, 3})
    names = {path.name for path in root.rglob("*") if path.is_file()}
    assert names == {"COMMIT", "manifest.json", *(f"rank-{rank:05d}.tg" for rank in range(NUM_RANKS))}
    assert len([path for path in root.glob("step-*/*") if path.is_dir()]) == len({*steps, 2, 3})


@pytest.mark.parametrize("mode", ["plain", "async"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("where", ["write", "seal"])
def test_killed_while_it_writes(crew: Crew, tmp_path: Path, where: str, victim: int, mode: str) -> None:
    """Noticed long before the group's time-out, by name, on all."""
    outcomes = crew.outcomes(NUM_RANKS, save_twice, str(tmp_path), where, victim, mode, LONG_S)
    check_noticed(tmp_path, outcomes, victim)
    check(crew, tmp_path, outcomes, victim, [1])


def test_killed_in_its_first_save(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.outcomes(NUM_RANKS, save_twice, str(tmp_path), "seal", 1, "plain", LONG_S, True)
    check_noticed(tmp_path, outcomes, 1)
    check(crew, tmp_path, outcomes, 1, [])


def check_noticed(root: Path, outcomes: list[Any], victim: int) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[:2] == ("RankFailedError", [victim]), outcome
            assert outcome[2] < NOTICED_S
    left = {path.name for path in root.glob("step-0000000002/*/*") if path.suffix != ".partial"}
    assert left <= {f"rank-{victim:05d}.tg"}, "the others have deleted what they had written"


@pytest.mark.parametrize(
    ("where", "victim"), [("plan", 0), ("plan", 3), ("results", 0), ("results", 3), ("commit", 0), ("committed", 0)]
)
def test_killed_where_only_DCP_waits(crew: Crew, tmp_path: Path, where: str, victim: int) -> None:
    """Noticed by the group, at its time-out or before."""
    outcomes = crew.outcomes(NUM_RANKS, save_twice, str(tmp_path), where, victim, "plain", SHORT_S)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[0], "no rank believes that the save went well"
            assert outcome[2] < 2 * SHORT_S + NOTICED_S
    check(crew, tmp_path, outcomes, victim, [1, 2] if where == "committed" else [1])


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_stands_still_fails_all_at_the_deadline(crew: Crew, tmp_path: Path, victim: int) -> None:
    """Its process lives; when it goes on, it hears that it is too late."""
    outcomes = crew.run(NUM_RANKS, save_twice, str(tmp_path), "write", victim, "plain", LONG_S, False, "stall", 2.0)
    for outcome in outcomes:
        assert outcome[:2] == ("RankFailedError", [victim]), outcome
        assert outcome[2] < NOTICED_S
    assert not list(tmp_path.glob("step-0000000002/**/*.tg"))
    crew.run(NUM_RANKS, save_next, str(tmp_path), 2)


def save_unreachable(rank: int, root: str) -> list[str]:
    """Rank 1 cannot reach the coordinator's board."""
    connect = tidegate.dcp_watch.connect_board

    def connect_or_not(*args: Any) -> Any:
        if rank == 1:
            raise RuntimeError("no route to host")
        return connect(*args)

    with (
        mock.patch.object(tidegate.dcp_watch, "connect_board", connect_or_not),
        mock.patch.object(tidegate.dcp_watch, "_COMING_S", 0.5),
        warnings.catch_warnings(record=True) as caught,
        TidegateWriter(root, rank_silence_s=SILENCE_S) as writer,
    ):
        warnings.simplefilter("always", CheckpointWarning)
        for step in (1, 2):
            dcp.save(state_of(step), storage_writer=writer, checkpoint_id=f"step-{step}")
    return [str(warning.message) for warning in caught if issubclass(warning.category, CheckpointWarning)]


def test_a_rank_that_cannot_reach_the_board_saves_nevertheless(crew: Crew, tmp_path: Path) -> None:
    warned = crew.run(3, save_unreachable, str(tmp_path))
    assert [len(messages) for messages in warned] == [0, 1, 0]
    assert "no route to host" in warned[1][0]
    for step in (1, 2):
        assert crew.run(2, load_step, str(tmp_path), step) == [whole_bits(whole_state(step))] * 2
