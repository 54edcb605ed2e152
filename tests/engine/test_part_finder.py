"""A part finder finds what a fresh one finds, whatever has changed since, faster, and keeps nothing alive."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.engine.nested import CHANGES, Maker, State
from tidegate import local_part
from tidegate.flatten import flatten
from tidegate.local_part import LocalState, PartFinder
from tidegate.shard_plan import Share


@pytest.fixture(scope="module", autouse=True)
def rank_1_of_4() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def geometry(x: torch.Tensor) -> tuple[object, ...]:
    return type(x), x.dtype, x.shape, x.stride(), x.storage_offset(), x.data_ptr(), x.requires_grad


def assert_same(found: LocalState, fresh: LocalState) -> None:
    """Assert that two finders have found the same in one state."""
    ours, theirs = found.local, fresh.local
    assert ours.part == theirs.part and repr(ours.part) == repr(theirs.part)
    assert repr(ours.names) == repr(theirs.names)  # not `==`: a step of a path may be 1 or True
    assert ours.names.digest() == theirs.names.digest() == ours.part.names
    assert list(map(geometry, found.shards)) == list(map(geometry, fresh.shards))
    assert len(set(map(id, found.shards))) == len(found.shards)
    for mine, other in ((found.values, fresh.values), (found.wrappers, fresh.wrappers)):
        assert list(map(id, mine)) == list(map(id, other))
    share = Share([(0, 1)] * len(theirs.part.classes), {}, list(range(0, len(fresh.values), 2)))
    for shared, num_shards in ((None, len(found.shards)), (share, len(share.kept(theirs.names.class_of)))):
        items, expected = found.items(shared), fresh.items(shared)
        assert list(items) == list(expected)
        assert len(items) == num_shards + len(fresh.values if shared is None else share.values)
        for item, other in zip(items.values(), expected.values(), strict=True):
            is_shard = any(item is shard for shard in found.shards)
            assert item is other or (is_shard and geometry(item) == geometry(other))  # type: ignore[arg-type]


def assert_right(found: LocalState, state: State) -> None:
    """Assert that a finder has taken each name's own tensor."""
    flat = flatten(state)
    names = found.local.names
    for name, shard in zip(names.tensors, found.shards, strict=True):
        tensor = flat.tensors[name]
        with torch.no_grad():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert geometry(shard)[1:-1] == geometry(local)[1:-1] and not shard.requires_grad
    assert list(map(id, found.values)) == [id(flat.values[name]) for name in names.values]
    assert list(map(id, found.wrappers)) == [id(x) for x in flat.tensors.values() if isinstance(x, DTensor)]


def outcome(finder: PartFinder, state: Any) -> LocalState | tuple[str, str]:
    try:
        return finder.find(state)
    except Exception as exc:  # noqa: BLE001 - whatever it is, a fresh finder must raise the same
        return type(exc).__name__, str(exc)


def check(finder: PartFinder, state: Any) -> None:
    for _ in range(2):  # after the change, and when all is as it was
        found, fresh = outcome(finder, state), outcome(PartFinder(), state)
        if isinstance(found, LocalState) and isinstance(fresh, LocalState):
            assert_same(found, fresh)
            assert_right(found, state)
        else:
            assert found == fresh


@pytest.mark.parametrize("name", CHANGES)
def test_after_a_change_it_finds_as_afresh(name: str) -> None:
    for seed in range(6):
        chance = random.Random(f"{name} {seed}")
        finder, state = PartFinder(), Maker(chance).state()
        for _ in range(4):
            check(finder, state)
            CHANGES[name](state, chance)
        check(finder, state)


@given(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=6), st.integers(0, 10_000))
@settings(deadline=None, max_examples=100)
def test_after_any_changes_it_finds_as_afresh(names: list[str], seed: int) -> None:
    chance = random.Random(seed)
    finder, state = PartFinder(), Maker(chance).state()
    check(finder, state)
    for name in names:
        CHANGES[name](state, chance)
        check(finder, state)


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=50)
def test_after_another_state_it_finds_as_afresh(seed: int) -> None:
    chance = random.Random(seed)
    finder = PartFinder()
    for _ in range(4):
        check(finder, {"x": Maker(chance).container(0)})
    check(finder, [torch.ones(1)])


@pytest.mark.parametrize(("old", "new"), [((1, 2), (True, 2)), (0.0, -0.0), (1, True), (1, "1"), (1, 1.0), ("0", 0)])
def test_keys_that_are_equal_are_not_the_same_key(old: object, new: object) -> None:
    for nested in (lambda row: row, lambda row: {"x": row}, lambda row: {"x": {"y": [1, row]}}):
        finder = PartFinder()
        states = [nested({key: torch.ones(2), "more": 1}) for key in (old, new)]
        for state in (*states, *states):
            check(finder, state)


def trained(chance: random.Random, step: int) -> State:
    """A state as trainers make it: other containers and tensors at each call, some of them the same."""
    cuts: list[Placement] = [Shard(0)]
    mesh = init_device_mesh("cpu", (4,))
    names = [f"layers.{i}.w" for i in range(5)]
    weights = [DTensor.from_local(torch.randn(2, 3), mesh, cuts, run_check=False) for _ in names]
    rows = {name: {"exp_avg": x.detach(), "step": torch.tensor(step)} for name, x in zip(names, weights, strict=True)}
    metadata = OrderedDict((name, {"version": 1}) for name in names)
    model = OrderedDict(zip(names, weights, strict=True))
    model._metadata = metadata  # type: ignore[attr-defined]
    return {
        "model": model,
        "optimizer": {"state": rows, "param_groups": [{"lr": chance.random(), "params": names, "betas": (0.9, 0.95)}]},
        "by number": {0: torch.randn(2), 1: {"a": torch.ones(1), "lr": chance.random()}},
        "rows by number": {0: {1: torch.randn(2), 0: step}, 1: {0: torch.randn(2), 2: torch.ones(1)}},
        "by default": defaultdict(list, {0: {"a": torch.ones(1)}, 1: {"b": torch.ones(2)}}),
        "list": [torch.ones(1), (torch.ones(2), step)],
        "step": step,
        "history": [0.5] * step,
    }


def test_what_changes_at_every_save_is_no_reason_to_flatten(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    finder = PartFinder()
    before = finder.find(trained(chance, 0))
    for step in range(1, 4):
        state = trained(chance, step)
        with monkeypatch.context() as patched:
            patched.delattr(local_part, "flatten")
            found = finder.find(state)
        assert found.local is before.local
        assert found.local.written(None) is before.local.written(None)
        assert_same(found, PartFinder().find(state))


def test_placements_that_are_equal_but_hash_otherwise_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of PyTorch have held `Shard(0) == _StridedShard(0)`."""
    mesh = init_device_mesh("cpu", (4,))
    local = torch.ones(2, 3)
    cuts = [Shard(0), _StridedShard(0, split_factor=2)]
    one, other = (DTensor.from_local(local, mesh, [cut], run_check=False, shape=(8, 3), stride=(3, 1)) for cut in cuts)
    finder = PartFinder()
    finder.find({"w": one})
    anew: list[object] = []
    monkeypatch.setattr(local_part, "flatten", lambda state: anew.append(state) or flatten(state))
    finder.find({"w": one.detach()})
    assert not anew
    finder.find({"w": other})
    assert len(anew) == 1


def test_it_keeps_nothing_alive() -> None:
    class Thing:
        pass

    finder = PartFinder()
    state = trained(random.Random(1), 1)
    thing = state["thing"] = Thing()
    held = [weakref.ref(x) for x in (thing, state["model"], *state["model"].values(), state["list"][0])]
    held += [weakref.ref(x.to_local().untyped_storage()) for x in state["model"].values()]
    for _ in range(2):
        finder.find(state).items(None)
    del state, thing
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []


def test_a_large_state_is_found_three_times_as_fast_again() -> None:
    import time

    chance = random.Random(3)
    state = {str(i): trained(chance, i % 3) for i in range(40)}

    def seconds(finder: PartFinder) -> float:
        start_s = time.perf_counter()
        finder.find(state)
        return time.perf_counter() - start_s

    known = PartFinder()
    known.find(state)
    assert 3 * min(seconds(known) for _ in range(7)) < min(seconds(PartFinder()) for _ in range(7))
    assert json.dumps(known.find(state).local.names.to_json())
