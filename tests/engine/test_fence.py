"""Which extents of a state an attached optimizer owns, and that the answer is remembered no longer than it is right."""

from __future__ import annotations

import pytest
import torch

from tidegate.fence import Fence
from tidegate.state import Describer
from tidegate.table import StateTable


class Training:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step()

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        self.optimizer.step()

    def state(self) -> dict[str, object]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**state, "rng": torch.get_rng_state(), "empty": torch.empty(0)}


def owned_names(fence: Fence, table: StateTable) -> set[str]:
    extents = fence.owned_extents(table)
    return {table.fqn(i) for i in range(len(table.tensors)) if table.tensor_extent[i] in extents}


def expected_names(table: StateTable) -> set[str]:
    names = {table.fqn(i) for i in range(len(table.tensors))}
    return {name for name in names if "running" not in name and "num_batches" not in name and name != "rng"}


def test_the_optimizers_parameters_and_states_are_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    training, describer, fence = Training(), Describer(), Fence(lambda: None)
    assert fence.owned_extents(describer.describe(training.state())) == frozenset()
    fence.attach(training.optimizer)
    table = describer.describe(training.state())
    assert owned_names(fence, table) == expected_names(table)
    with monkeypatch.context() as patched:
        patched.delattr(Fence, "_look_up")
        for _ in range(3):
            training.step()
            table = describer.describe(training.state())  # its RNG state lies elsewhere each time
            assert owned_names(fence, table) == expected_names(table)
    fence.detach()
    assert fence.owned_extents(table) == frozenset()


def test_the_answer_is_found_again_once_the_optimizers_hold_something_else() -> None:
    training, describer, fence = Training(), Describer(), Fence(lambda: None)
    fence.attach(training.optimizer)
    table = describer.describe(training.state())
    all_owned = owned_names(fence, table)
    training.optimizer.param_groups[0]["params"].pop()
    assert owned_names(fence, table) < all_owned
    other = torch.optim.SGD([dict(training.model.named_parameters())["1.bias"]])
    fence.attach(other)
    assert "model[\"1.bias\"]" in owned_names(fence, table)
    fence.detach()
    assert owned_names(fence, table) == set()


def test_tensors_that_took_the_place_of_others_are_found_again() -> None:
    training, describer, fence = Training(), Describer(), Fence(lambda: None)
    fence.attach(training.optimizer)
    assert owned_names(fence, describer.describe(training.state()))
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    for p in training.model.parameters():
        training.optimizer.state[p]["exp_avg"] = torch.zeros_like(p)
    table = describer.describe(training.state())
    assert owned_names(fence, table) == expected_names(table)


def test_memory_that_is_not_the_optimizers_any_more_is_not_owned() -> None:
    x = torch.nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([x])
    describer, fence = Describer(), Fence(lambda: None)
    fence.attach(optimizer)
    assert fence.owned_extents(describer.describe([x, torch.ones(7)])) == {0}
    y = torch.nn.Parameter(torch.ones(100))
    assert fence.owned_extents(describer.describe([y, torch.ones(7)])) == frozenset()
