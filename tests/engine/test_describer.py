"""A describer gives what describing afresh gives, whatever has changed since, faster, and keeps nothing alive."""

from __future__ import annotations

import copy
import gc
import random
import threading
import time
import weakref
from collections import OrderedDict
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.multiprocessing.reductions import StorageWeakRef

from tests.engine.changes import CHANGES, Change, Trainer, places
from tests.engine.through import stored
from tidegate import likeness
from tidegate import state as state_module
from tidegate.errors import UnsupportedStateError
from tidegate.likeness import Likeness
from tidegate.measure import measure
from tidegate.sources import bytes_at
from tidegate.state import Describer, describe
from tidegate.table import StateTable

COLUMNS = (
    "skeleton", "specs", "tensor_spec", "tensor_extent", "tensor_offset", "extent_bytes", "extent_words",
    "extent_roles", "extent_devices", "extent_addresses", "extent_packings", "signature",
)  # fmt: skip


def assert_same_tables(table: StateTable, plain: StateTable) -> None:
    """Assert that two tables of one state tell the same."""
    for name in COLUMNS:
        assert getattr(table, name) == getattr(plain, name), name
    assert [type(word) for word in table.extent_words] == [type(word) for word in plain.extent_words]
    assert len(table.tensors) == len(plain.tensors)
    for ours, theirs in zip(table.tensors, plain.tensors, strict=True):  # those of arrays are new each time
        assert ours is theirs or (ours.data_ptr() == theirs.data_ptr() and ours.dtype == torch.uint8)
    assert len(table.sources) == len(plain.sources) == len(table.extent_bytes)
    for ours, theirs in zip(table.sources, plain.sources, strict=True):
        assert ours.storage.data_ptr() == theirs.storage.data_ptr()
        assert ours.start_bytes == theirs.start_bytes and ours.num_bytes == theirs.num_bytes
        assert ours.word == theirs.word and ours.packing == theirs.packing and ours.device == theirs.device
        assert ours.tensor_index == theirs.tensor_index and len(ours.more_owners) == len(theirs.more_owners)
    assert stored(table)[0] == stored(plain)[0]
    assert all(torch.equal(a, b) for a, b in zip(stored(table)[1], stored(plain)[1], strict=True))


def outline(x: object) -> object:
    """A state without its tensors and the values at its leaves."""
    if isinstance(x, torch.Tensor):
        return ("tensor",)
    if isinstance(x, dict):
        inner = [(type(key), key, outline(value)) for key, value in x.items()]
        return (type(x), inner, outline(getattr(x, "_metadata", None)))
    if isinstance(x, list | tuple):
        return (type(x), [outline(value) for value in x])
    return None


def start() -> dict[Any, Any]:
    state = Trainer().state()
    state["optimizer"]["state"] = {key: dict(row) for key, row in state["optimizer"]["state"].items()}
    flat = torch.randn(40)
    base = torch.randn(6, 4)
    state["extra"] = {
        "a": 1,
        "rng": torch.randint(0, 256, (100,), dtype=torch.uint8),
        "views": [flat[:10], flat[20:30], base, base.t(), base[:, 0]],
        "complex": [torch.randn(3, dtype=torch.complex64)],
        "array": np.arange(7, dtype="f4"),
        "long": bytes(range(256)) * 20,
        "b": "text",
        "ints": [1, 2, True],
        "history": [],
        "exp_avg": [torch.randn(2), {"x": torch.randn(3)}, torch.randn(4)],
        "odd": {(1, 2): torch.ones(2), None: [torch.ones(3)]},
    }
    return state


def check(describer: Describer, state: dict[Any, Any], seen: dict[str, dict[int, object]]) -> StateTable:
    table = describer.describe(state)
    plain = describe(state)
    assert_same_tables(table, plain)
    extents = [table.extent_bytes, table.extent_words, table.extent_roles, table.extent_packings, table.extent_devices]
    columns = [table.specs, table.tensor_spec, table.tensor_extent, table.tensor_offset, table.extent_addresses]
    starts = [source.start_bytes for source in table.sources]
    indices = {id(tensor): i for i, tensor in enumerate(table.tensors)}
    order = [indices.get(id(container[key])) for container, key in places(state)]
    keys = {"layout_id": copy.deepcopy([outline(state), order, starts, extents, columns]), "extents_id": extents}
    for name, key in keys.items():
        number = getattr(table, name)
        assert number and seen[name].setdefault(number, key) == key, name
        last = list(seen[name])[-1]
        assert (seen[name][last] == key) == (last == number), name
        seen[name][number] = seen[name].pop(number)  # the last one again
    return table


@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_after_a_change_it_describes_as_afresh(name: str, in_python: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_python:
        monkeypatch.setattr(likeness, "_native_is_exact", lambda: False)
    describer, state, chance = Describer(), start(), random.Random(name)
    seen: dict[str, dict[int, object]] = {"layout_id": {}, "extents_id": {}}
    for _ in range(10):
        check(describer, state, seen)
        check(describer, state, seen)
        CHANGES[name](state, chance)


@given(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=6), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_after_any_changes_it_describes_as_afresh(names: list[str], seed: int) -> None:
    describer, state, chance = Describer(), start(), random.Random(seed)
    seen: dict[str, dict[int, object]] = {"layout_id": {}, "extents_id": {}}
    check(describer, state, seen)
    for name in names:
        try:
            CHANGES[name](state, chance)
        except (KeyError, AttributeError, TypeError, RuntimeError, IndexError):
            return  # what an earlier change has taken away cannot be changed
        check(describer, state, seen)


def detach_model(state: dict[Any, Any], chance: random.Random) -> None:
    metadata = state["model"]._metadata
    state["model"] = OrderedDict((key, value.detach()) for key, value in state["model"].items())
    state["model"]._metadata = OrderedDict((key, {"version": chance.randrange(3)}) for key in metadata)


def new_random_states(state: dict[Any, Any], chance: random.Random) -> None:
    state["extra"]["rng"] = state["extra"]["rng"].clone()
    state["extra"]["array"] = np.arange(7, dtype="f4")
    state["extra"]["long"] = bytes(range(256)) * 20


FAST: dict[str, tuple[Change, bool]] = {
    "nothing": (CHANGES["nothing"], True),
    "values": (CHANGES["values"], True),
    "new tensor objects": (detach_model, True),
    "leaf": (lambda state, chance: state.update(epoch=chance.random()), True),
    "history": (lambda state, chance: state["extra"]["history"].append(1.0), False),
    "new random states": (new_random_states, False),
}


@pytest.mark.parametrize("name", FAST)
def test_what_changes_at_every_save_is_no_reason_to_describe_afresh(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, has_same_layout = FAST[name]
    describer, state, chance = Describer(), start(), random.Random(name)
    change(state, chance)
    before = describer.describe(state)
    for _ in range(5):
        change(state, chance)
        with monkeypatch.context() as patched:
            patched.delattr(state_module, "take_apart")
            table = describer.describe(state)
        assert (table.layout_id == before.layout_id) == has_same_layout
        assert table.extents_id == before.extents_id
        assert_same_tables(table, describe(state))


def test_the_state_of_a_trainer_is_walked_by_its_track(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, describer = Trainer(), Describer()
    before = describer.describe(trainer.state())
    for _ in range(3):
        trainer.step()
        state = trainer.state()
        with monkeypatch.context() as patched:
            patched.delattr(state_module, "take_apart")
            table = describer.describe(state)
        assert table.layout_id == before.layout_id and table.signature == before.signature
        assert_same_tables(table, describe(state))


def test_refusals_are_as_afresh() -> None:
    describer, state = Describer(), start()
    describer.describe(state)
    for key, value in (("rng", torch.ones(3).to_sparse()), ("rng", torch.ones(3, device="meta")), ("b", object())):
        broken = {**state, "extra": {**state["extra"], key: value}}
        with pytest.raises(UnsupportedStateError) as info:
            describer.describe(broken)
        assert info.value.path == f"extra.{key}"
    cycle = {**state["extra"]}
    cycle["history"] = [cycle]
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        describer.describe({**state, "extra": cycle})
    freed = torch.ones(100, dtype=torch.uint8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedStateError, match="freed"):
        describer.describe({**state, "extra": {**state["extra"], "rng": freed}})
    assert_same_tables(describer.describe(state), describe(state))


def test_a_storage_that_shrank_in_its_place_is_seen() -> None:
    x = torch.ones(100)
    describer = Describer()
    describer.describe([x])
    x.untyped_storage().resize_(40)
    with pytest.raises(UnsupportedStateError, match="freed"):
        describer.describe([x])


def test_a_deep_state_is_described_again() -> None:
    state: object = torch.ones(3)
    for i in range(250):
        state = [state] if i % 2 else {"a": state, "b": i}
    describer = Describer()
    for _ in range(3):
        assert_same_tables(describer.describe(state), describe(state))


def test_nothing_of_the_state_is_kept_alive() -> None:
    trainer, describer = Trainer(), Describer()
    extra = {"array": np.arange(1000.0), "rng": torch.get_rng_state(), "odd": {(1,): torch.ones(3)}}
    for _ in range(2):
        table = describer.describe({**trainer.state(), "extra": extra, "views": [extra["rng"][:10]]})
    len(list(table.sources)[:5])
    tensors = [weakref.ref(tensor) for tensor in table.tensors]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in table.tensors]
    objects = [weakref.ref(trainer.model), weakref.ref(trainer.optimizer), weakref.ref(extra["array"])]
    sources = table.sources
    sources.clear()
    table.tensors.clear()
    del trainer, extra
    gc.collect()
    assert not any(ref() is not None for ref in tensors + objects)
    assert all(ref.expired() for ref in storages)
    assert len(sources) == 0 and list(sources) == [] and sources[0:3] == []
    with pytest.raises(IndexError):
        sources[0]


def test_a_table_keeps_the_memory_that_was_described() -> None:
    describer, x = Describer(), torch.ones(1000)
    for _ in range(2):
        table = describer.describe({"x": x})
        x.data = torch.zeros(1000)
        out = torch.empty(4000, dtype=torch.uint8)
        table.sources[0].copy_to(out)
        assert out.view(torch.float32).eq(1).all()
        x.data = torch.ones(1000)
        describer.describe({"x": x})


def test_threads_that_ask_for_a_source_get_the_same() -> None:
    state = [torch.ones(3) for _ in range(500)]
    for _ in range(5):
        table = describe(state)
        found: list[list[int]] = []
        gate = threading.Barrier(4)

        def ask(sources: Any, found: list[list[int]] = found, gate: threading.Barrier = gate) -> None:
            gate.wait()
            found.append([id(source) for source in sources])

        threads = [threading.Thread(target=ask, args=(table.sources,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 and all(ids == found[0] for ids in found)


def test_extents_are_numbered_by_role() -> None:
    trainer = Trainer()
    table = describe(trainer.state())
    roles = {table.fqn(i): table.extent_roles[table.tensor_extent[i]] for i in range(len(table.tensors))}
    for name, role in roles.items():
        last = name.rpartition(".")[2]
        assert role == (last if last in ("step", "exp_avg", "exp_avg_sq") else ""), name
    groups = list(dict.fromkeys(zip(table.extent_words, table.extent_roles, strict=True)))
    assert groups == sorted(groups) and len(groups) == len(set(groups)) == 6
    nested = describe({"exp_avg": [torch.ones(1), {"w": torch.ones(2), "sum": (torch.ones(3),)}], "x": torch.ones(4)})
    assert [nested.extent_roles[nested.tensor_extent[i]] for i in range(4)] == ["exp_avg", "", "sum", ""]


def test_torchs_own_check_is_used_where_it_sees_everything() -> None:
    assert likeness._is_exact(likeness._native)
    assert likeness._native_is_exact()
    assert likeness._is_exact(lambda tensors: likeness._InPython(tensors).check)
    assert not likeness._is_exact(lambda tensors: lambda *others: True)
    assert not likeness._is_exact(lambda tensors: lambda *others: all(type(x) is torch.Tensor for x in others))


def test_tensors_that_move_into_the_bytes_of_others_are_not_alike() -> None:
    raw = bytes_at((base := torch.zeros(256)).data_ptr(), 1024, base)

    def at(start: int, size: int) -> torch.Tensor:
        window = bytes_at(raw.data_ptr() + start, size, raw)
        return torch.empty(0).set_(window.untyped_storage(), 0, (size // 4,), (1,))

    tensors = [at(0, 64), at(64, 64), at(128, 64)]
    before = Likeness(tensors, measure(tensors))
    alike = before.compare([tensors[0], at(512, 64), tensors[2]])
    assert alike is not None and alike.moved == {1: raw.data_ptr() + 512}
    again = alike.likeness.compare([at(64, 64), at(512, 64), tensors[2]])
    assert again is not None and again.moved == {0: raw.data_ptr() + 64}
    for start in (4, 60, 68, 124, 132, 188):
        assert before.compare([tensors[0], at(start, 64), tensors[2]]) is None, start
    assert before.compare([at(64, 64), at(0, 64), tensors[2]]) is not None  # they have changed places
    assert before.compare([at(64, 64), at(64, 64), tensors[2]]) is None
    assert before.compare(tensors[:2]) is None


def test_an_unchanged_state_is_described_three_times_as_fast() -> None:
    trainer = Trainer(num_layers=60)
    describer = Describer()
    first_s: list[float] = []
    again_s: list[float] = []
    for _ in range(7):
        for make, times in ((Describer, first_s), (lambda: describer, again_s)):
            state, used = trainer.state(), make()
            begin = time.thread_time()
            table = used.describe(state)
            times.append(time.thread_time() - begin)
    assert len(table.tensors) > 1000
    assert min(first_s) > 3 * min(again_s[1:]), (min(first_s), min(again_s))


@pytest.mark.parametrize("is_known", [False, True])
def test_the_time_to_describe_a_trainer(benchmark: Any, is_known: bool) -> None:
    trainer, describer = Trainer(num_layers=20), Describer()
    describer.describe(trainer.state())

    def setup() -> tuple[tuple[Describer, dict[Any, Any]], dict[str, object]]:
        return (describer if is_known else Describer(), trainer.state()), {}

    benchmark.pedantic(Describer.describe, setup=setup, rounds=10)
