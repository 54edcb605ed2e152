"""A load into the caller's own state: every tensor is found, or the first mismatch is named from both sides."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import enum
import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.engine.through import read_table, stored
from tests.kit.bits import assert_same_bits
from tidegate.errors import LoadError
from tidegate.rebuild import rebuild
from tidegate.state import describe, make_tensors, match_into


class Part(enum.Enum):
    HEAD = 1


Span = collections.namedtuple("Span", "start end")


@dataclasses.dataclass
class Box:
    a: object = None


def load_into(state: object, into: object) -> object:
    """Store a state and load it into another."""
    text, extents = stored(describe(state))
    table = read_table(text)
    targets = match_into(table, into)
    tensors = make_tensors(table, extents)
    with torch.no_grad():
        for i, target in enumerate(targets):
            if target is not None:
                target.copy_(tensors[i])
                tensors[i] = target
    return rebuild(table.skeleton, tensors)


def trainer() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, object]]:
    torch.manual_seed(torch.initial_seed() + 1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "rng": np.arange(4)}
    return model, optimizer, state


def test_a_model_and_its_optimizer_are_filled_in_place() -> None:
    _, _, saved = trainer()
    model, _, fresh = trainer()
    expected = copy.deepcopy(saved)
    fresh["step"] = 0
    back = load_into(saved, fresh)
    assert_same_bits(back, expected)
    assert back["model"]["0.weight"] is fresh["model"]["0.weight"]
    assert model[0].weight.data_ptr() == fresh["model"]["0.weight"].data_ptr()
    assert model[0].weight.tolist() == expected["model"]["0.weight"].tolist()
    exp_avg = fresh["optimizer"]["state"][0]["exp_avg"]
    assert back["optimizer"]["state"][0]["exp_avg"] is exp_avg
    assert back["step"] == 3


@pytest.mark.parametrize(
    ("saved", "into"),
    [
        (lambda t: {"a": t}, lambda t: OrderedDict(a=t)),
        (lambda t: OrderedDict(a=t), lambda t: {"a": t}),
        (lambda t: {"b": 1, "a": t}, lambda t: {"a": t, "b": "anything"}),
        (lambda t: {0: t, (1, 2): 3}, lambda t: defaultdict(None, {(1, 2): None, 0: t})),
        (lambda t: {Part.HEAD: t}, lambda t: {Part.HEAD: t}),
        (lambda t: [t, None], lambda t: (t, 5)),
        (lambda t: (t,), lambda t: [t]),
        (lambda t: Span(t, 1), lambda t: Span(t, 2)),
        (lambda t: Box(t), lambda t: Box(t)),
        (lambda t: argparse.Namespace(a=t), lambda t: argparse.Namespace(a=t)),
        (lambda t: t, lambda t: t),
        (lambda t: [t, np.ones(3), b"x" * 5000, 1j], lambda t: [t, np.zeros(9), None, 2]),
        (lambda t: [t], lambda t: [torch.nn.Parameter(t)]),
        (lambda t: [torch.nn.Parameter(t)], lambda t: [t]),
        (lambda t: [t.t()], lambda t: [torch.zeros(3, 2)]),
    ],
)
def test_structures_that_match(saved: Callable[..., object], into: Callable[..., object]) -> None:
    source = torch.randn(2, 3)
    target = into(torch.zeros(2, 3))
    with torch.serialization.safe_globals([Part, Span, Box]):
        back = load_into(saved(source), target)
    (table, (mine,)) = (describe(back), [t for t in describe(back).tensors if t.dim() == 2])
    assert any(mine is t for t in describe(target).tensors)
    assert mine.flatten().sort().values.tolist() == source.flatten().sort().values.tolist()
    assert table.skeleton is not None


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("saved", "into", "path", "words"),
    [
        ({"a": X}, {"a": torch.ones(3, 2)}, "a", ["float32[2, 3]", "float32[3, 2]"]),
        ({"a": X}, {"a": X.double()}, "a", ["float32[2, 3]", "float64[2, 3]"]),
        ({"a": X}, {"a": 1}, "a", ["float32[2, 3]", "a int"]),
        ({"a": X}, {"a": None}, "a", ["float32[2, 3]", "NoneType"]),
        ({"a": {"b": X}}, {"a": {"b": X.to("meta")}}, "a.b", ["meta"]),
        ({"a": {"b": X}}, {"a": {"b": torch.zeros(1, 3).expand(2, 3)}}, "a.b", ["expanded"]),
        ({"a": {"b": X}}, {"a": {"b": X.to_sparse()}}, "a.b", ["strided"]),
        ({"a": {"b": 1}}, {"a": {"b": X}}, "a.b", ["a int", "float32[2, 3]"]),
        ({"a": {"b": np.ones(2)}}, {"a": {"b": X}}, "a.b", ["ndarray", "float32[2, 3]"]),
        ({"a": {"b": 1 + 2j}}, {"a": {"b": [1]}}, "a.b", ["complex", "list"]),
        ({"a": {"b": X, "c": X}}, {"a": {"b": X}}, "a", ["lacks (c)", "no keys"]),
        ({"a": {"b": X}}, {"a": {"b": X, "c.d": X}}, "a", ["no keys", '["c.d"]'.replace('"', "'")]),
        ({"a": {0: X}}, {"a": {"0": X}}, "a", ["lacks ([0])", "own (['0'])"]),
        ({"a": {}}, {"a": [1]}, "a", ["dict", "list"]),
        ({"a": {}}, {"a": None}, "a", ["dict", "NoneType"]),
        ({"a": [X, 1]}, {"a": [X]}, "a", ["list of 2", "list of 1"]),
        ({"a": [X]}, {"a": {"0": X}}, "a", ["list", "dict"]),
        ({"a": ("x",)}, {"a": "x"}, "a", ["tuple", "str"]),
        (OrderedDict(w=X), torch.nn.Linear(3, 2), "state", ["OrderedDict", "Linear"]),
        ({"a": X}, {}, "state", ["lacks (a)"]),
        ({f"k{i}": X for i in range(9)}, {}, "state", ["k0, k1, k2, k3, k4 and 4 more"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mismatch_names_the_path_and_both_sides(saved: object, into: object, path: str, words: list[str]) -> None:
    table = read_table(stored(describe(saved))[0])
    with pytest.raises(LoadError) as info:
        match_into(table, into)
    assert info.value.fqn == path and path in str(info.value)
    assert info.value.stage == "place"
    for word in words:
        assert word in str(info.value)


def test_ties_must_be_the_same_on_both_sides() -> None:
    w = torch.randn(3, 3)
    apart = {"a": torch.randn(3, 3), "b": torch.randn(3, 3)}
    with pytest.raises(LoadError, match="untie"):
        match_into(describe(apart), {"a": w, "b": w})
    with pytest.raises(LoadError, match="untie"):
        match_into(describe(apart), {"a": w, "b": w.view(3, 3)})
    with pytest.raises(LoadError, match="untie"):
        match_into(describe({"a": torch.randn(4), "b": torch.randn(4)}), {"a": w.view(-1)[:4], "b": w.view(-1)[3:7]})
    with pytest.raises(LoadError, match="tie them"):
        match_into(describe({"a": w, "b": w}), apart)
    tied = {"a": w, "b": w.t(), "c": w.view(-1)[4:]}
    other = torch.zeros(3, 3)
    back = load_into(tied, {"a": other, "b": other.t(), "c": other.view(-1)[4:]})
    assert_same_bits(back, tied)
    with pytest.raises(LoadError, match="untie"):
        match_into(describe(tied), {"a": other, "b": other.view(3, 3), "c": torch.zeros(5)})
    # What is one object may be two that share all: state_dict() makes new ones at every call.
    assert match_into(describe({"a": w, "b": w}), {"a": other, "b": other.detach()})[0] is other


def test_views_that_interleave_without_sharing_are_fine() -> None:
    base, mine = torch.randn(100, 50), torch.zeros(100, 50)
    columns = [base[:, 1], base[:, 7]]
    back = load_into(columns, [mine[:, 1], mine[:, 7]])
    assert_same_bits([t.contiguous() for t in back], [t.contiguous() for t in columns])
    assert mine[:, 7].tolist() == base[:, 7].tolist()


def test_inference_tensors_are_only_filled_in_inference_mode() -> None:
    with torch.inference_mode():
        into = {"a": torch.zeros(2, 3)}
        assert match_into(describe({"a": X}), into)[0] is into["a"]
    with pytest.raises(LoadError, match="inference"):
        match_into(describe({"a": X}), into)


def test_keys_of_a_class_that_is_not_allowed_are_named() -> None:
    with pytest.raises(LoadError, match="test_into:Part"):
        match_into(describe({Part.HEAD: X}), {Part.HEAD: X})


def test_A23_hostile_skeletons_are_refused() -> None:
    table = describe({"a": X})
    deep: object = ["t", 0]
    into: object = X
    for _ in range(5000):
        deep, into = ["list", deep], [into]
    inner: list[object] = [[["t", 0]], ["t", 5], ["t"], ["t", True]]
    for skeleton, value in [(deep, into), *((["list", node], [X]) for node in inner)]:
        table.skeleton = skeleton
        with pytest.raises(LoadError):
            match_into(table, value)
    pairs: list[object] = [["dict", [[["t"]], 1]], ["dict", 5, [["list"], 1]], ["OrderedDict@", 1, [[], 2]]]
    for skeleton in (*pairs, ["dataclass"], ["defaultdict"]):
        table.skeleton = json.loads(json.dumps(skeleton))
        with pytest.raises(LoadError):
            match_into(table, {"x": 1})
