"""Ranks that do not fit together are refused; those that do share the work evenly and write the same metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import tidegate
import tidegate.meeting
from tests.kit.crew import Crew
from tests.kit.reads import ReadingStore
from tests.kit.sharding import distributed, mesh_of, whole_bits, whole_tensors, zeros_like
from tests.kit.shared_memory import shared_memory_of
from tidegate.dcp import TidegateReader
from tidegate.errors import LoadError, RankFailedError
from tidegate.storage import open_store


def engine_of(root: str, **options: Any) -> tidegate.CheckpointEngine:
    return tidegate.CheckpointEngine(root, process_group=dist.group.WORLD, **{"rank_deadline_s": 60.0, **options})


def small(step: int) -> dict[str, Any]:
    return {"x": distributed(whole_tensors(), mesh_of(dist.get_world_size()), [Shard(0)]), "step": step}


def save(rank: int, root: str, step: int) -> None:
    with engine_of(root) as engine:
        engine.save_async(small(step), step=step).result()


def resume_but_one(rank: int, root: str, fresh: int) -> dict[int, str]:
    """One rank begins with an engine that has loaded nothing: here it forgets that it has."""
    with engine_of(root) as engine:
        engine.load(into=zeros_like(small(0)))
        if rank == fresh:
            engine._ranks.lineage = ""
        try:
            engine.save_async(small(2), step=2).result()
        except RankFailedError as exc:
            return dict(exc.failures)
    return {}


def test_a_rank_that_starts_fresh_while_others_resume_is_refused(crew: Crew, tmp_path: Path) -> None:
    crew.run(3, save, str(tmp_path), 1)
    for failures in crew.run(3, resume_but_one, str(tmp_path), 1):
        assert list(failures) == [1]
        assert "started fresh" in failures[1]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000001"]


def save_different_steps(rank: int, root: str) -> str:
    with engine_of(root, rank_deadline_s=2.0) as engine:
        try:
            engine.save_async(small(rank), step=rank).result()
        except RankFailedError as exc:
            return str(exc)
    return ""


def test_ranks_that_save_different_steps_are_refused(crew: Crew, tmp_path: Path) -> None:
    told = crew.run(2, save_different_steps, str(tmp_path))
    assert "rank 1" in told[0]
    assert "rank 0" in told[1]
    assert not list(tmp_path.rglob("COMMIT"))


def save_different_shapes(rank: int, root: str) -> str:
    with engine_of(root) as engine:
        try:
            engine.save_async({"w": torch.zeros(2 + rank)}, step=1).result()
        except RankFailedError as exc:
            return str(exc)
    return ""


def test_ranks_that_disagree_on_a_tensor_are_refused(crew: Crew, tmp_path: Path) -> None:
    for told in crew.run(2, save_different_shapes, str(tmp_path)):
        assert "disagree on w" in told


def save_replicated(rank: int, root: str) -> int:
    """A 2 × 2 mesh whose first axis replicates, plain tensors, and some that only one rank has."""
    large = {f"w{i}": torch.full((64, 32), float(i)) for i in range(12)}
    state: dict[str, Any] = {
        "sharded": distributed(large, mesh_of(2, 2), [Replicate(), Shard(0)]),
        "plain": {f"p{i}": torch.full((4096,), float(i)) for i in range(8)},
        "own": {str(rank): torch.full((3,), float(rank)), "value": rank},
    }
    with engine_of(root, codec="raw") as engine:
        return engine.save_async(state, step=1).result().raw_bytes


def test_copies_are_shared_out_by_bytes(crew: Crew, tmp_path: Path) -> None:
    sizes = crew.run(4, save_replicated, str(tmp_path))
    total = 12 * 64 * 32 * 4 + 8 * 4096 * 4 + 4 * 3 * 4
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 4096 * 4
    with tidegate.CheckpointEngine(tmp_path) as engine:
        state: Any = engine.load()
    assert sorted(state["own"]) == ["0", "1", "2", "3", "value"]
    assert all(bool((state["own"][str(rank)] == rank).all()) for rank in range(4))
    assert state["own"]["value"] == 0
    assert all(bool((state["sharded"][f"w{i}"] == i).all()) for i in range(12))


def save_three_times(rank: int, root: str) -> None:
    with engine_of(root) as engine:
        for step in (1, 2, 3):
            engine.save_async({"step": step, **small(step)}, step=step).result()


def test_metadata_is_the_same_in_every_save_of_one_structure(crew: Crew, tmp_path: Path) -> None:
    crew.run(2, save_three_times, str(tmp_path))
    readers = [TidegateReader(tmp_path, step=step) for step in (1, 2, 3)]
    found = [reader.read_metadata() for reader in readers]
    assert found[0] == found[1] == found[2]
    texts = [path.read_bytes() for path in sorted(tmp_path.rglob("manifest.json"))]
    tails = {text[text.index(b'"num_ranks"') :] for text in texts}
    assert len(tails) == 1
    assert not any(b"\x80" in text for text in texts), "JSON, and no pickle"


def change_structure(rank: int, root: str) -> None:
    """All ranks change theirs, as when an optimizer has made its first step."""
    with engine_of(root) as engine:
        for step in (1, 2, 3):
            state = small(step)
            if step > 1:
                state["more"] = distributed(whole_tensors(), mesh_of(dist.get_world_size()), [Replicate()])
            engine.save_async(state, step=step).result()


def test_a_structure_may_change_on_all_ranks(crew: Crew, tmp_path: Path) -> None:
    crew.run(2, change_structure, str(tmp_path))
    with tidegate.CheckpointEngine(tmp_path) as engine:
        for step in (1, 2, 3):
            expected = {"x": whole_tensors(), "step": step}
            if step > 1:
                expected["more"] = whole_tensors()
            assert whole_bits(engine.load(step)) == whole_bits(expected)


def load_newest(rank: int, root: str, part: str | None) -> object:
    import warnings

    with engine_of(root) as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            state: Any = engine.load(into=None if part is None else small(0)["x"], part=part)
        except LoadError as exc:
            return str(exc)
    return (state["step"] if part is None else whole_bits({"x": state})), len(caught)


def test_a_damaged_newest_checkpoint_is_passed_over_by_all_ranks(crew: Crew, tmp_path: Path) -> None:
    crew.run(2, save, str(tmp_path), 1)
    crew.run(2, save, str(tmp_path), 2)
    (damaged,) = (tmp_path / "step-0000000002").glob("*/rank-00001.tg")
    content = bytearray(damaged.read_bytes())
    content[70] ^= 1  # in the first frame's body
    damaged.write_bytes(content)
    assert crew.run(2, load_newest, str(tmp_path), None) == [(1, 1), (1, 1)]
    assert crew.run(2, load_newest, str(tmp_path), "x")[0][0] == whole_bits({"x": whole_tensors()})


def prune_at_once(rank: int, root: str, num_steps: int) -> None:
    """Each process has a run of its own in one folder: it commits and prunes beside the others."""
    with tidegate.CheckpointEngine(root, keep_last=2) as engine:
        for i in range(num_steps):
            engine.save_async({"w": torch.full((100,), float(rank))}, step=1 + i * 4 + rank)
            state = engine.load()
            assert isinstance(state, dict) and len(set(state["w"].tolist())) == 1


def test_A04_four_processes_finalise_and_prune_one_folder(crew: Crew, tmp_path: Path) -> None:
    with tidegate.CheckpointEngine(tmp_path) as engine:
        engine.save_async({"w": torch.zeros(100)}, step=0)
    crew.run(4, prune_at_once, str(tmp_path), 4)
    with tidegate.CheckpointEngine(tmp_path) as engine:
        assert 1 <= len(engine.steps()) <= 5
        assert engine.load() is not None


def commit_and_prune(rank: int, root: str) -> list[int]:
    with engine_of(root, keep_last=2) as engine:
        for step in range(1, 6):
            engine.save_async(small(step), step=step)
        engine.wait()
        dist.barrier()
        return engine.steps()


def test_A04_ranks_prune_once(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(4, commit_and_prune, str(tmp_path)) == [[4, 5]] * 4
    assert len(list(tmp_path.rglob("rank-*.tg"))) == 8


def frames_read(rank: int, root: str, num_ranks: int) -> int:
    store = ReadingStore(open_store(root))
    tensor = distributed({"w": torch.zeros(1 << 12, 64)}, mesh_of(num_ranks), [Shard(0)])
    with tidegate.CheckpointEngine(store, process_group=dist.group.WORLD) as engine:
        engine.load(into=tensor)
    store.close()
    return store.num_bytes_of(".tg")


def save_large(rank: int, root: str, num_ranks: int) -> None:
    tensor = distributed({"w": torch.randn(1 << 12, 64)}, mesh_of(num_ranks), [Shard(0)])
    with engine_of(root, codec="raw", chunk_bytes=1 << 16) as engine:
        engine.save_async(tensor, step=1).result()


@pytest.mark.parametrize("num_loading", [4, 8])
def test_only_frames_that_cover_the_box_are_read(crew: Crew, tmp_path: Path, num_loading: int) -> None:
    crew.run(2, save_large, str(tmp_path), 2)
    for num_bytes in crew.run(num_loading, frames_read, str(tmp_path), num_loading):
        assert num_bytes <= (1 << 20) // num_loading + (1 << 16) + (64 << 10)


def load_copies(rank: int, root: str) -> tuple[int, dict[str, object]]:
    store = ReadingStore(open_store(root))
    mesh = mesh_of(dist.get_world_size())
    state = zeros_like({"x": distributed(whole_tensors(), mesh, [Replicate()]), "plain": torch.zeros(1 << 15)})
    with (
        mock.patch.object(tidegate.meeting, "SHARED_MEMORY", shared_memory_of(root)),
        tidegate.CheckpointEngine(store, process_group=dist.group.WORLD) as engine,
    ):
        before = store.num_bytes_of(".tg")
        loaded = engine.load(into=state)
    store.close()
    return store.num_bytes_of(".tg") - before, whole_bits(loaded)


def save_whole(rank: int, root: str) -> None:
    mesh = mesh_of(dist.get_world_size())
    state = {"x": distributed(whole_tensors(), mesh, [Shard(0)]), "plain": torch.arange(1.0 * (1 << 15))}
    with engine_of(root, codec="raw", chunk_bytes=1 << 16) as engine:
        engine.save_async(state, step=1).result()


def test_ranks_of_one_host_read_each_frame_once(crew: Crew, tmp_path: Path) -> None:
    shared_memory = shared_memory_of(tmp_path)
    shared_memory.mkdir()
    crew.run(2, save_whole, str(tmp_path))
    stored_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.tg"))
    expected = whole_bits({"x": whole_tensors(), "plain": torch.arange(1.0 * (1 << 15))})
    outcomes = crew.run(4, load_copies, str(tmp_path))
    assert all(loaded == expected for _, loaded in outcomes)
    tails_bytes = 4 * 2 * 4096  # every rank reads every object's tail
    assert sum(num_bytes for num_bytes, _ in outcomes) <= stored_bytes + 2 * tails_bytes
    shared_memory.rmdir()  # nothing is left in it
