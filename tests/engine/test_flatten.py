"""States come apart into named leaves and together again."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from tests.kit.bits import assert_same_bits
from tidegate.errors import UnsupportedStateError
from tidegate.flatten import assemble, flatten


def test_a_training_state_comes_back() -> None:
    x = torch.ones(3)
    state = {
        "model": OrderedDict([("w.0", x), ("b", torch.zeros(2))]),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(1), "step": 3}, "0": {"exp_avg": torch.ones(2)}}},
        "groups": [{"lr": 1e-3, "params": [0, 1]}, (torch.ones(4), {"k": (1, 2)})],
        "empty": {},
        "nothing": [],
        (1, "key"): None,
    }
    flat = flatten(state)
    assert flat.tensors["model.w.0"] is x
    assert flat.values["empty"] == {}
    assert "optimizer.state.0.exp_avg'" in flat.tensors
    leaves = {name: flat.tensors.get(name, flat.values.get(name)) for name in flat.paths}
    assert_same_bits(state, assemble(leaves, flat.paths))


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="is a mapping, not a list"):
        flatten([torch.ones(1)])


@pytest.mark.parametrize("leaf", [5, object(), (), {}, torch.ones(1)], ids=type)
def test_what_nests_too_deeply_is_refused(leaf: object) -> None:
    for _ in range(199):
        leaf = [leaf]
    assert len(flatten({"x": leaf}).paths) == 1
    with pytest.raises(UnsupportedStateError, match="nests more than 200 levels deep"):
        flatten({"x": [leaf]})


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("x",), "b": ("x", "y")},
        {"a": (0,), "b": (2,)},
        {"a": ("x",), "b": (0,)},
        {"a": ([],)},
        {"a": (["tuple", -1],)},
        {"a": (1.5,)},
    ],
)
def test_hostile_paths_are_refused(paths: dict[str, tuple]) -> None:
    with pytest.raises(ValueError):
        assemble(dict.fromkeys(paths, 1), paths)
