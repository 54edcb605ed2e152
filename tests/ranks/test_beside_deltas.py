"""Ranks that save into a root with delta chains: what they cannot do is refused, and nothing that is needed goes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.chains import bases_of, records_of, save_steps, state_at
from tests.kit.crew import Crew
from tests.kit.sharding import distributed, mesh_of, whole_bits
from tidegate.delta import DeltaPolicy
from tidegate.errors import ConfigError
from tidegate.retention import KeepBest
from tidegate.storage.local import LocalStore

LONG = DeltaPolicy(max_chain=8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path, sync=False)
    yield store
    store.close()


def engine_of(root: str, **options: Any) -> tidegate.CheckpointEngine:
    return tidegate.CheckpointEngine(root, process_group=dist.group.WORLD, **{"rank_deadline_s": 60.0, **options})


def sharded(step: int) -> dict[str, Any]:
    """A state of all ranks in which a bf16 tensor is the rounding of an fp32 one, and one is there twice."""
    master = torch.randn(1 << 16, 2, generator=torch.Generator().manual_seed(step))
    whole = {"master": master, "w": master.bfloat16(), "again": master.clone()}
    return {"model": distributed(whole, mesh_of(dist.get_world_size()), [Shard(0)]), "step": step}


def save_sharded(rank: int, root: str, steps: list[int], options: dict[str, Any], metadata: dict[int, Any]) -> Any:
    with engine_of(root, **options) as engine:
        for step in steps:
            future = engine.save_async(sharded(step), step=step, overwrite=True, metadata=metadata.get(step))
            report = future.result()
        engine.wait()
    assert report.derived_bytes == 0
    assert report.base_step is None
    return whole_bits(sharded(steps[-1]))


def try_options(rank: int, root: str, options: list[dict[str, Any]]) -> list[str]:
    """What each says that is asked for; then an engine without them must still find all ranks."""
    said = []
    for some in options:
        with pytest.raises(ConfigError) as caught:
            engine_of(root, **some)
        said.append(str(caught.value))
    with engine_of(root, derive=False, delta=None) as engine:
        engine.save_async(sharded(1), step=1).result()
    return said


def test_what_ranks_cannot_do_is_refused_at_once(crew: Crew, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {"delta": LONG}, {"derive": True}, {"derive": {"w": "master"}}, {"keep_parts": ["model"], "keep_full_last": 1},
    ]  # fmt: skip
    for said in crew.run(2, try_options, str(tmp_path), options):
        for text, name in zip(said, ("delta", "derive", "derive", "keep_parts"), strict=True):
            assert text.startswith(f"{name} does not go with process_group")
            assert text.endswith(f"leave {name} out")


def test_what_follows_from_the_rest_is_stored_and_comes_back(crew: Crew, tmp_path: Path) -> None:
    expected = crew.run(2, save_sharded, str(tmp_path), [3], {}, {})[0]
    with tidegate.CheckpointEngine(tmp_path) as engine:
        assert whole_bits(engine.load()) == expected


def check(store: LocalStore, sharded_bits: dict[int, Any]) -> None:
    """All that is listed loads, and no step has objects that nothing needs."""
    with tidegate.CheckpointEngine(store) as engine:
        for step in engine.steps():
            if step in sharded_bits:
                assert whole_bits(engine.load(step)) == sharded_bits[step]
            else:
                assert_same_bits(engine.load(step), state_at(step))
    needed = {(record.step, record.attempt) for record in records_of(store).values()}
    needed |= {base for record in records_of(store).values() for base in record.bases}
    found = {tuple(stat.key.split("/")[:2]) for stat in store.list() if not stat.key.endswith("COMMIT")}
    assert found == {(f"step-{step:010d}", attempt) for step, attempt in needed}


def test_ranks_prune_no_base_of_a_living_difference(crew: Crew, tmp_path: Path, store: LocalStore) -> None:
    save_steps(store, [0, 1, 2, 3], LONG)
    assert bases_of(store)[3] == [2, 1, 0]
    bits = {10: crew.run(2, save_sharded, str(tmp_path), [10], {"keep_last": 2}, {})[0]}
    assert sorted(records_of(store)) == [0, 1, 2, 3, 10], "3 is one of the last two, and needs the others"
    check(store, bits)
    bits[11] = crew.run(3, save_sharded, str(tmp_path), [11], {"keep_last": 2}, {})[0]
    assert sorted(records_of(store)) == [10, 11]
    check(store, bits)


def test_ranks_replace_a_base(crew: Crew, tmp_path: Path, store: LocalStore) -> None:
    """What the differences need stays under the step that is another's now, and goes with the last of them."""
    save_steps(store, [0, 1, 2], LONG)
    bits = {1: crew.run(2, save_sharded, str(tmp_path), [1], {}, {})[0]}
    assert sorted(records_of(store)) == [0, 1, 2]
    check(store, bits)
    crew.run(2, save_sharded, str(tmp_path), [2], {"keep_last": 1}, {})
    assert sorted(records_of(store)) == [2]
    with tidegate.CheckpointEngine(store) as engine:
        assert engine.load()["step"] == 2  # type: ignore[index]
    assert {stat.key[:15] for stat in store.list()} == {"step-0000000002"}


def test_the_best_of_ranks_stay(crew: Crew, tmp_path: Path, store: LocalStore) -> None:
    losses = {1: {"loss": 2.0}, 2: {"loss": 0.5}, 3: {"loss": 1.0}, 4: {"loss": 3.0}}
    crew.run(2, save_sharded, str(tmp_path), [1, 2, 3, 4], {"keep_last": 1, "keep_best": KeepBest("loss")}, losses)
    assert sorted(records_of(store)) == [2, 4]


def test_one_process_after_ranks(crew: Crew, tmp_path: Path, store: LocalStore) -> None:
    """It begins with a full checkpoint and without a note; of older ones it reduces its own alone."""
    bits = {1: crew.run(2, save_sharded, str(tmp_path), [1], {}, {})[0]}
    options: dict[str, Any] = {"keep_parts": ["model", "step"], "keep_full_last": 1, "delta": LONG}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tidegate.CheckpointEngine(store, **options) as engine:
            for step in (2, 3, 4):
                engine.save_async(state_at(step), step=step)
                report = engine.wait()
                assert report is not None
                assert not [note for note in report.notes if "full" in note]
                assert report.base_step == (None if step == 2 else step - 1)
            assert whole_bits(engine.load(1)) == bits[1]
    with tidegate.CheckpointEngine(store, keep_parts=["model", "step"], keep_full_last=1) as engine:
        for step in (5, 6, 7):
            engine.save_async(state_at(step), step=step)
            engine.wait()
        assert whole_bits(engine.load(1)) == bits[1]
        for step in (2, 3, 4):
            assert set(engine.load(step)) == {"model", "step"}, step  # type: ignore[call-overload]
        assert_same_bits(engine.load(7), state_at(7))
