"""A load of a part brings back what the whole state has there, and reads only the frames that it needs."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.reads import ReadingStore
from tests.kit.stores import FlipStore
from tidegate.container import read_index
from tidegate.parts import find_parts, tensors_in
from tidegate.paths import join_steps
from tidegate.rebuild import children
from tidegate.state import describe
from tidegate.storage import MemoryStore, Store

CHUNK = 1 << 16
Span = collections.namedtuple("Span", "start end")


@dataclasses.dataclass
class Box:
    a: object = None


def state() -> dict[object, object]:
    """Every kind of container, and tensors in all of them; some tied, some views."""
    shared = torch.randn(40, 30)
    versioned = OrderedDict({"0.weight": torch.randn(3), "0.bias": torch.randn(2)})
    versioned._metadata = OrderedDict({"": {"version": 1}, "0": {"version": torch.ones(2)}})  # type: ignore[attr-defined]
    return {
        "model": {"layers": [{"weight": shared}, {"weight": torch.randn(9, 9).bfloat16()}], "tied": shared},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(40, 30)}, 1: {"exp_avg": shared.t()}}, "lr": 1e-3},
        "versioned": versioned,
        "view": shared[3:5],
        "tuple": (torch.zeros(2), None, "x"),
        "span": Span(torch.ones(3), 4),
        "box": Box(torch.ones(1)),
        "space": SimpleNamespace(t=torch.full((2,), 7)),
        "args": argparse.Namespace(lr=1, t=torch.zeros(())),
        "default": defaultdict(list, {"k": [torch.arange(3)]}),
        "queue": deque([torch.arange(2), 5], maxlen=4),
        "array": np.arange(12.0).reshape(3, 4),
        "bytes": bytes(range(256)) * 20,
        "empty": torch.empty(0, 3),
        "set": {1, 2},
        "dotted.key": {"in side": torch.ones(2)},
        ("a", 1): torch.ones(5),
        7: torch.zeros(7),
    }


@pytest.fixture(scope="module")
def saved() -> Store:
    store = MemoryStore()
    torch.manual_seed(0)
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK) as engine:
        engine.save_async(state(), step=0)
    return store


@pytest.fixture(autouse=True)
def allowed() -> object:
    with torch.serialization.safe_globals([Span, Box]):
        yield


def load(store: Store, **options: object) -> object:
    with tidegate.CheckpointEngine(store) as engine:
        return engine.load(0, **options)  # type: ignore[arg-type]


def every_place(value: object) -> dict[str, object]:
    """All places of a state by path, walking its skeleton and the state itself side by side."""
    found = {}

    def walk(node: object, value: object, steps: str) -> None:
        found[join_steps([steps])] = value
        below = list(children(node))  # type: ignore[arg-type]
        values: list[object] = []
        if isinstance(value, dict):
            values = list(value.values())
        elif isinstance(value, SimpleNamespace | argparse.Namespace | Box):
            values = list(vars(value).values())
        elif below:
            values = list(value)  # type: ignore[call-overload]
        for (step, child), inner in zip(below, values, strict=True):
            walk(child, inner, steps + step)

    walk(describe(value).skeleton, value, "")
    return found


def test_every_part_is_what_the_whole_state_has_there(saved: Store) -> None:
    whole = load(saved)
    places = every_place(whole)
    assert {"model.layers.0.weight", "optimizer.state[0].exp_avg", 'versioned["0.weight"]', "state", "7"} - set(
        places
    ) == {"7"}
    assert 'state["dotted.key"]["in side"]' in places
    for path, expected in places.items():
        assert_same_bits(load(saved, part=path), expected)


def test_several_parts_come_as_a_dict_and_stay_tied(saved: Store) -> None:
    whole = load(saved)
    paths = ["view", "model.tied", "optimizer.state[1].exp_avg", "optimizer.lr", "view"]
    parts = load(saved, part=paths)
    assert isinstance(parts, dict) and isinstance(whole, dict)
    assert list(parts) == paths[:-1]
    expected = [whole["view"], whole["model"]["tied"], whole["optimizer"]["state"][1]["exp_avg"], 1e-3]
    assert_same_bits(list(parts.values()), expected)
    assert parts["model.tied"].untyped_storage()._cdata == parts["view"].untyped_storage()._cdata
    assert load(saved, part=[]) == {}
    assert load(saved, part=("optimizer.lr",)) == {"optimizer.lr": 1e-3}


@pytest.mark.parametrize(
    ("loose", "exact"),
    [
        ("optimizer.state.0.exp_avg", "optimizer.state[0].exp_avg"),
        ("model.layers[1].weight", "model.layers.1.weight"),
        ("versioned.0.weight", 'versioned["0.weight"]'),
        ("versioned['0.bias']", 'versioned["0.bias"]'),
        ("['model']['tied']", "model.tied"),
        ("dotted.key.in side", 'state["dotted.key"]["in side"]'),
        ("7", "state[7]"),
        ("[7]", "state[7]"),
        ('("a", 1)', 'state[("a", 1)]'),
    ],
)
def test_quotes_and_brackets_may_be_left_out(saved: Store, loose: str, exact: str) -> None:
    assert_same_bits(load(saved, part=loose), load(saved, part=exact))


def test_an_exact_path_goes_before_a_loose_one_and_several_loose_ones_are_refused() -> None:
    state = {"a": {"b": 1}, "a.b": 2, "c": {"d": {"e": 3}, "d.e": 4}, "x.y": {"z": 5}, "x": {"y.z": 6}}
    skeleton = describe(state).skeleton
    (exact,) = find_parts(skeleton, ["a.b"])
    assert (exact.steps, exact.node) == (".a.b", 1)
    assert find_parts(skeleton, ["c.d.e"])[0].node == 3
    with pytest.raises(tidegate.LoadError, match="could be each of"):
        find_parts(skeleton, ["x.y.z"])
    with pytest.raises(tidegate.LoadError, match=r"state\[0\], state\[\"0\"\]"):
        find_parts(describe({0: 1, "0": 2}).skeleton, ["0"])


def test_state_is_the_whole_unless_there_is_such_a_key() -> None:
    assert find_parts(describe([5, 6]).skeleton, ["state"])[0].node == ["list", 5, 6]
    assert find_parts(describe({"state": 5}).skeleton, ["state"])[0].node == 5
    assert find_parts(describe({"state": [5, 6]}).skeleton, ["state[1]"])[0].node == 6
    assert find_parts(describe({1: 5}).skeleton, ["state[1]"])[0].node == 5


@pytest.mark.parametrize(
    ("path", "words", "fqn"),
    [
        ("modl", ["'modl'", "state has model"], "state"),
        ("model.layer", ["model has model.layers", "model.tied"], "model"),
        ("model.layers.2", ["model.layers has model.layers.0, model.layers.1"], "model.layers"),
        ("model.layers.0.weight.0", ["model.layers.0.weight is a tensor"], "model.layers.0.weight"),
        ("optimizer.state[2].exp_avg", ["optimizer.state[0], optimizer.state[1]"], "optimizer.state"),
        ("set.0", ["set is a set"], "set"),
        ("tuple.2.0", ["tuple.2 is a str"], "tuple.2"),
        ("", ["state has"], "state"),
        ("model.", ["model has"], "model"),
        ("[", ["state has"], "state"),
        ('versioned["0.wieght"]', ['versioned["0.weight"]'], "versioned"),
        ("state[9]", ["state has", "and 13 more"], "state"),
    ],
)
def test_a_path_that_is_not_there_names_what_is(saved: Store, path: str, words: list[str], fqn: str) -> None:
    for part in (path, ["model", path]):
        with pytest.raises(tidegate.LoadError) as info:
            load(saved, part=part)
        assert type(info.value) is tidegate.LoadError
        assert info.value.fqn == fqn
        for word in words:
            assert word in str(info.value)


def test_a_missing_part_is_no_reason_to_load_an_older_checkpoint(tmp_path: Path) -> None:
    with tidegate.CheckpointEngine(tmp_path) as engine:
        engine.save_async({"old": torch.ones(2)}, step=0)
        engine.save_async({"new": torch.ones(2)}, step=1).result()
        with pytest.raises(tidegate.LoadError, match="state has new"):
            engine.load(part="old")


@pytest.mark.parametrize("part", [5, b"model", {"model": 1}, [1], ["model", None], {"model"}])
def test_what_is_no_path_is_refused(saved: Store, part: object) -> None:
    with pytest.raises(tidegate.ConfigError, match="part is"):
        load(saved, part=part)


def large_state() -> dict[str, object]:
    """Three large tensors of several chunks each, and 300 small ones in packed chunks."""
    small = {f"s{i}": torch.randn(50) for i in range(300)}
    return {"large": [torch.randn(5 * CHUNK // 4) for _ in range(3)], "small": small, "n": 5}


@pytest.mark.parametrize("codec", ["raw", "zstd", "rans"])
def test_only_frames_of_the_part_are_read(codec: str) -> None:
    inner = MemoryStore()
    whole = large_state()
    with tidegate.CheckpointEngine(inner, codec=codec, chunk_bytes=CHUNK) as engine:
        engine.save_async(whole, step=0)
    key = next(stat.key for stat in inner.list() if stat.key.endswith(".tg"))
    entries = read_index(inner, key).entries
    index_bytes = inner.stat(key).num_bytes - sum(entry.header.padded_bytes for entry in entries)

    def read_for(part: object) -> tuple[object, int]:
        store = ReadingStore(inner)
        return load(store, part=part), store.num_bytes_of(".tg") - index_bytes

    everything = sum(entry.header.frame_bytes for entry in entries)
    loaded, num_bytes = read_for(None)
    assert_same_bits(loaded, whole)
    assert num_bytes <= everything
    loaded, num_bytes = read_for("large.1")
    assert_same_bits(loaded, whole["large"][1])  # type: ignore[index]
    assert 4 * CHUNK < num_bytes < 5 * (CHUNK + 64)
    loaded, num_bytes = read_for("small.s7")
    assert_same_bits(loaded, whole["small"]["s7"])  # type: ignore[index]
    assert 200 <= num_bytes <= CHUNK + 64, "a packed chunk is read whole and cut"
    loaded, num_bytes = read_for(["n"])
    assert loaded == {"n": 5}
    assert num_bytes <= 0


def test_a_part_is_filled_in_place(saved: Store) -> None:
    whole = load(saved)
    assert isinstance(whole, dict)
    target = copy.deepcopy(whole["model"])
    kept = [target["layers"][0]["weight"], target["layers"][1]["weight"]]
    for tensor in kept:
        tensor.zero_()
    loaded = load(saved, part="model", into=target)
    assert isinstance(loaded, dict)
    assert loaded["tied"] is kept[0] and loaded["layers"][1]["weight"] is kept[1]
    assert_same_bits(loaded, whole["model"])
    box, mine = Box(torch.zeros(1)), torch.zeros(5)
    loaded = load(saved, part=["box", 'state[("a", 1)]'], into={"box": box, 'state[("a", 1)]': mine})
    assert isinstance(loaded, dict)
    assert loaded["box"].a is box.a
    assert loaded['state[("a", 1)]'] is mine
    assert mine.tolist() == [1] * 5


def test_a_part_that_does_not_fit_is_named_by_its_whole_path(saved: Store) -> None:
    with pytest.raises(tidegate.LoadError, match=r"model.layers.1.weight does not match") as info:
        load(saved, part="model.layers.1", into={"weight": torch.zeros(9, 9)})
    assert info.value.fqn == "model.layers.1.weight"
    with pytest.raises(tidegate.LoadError, match=r"model.layers does not match"):
        load(saved, part=["model"], into={"model": {"layers": [], "tied": torch.zeros(40, 30)}})
    for into in ({}, {"model": {}, "x": 1}, [1], torch.zeros(3)):
        with pytest.raises(tidegate.LoadError, match="must map each path"):
            load(saved, part=["model"], into=into)


def test_classes_outside_of_the_part_need_not_be_allowed(saved: Store) -> None:
    with torch.serialization.safe_globals([]):
        torch.serialization.clear_safe_globals()
        assert_same_bits(load(saved, part="optimizer.lr"), 1e-3)
        with pytest.raises(tidegate.LoadError, match="test_load_parts:Box"):
            load(saved, part="box")


def test_damage_elsewhere_does_not_matter(tmp_path: Path) -> None:
    inner = MemoryStore()
    whole = large_state()
    with tidegate.CheckpointEngine(inner, codec="raw", chunk_bytes=CHUNK) as engine:
        engine.save_async(whole, step=0)
    key = next(stat.key for stat in inner.list() if stat.key.endswith(".tg"))
    first = read_index(inner, key).entries[0]
    store = FlipStore(inner)
    store.flip(key, 8 * (first.offset + 100))
    with pytest.raises(tidegate.CorruptCheckpointError) as info:
        load(store)
    damaged = info.value.fqn
    assert damaged.startswith(("large", "small"))
    other = "small.s299" if damaged.startswith("large") else "large.2"
    assert load(store, part=other).shape == (50 if "small" in other else 5 * CHUNK // 4,)  # type: ignore[attr-defined]
    with pytest.raises(tidegate.CorruptCheckpointError):
        load(store, part=damaged)


def test_one_file_too(tmp_path: Path) -> None:
    whole = large_state()
    tidegate.save(whole, tmp_path / "x.tg")
    assert_same_bits(tidegate.load(tmp_path / "x.tg", part="small"), whole["small"])
    mine = torch.zeros(50)
    assert tidegate.load(tmp_path / "x.tg", part="small.s1", into=mine) is mine
    assert_same_bits(mine, whole["small"]["s1"])  # type: ignore[index]


def test_A23_hostile_skeletons() -> None:
    deep: object = ["t", 0]
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(tidegate.LoadError):
        find_parts(deep, ["a." * 200 + "b"])
    twins: object = 1
    for _ in range(40):
        twins = ["dict", ["a", twins], [["tuple", "x"], twins], ["a.a", twins]]
    with pytest.raises(tidegate.LoadError):
        find_parts(twins, ["a." * 41 + "b"])
    odd = json.loads('{"x": ["dict", ["q"], 5, [["enum", "\\"x", "y"], 1], ["z", ["t"]]], "y": [["list"], 1]}')
    for path in ("x.z.w", "x.q", 'x["x.y', "y.0"):
        with pytest.raises(tidegate.LoadError):
            find_parts(odd, [path])
    parts = find_parts(json.loads('[["t", 1]]'), ["state"])
    assert tensors_in(parts) == []
    nodes = json.loads('["list", ["t", true], ["t", -1], ["t", 5, 6], ["t"], ["ndarray", "x"], ["bytes@", 3]]')
    assert tensors_in(find_parts(nodes, ["state"])) == [3, 5]
