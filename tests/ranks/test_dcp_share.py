"""dcp.load: a frame that several ranks of one host need is read once, whoever fails, and nothing stays behind."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Replicate, Shard

import tidegate.frame_plan
import tidegate.frame_share
import tidegate.meeting
from tests.kit.crew import Crew, Killed, kill_me
from tests.kit.reads import ReadingStore
from tests.kit.sharding import distributed, mesh_of, whole_bits, whole_tensors, zeros_like
from tests.kit.shared_memory import shared_memory_of
from tests.kit.wrapping import WrappedStore
from tidegate.dcp import TidegateReader, TidegateWriter
from tidegate.meeting import Meeting
from tidegate.storage import Store, open_store

NUM_SAVING = 2
CHUNK_BYTES = 1 << 16
PLAIN = 1 << 17
STEP = 1


@pytest.fixture(autouse=True)
def memory(tmp_path: Path) -> Iterator[Path]:
    """Where the ranks share; nothing stays behind there."""
    place = shared_memory_of(tmp_path)
    place.mkdir()
    yield place
    left = list(place.iterdir())
    shutil.rmtree(place)
    assert not left


def whole_state() -> dict[str, Any]:
    return {"x": whole_tensors(), "plain": torch.arange(1.0 * PLAIN), "step": STEP}


def state_of(num_ranks: int, *, is_whole: bool) -> dict[str, Any]:
    x = distributed(whole_tensors(), mesh_of(num_ranks), [Replicate() if is_whole else Shard(0)])
    return {**whole_state(), "x": x}


def save(rank: int, root: str, host_of: tuple[str, ...] = ()) -> None:
    with on_host(rank, root, host_of), TidegateWriter(root, codec="raw", chunk_bytes=CHUNK_BYTES) as writer:
        state = state_of(dist.get_world_size(), is_whole=False)
        dcp.save(state, storage_writer=writer, checkpoint_id=f"step-{STEP}")


@contextlib.contextmanager
def on_host(rank: int, root: str, host_of: tuple[str, ...] = ()) -> Iterator[None]:
    """Make this process believe that it runs on that host; without any, on the one that it runs on."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(tidegate.meeting, "SHARED_MEMORY", shared_memory_of(root)))
        if host_of:
            stack.enter_context(mock.patch.object(tidegate.frame_share, "host_name", lambda: host_of[rank]))
        yield


def load(
    rank: int, root: str, store: Store | None = None, timeout_s: float = 30.0, is_whole: bool = True
) -> dict[str, object]:
    state = zeros_like(state_of(dist.get_world_size(), is_whole=is_whole))
    with on_host(rank, root), TidegateReader(store or root, step=STEP, share_timeout_s=timeout_s) as reader:
        dcp.load(state, storage_reader=reader)
    return whole_bits(state)


def counted_load(
    rank: int, root: str, host_of: tuple[str, ...] = (), timeout_s: float = 30.0, window_bytes: int = 1 << 30
) -> tuple[int, dict[str, object]]:
    store = ReadingStore(open_store(root))
    with on_host(rank, root, host_of), mock.patch.object(tidegate.frame_plan, "WINDOW_BYTES", window_bytes):
        loaded = load(rank, root, store, timeout_s)
    store.close()
    return store.num_bytes_of(".tg"), loaded


def stored_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.tg"))


def tails_bytes(num_ranks: int) -> int:
    """Every rank reads every object's tail, in two reads."""
    return num_ranks * NUM_SAVING * 2 * 4096


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_of_one_host_read_each_frame_once(crew: Crew, tmp_path: Path, num_ranks: int) -> None:
    crew.run(NUM_SAVING, save, str(tmp_path))
    outcomes = crew.run(num_ranks, counted_load, str(tmp_path))
    assert all(loaded == whole_bits(whole_state()) for _, loaded in outcomes)
    assert sum(num_bytes for num_bytes, _ in outcomes) <= stored_bytes(tmp_path) + tails_bytes(num_ranks)
    assert max(num_bytes for num_bytes, _ in outcomes) < stored_bytes(tmp_path), "they read by turns"


def test_a_small_window_is_enough(crew: Crew, tmp_path: Path) -> None:
    """Two frames at a time in shared memory, for three ranks that read all of eight."""
    crew.run(NUM_SAVING, save, str(tmp_path))
    began_s = time.monotonic()
    outcomes = crew.run(3, counted_load, str(tmp_path), (), 60.0, 2 * (CHUNK_BYTES + 4096))
    assert time.monotonic() - began_s < 30.0, "nobody has waited for one who waits"
    assert all(loaded == whole_bits(whole_state()) for _, loaded in outcomes)
    assert sum(num_bytes for num_bytes, _ in outcomes) <= stored_bytes(tmp_path) + tails_bytes(3)


def test_without_sharing_every_rank_reads_all(crew: Crew, tmp_path: Path) -> None:
    crew.run(NUM_SAVING, save, str(tmp_path))
    for num_bytes, loaded in crew.run(3, counted_load, str(tmp_path), (), 0.0):
        assert num_bytes >= PLAIN * 4
        assert loaded == whole_bits(whole_state())


def test_sharing_stays_inside_a_host(crew: Crew, tmp_path: Path) -> None:
    """Saved from two hosts and loaded on two others: each host reads each frame once, none trusts the other's."""
    crew.run(NUM_SAVING, save, str(tmp_path), ("a", "b"))
    for host_of in (("a", "b", "a", "b"), ("a", "a", "a", "b")):
        outcomes = crew.run(4, counted_load, str(tmp_path), host_of)
        assert all(loaded == whole_bits(whole_state()) for _, loaded in outcomes)
        for host in ("a", "b"):
            read_bytes = [num_bytes for (num_bytes, _), its in zip(outcomes, host_of, strict=True) if its == host]
            assert sum(read_bytes) <= stored_bytes(tmp_path) + tails_bytes(len(read_bytes)), (host, host_of)
            assert sum(read_bytes) >= PLAIN * 4, "nothing came from the other host"


def test_ranks_that_need_different_frames_share_what_they_have_in_common(crew: Crew, tmp_path: Path) -> None:
    crew.run(NUM_SAVING, save, str(tmp_path))
    for loaded in crew.run(4, load, str(tmp_path), None, 30.0, False):
        assert loaded == whole_bits(whole_state())


class FaultyReads(WrappedStore):
    """Fails, hangs or kills its process at the reads of frames, from the nth on.

    Args:
        inner: The store.
        nth: Which, from 1.
        kind: "fail", "kill", or "slow": every read takes long.
    """

    def __init__(self, inner: Store, nth: int, kind: str) -> None:
        super().__init__(inner)
        self._left = nth
        self._kind = kind

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        if out.nbytes > 1 << 14:  # no index
            self._left -= 1
            if self._left < 0:
                self._fault()
        super().read_into(key, offset, out)

    def _fault(self) -> None:
        if self._kind == "kill":
            kill_me()
        raise OSError(5, "this disk is broken")


def load_with_fault(rank: int, root: str, kind: str) -> object:
    """Rank 1 has a fault. Return what was loaded, or by whom it failed; and how long it took."""
    store = open_store(root)
    began_s = time.monotonic()
    try:
        loaded: object = load(rank, root, FaultyReads(store, 1, kind) if rank == 1 else store)
    except CheckpointException as exc:
        loaded = sorted(exc.failures)
    finally:
        store.close()
    return loaded, time.monotonic() - began_s


def test_what_one_rank_cannot_read_the_others_read_themselves(crew: Crew, tmp_path: Path) -> None:
    """Here only rank 1's own load fails: DCP tells all of it."""
    crew.run(NUM_SAVING, save, str(tmp_path))
    for failed, took_s in crew.run(3, load_with_fault, str(tmp_path), "fail"):
        assert failed == [1]
        assert took_s < 10.0


def read_alone(rank: int, root: str, kind: str) -> object:
    """As `load_with_fault`, but this rank's own part is looked at: what DCP does when one is gone is not ours."""
    store = open_store(root)
    state = zeros_like(whole_state())
    reader = TidegateReader(FaultyReads(store, 1, kind) if rank == 1 else store, step=STEP)
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, reader.read_metadata(), rank == 0)
    reader.set_up_storage_reader(reader.read_metadata(), rank == 0)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, plan)
    decided: list[Any] = [reader.prepare_global_plan(plans)]
    dist.broadcast_object_list(decided, src=0)
    began_s = time.monotonic()
    with on_host(rank, root):
        reader.read_data(decided[0][rank], planner).wait()
    took_s = time.monotonic() - began_s
    store.close()
    return whole_bits(state), took_s


def test_a_rank_that_is_killed_holds_no_other_up(crew: Crew, tmp_path: Path) -> None:
    crew.run(NUM_SAVING, save, str(tmp_path))
    outcomes = crew.outcomes(4, read_alone, str(tmp_path), "kill")
    assert isinstance(outcomes[1], Killed)
    for rank in (0, 2, 3):
        loaded, took_s = outcomes[rank]
        assert loaded == whole_bits(whole_state())
        assert took_s < 10.0, "its death is seen, not waited for"


def come_and_die(rank: int, root: str) -> None:
    with on_host(rank, root):
        meeting = Meeting("killed", rank, range(dist.get_world_size()))
        (meeting.folder / f"{rank}-0").write_bytes(bytes(1000))
        dist.barrier()
        kill_me()


def test_what_killed_ranks_left_goes_at_the_next_load(crew: Crew, tmp_path: Path, memory: Path) -> None:
    crew.run(NUM_SAVING, save, str(tmp_path))
    assert all(isinstance(outcome, Killed) for outcome in crew.outcomes(3, come_and_die, str(tmp_path)))
    assert list(memory.glob("*/*-0"))
    crew.run(2, load, str(tmp_path))
    assert not list(memory.iterdir())


def stall(rank: int, root: str) -> object:
    """Rank 1 takes part in the plan and then stands still, until the others have loaded."""
    reading = TidegateReader.read_data

    def read_late(self: TidegateReader, plan: Any, planner: Any) -> Any:
        if rank == 1:
            dist.barrier()
            return reading(self, plan, planner)
        done = reading(self, plan, planner)
        took.append(time.monotonic() - began_s)
        dist.barrier()
        return done

    took: list[float] = []
    began_s = time.monotonic()
    with mock.patch.object(TidegateReader, "read_data", read_late):
        loaded = load(rank, root, timeout_s=1.0)
    return loaded, took


def test_a_rank_that_stands_still_is_not_waited_for(crew: Crew, tmp_path: Path) -> None:
    crew.run(NUM_SAVING, save, str(tmp_path))
    for loaded, took in crew.run(3, stall, str(tmp_path)):
        assert loaded == whole_bits(whole_state())
        assert all(took_s < 15.0 for took_s in took)
