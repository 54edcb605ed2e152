"""tidegate.dcp in one process, on the CPU and on a GPU: staging, one save at a time, failures, checkpoint ids."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.chains import records_of, save_steps, state_at
from tests.kit.states import odd_values, reference
from tests.kit.stores import GateStore
from tidegate.checkpoint_id import split_checkpoint_id
from tidegate.dcp import TidegateReader, TidegateStager, TidegateWriter
from tidegate.delta import DeltaPolicy
from tidegate.storage import MemoryStore
from tidegate.storage.local import LocalStore


@pytest.fixture(autouse=True)
def without_a_process_group() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def state_on(device: torch.device) -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.randn(300, 70, device=device))
    return {
        "weight": weight,
        "tied": weight,
        "odd": odd_values(torch.bfloat16, 999, device),
        "turned": torch.randn(30, 20, device=device).t(),
        "step": torch.tensor(3),
        "lr": 1e-3,
    }


def loaded_like(state: dict[str, Any], root: Any) -> dict[str, Any]:
    empty = {name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0 for name, x in state.items()}
    dcp.load(empty, storage_reader=TidegateReader(root))
    return empty


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    plain = [{n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in s.items()} for s in (a, b)]
    assert_same_bits(*plain, aliasing=False)


@pytest.mark.parametrize("mode", ["copy", "lazy"])
def test_the_values_of_the_call_are_saved(device: torch.device, mode: Any) -> None:
    state, store = state_on(device), MemoryStore()
    optimizer = torch.optim.SGD([state["weight"]], lr=0.1)
    writer = TidegateWriter(store)
    stager = TidegateStager(writer, mode=mode, optimizers=[optimizer])
    for step in range(3):
        expected = reference(state)
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager, checkpoint_id=str(step))
        state["odd"].view(torch.int16).add_(8)
        state["step"].add_(1)
        state["weight"].grad = torch.ones_like(state["weight"])
        optimizer.step()
        future.result()
        same(loaded_like(state, store), expected)  # type: ignore[arg-type]
    stager.close()
    writer.close()


def test_one_save_at_a_time() -> None:
    """Without a stager of ours, nothing waits: the second save is refused while the first is being written."""
    gate = GateStore(MemoryStore())
    writer = TidegateWriter(gate)
    state = state_on(torch.device("cpu"))
    gate.shut()
    first = dcp.async_save(state, storage_writer=writer, async_stager=_Nothing(), checkpoint_id="1")
    gate.await_waiting(1)
    second = dcp.async_save(state, storage_writer=writer, async_stager=_Nothing(), checkpoint_id="2")
    second.add_done_callback(writer.abort_if_failed)  # which must not touch the first
    assert "is still in flight" in str(second.exception(30))
    gate.open()
    first.result(30)
    same(loaded_like(state, gate), state)
    writer.close()


class _Nothing(dcp.staging.AsyncStager):
    """Stages nothing: the state does not change here."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


def test_a_step_that_is_there_is_refused_and_may_be_replaced() -> None:
    state, store = {"w": torch.ones(3)}, MemoryStore()
    with TidegateWriter(store, step=1) as writer:
        dcp.save(state, storage_writer=writer)
        with pytest.raises(BaseException, match="committed at memory"):
            dcp.save(state, storage_writer=writer)
    with TidegateWriter(store, step=1, overwrite=True) as writer:
        dcp.save({"w": torch.zeros(3)}, storage_writer=writer)
    assert loaded_like(state, store)["w"].tolist() == [0.0] * 3
    assert len([stat for stat in store.list() if stat.key.endswith(".tg")]) == 1


def test_old_checkpoints_go() -> None:
    store = MemoryStore()
    with TidegateWriter(store, keep_last=2) as writer:
        for step in range(4):
            dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id=str(step))
    with tidegate.CheckpointEngine(store) as engine:
        assert engine.steps() == [2, 3]


@pytest.mark.parametrize(
    "given, root, step",
    [("7", None, 7), ("step-12", None, 12), ("a/b/step-0000000003", "a/b", 3), (Path("/x/run7/4"), "/x/run7", 4)],
)
def test_checkpoint_ids(given: Any, root: str | None, step: int) -> None:
    assert split_checkpoint_id(given) == (root, step)


@pytest.mark.parametrize("given", ["", "latest", "a/b", "12345678901", "step-1x"])
def test_an_id_without_a_step_is_refused(given: str) -> None:
    assert not TidegateWriter.validate_checkpoint_id(given)
    with pytest.raises(tidegate.ConfigError):
        TidegateReader("x").reset(given)


def test_a_value_that_cannot_be_saved_is_refused_by_name() -> None:
    store = MemoryStore()
    with TidegateWriter(store) as writer, pytest.raises(BaseException, match="function"):
        dcp.save({"x": {"f": lambda: 1}, "w": torch.ones(2)}, storage_writer=writer, checkpoint_id="1")
    assert list(store.list()) == []


def test_a_replaced_base_of_differences_stays(tmp_path: Path) -> None:
    """DCP saves anew a step that others are differences to, and lets all older ones go: those that need it live on."""
    store = LocalStore(tmp_path, sync=False)
    save_steps(store, [0, 1, 2], DeltaPolicy(max_chain=4))
    state = {"w": torch.randn(40, 3)}
    with TidegateWriter(store, overwrite=True, keep_last=2) as writer:
        dcp.save(state, storage_writer=writer, checkpoint_id="1")
    assert sorted(records_of(store)) == [0, 1, 2], "2 is one of the last two, and needs 0 and what 1 was"
    same(loaded_like(state, store), state)
    with tidegate.CheckpointEngine(store) as engine:
        assert_same_bits(engine.load(2), state_at(2))
        assert_same_bits(engine.load(0), state_at(0))
    with TidegateWriter(store, overwrite=True, keep_last=1) as writer:
        dcp.save(state, storage_writer=writer, checkpoint_id="2")
    assert sorted(records_of(store)) == [2]
    assert {stat.key[:15] for stat in store.list()} == {"step-0000000002"}
    store.close()


def test_without_dcp_tensors_require_gradients_as_they_did() -> None:
    store = MemoryStore()
    state = {"w": torch.nn.Parameter(torch.randn(30, 7)), "frozen": torch.randn(3), "i": torch.arange(3), "step": 3}
    dcp.save(state, storage_writer=TidegateWriter(store), checkpoint_id="step-1")
    with tidegate.CheckpointEngine(store) as engine:
        loaded: Any = engine.load()
    assert [loaded[name].requires_grad for name in ("w", "frozen", "i")] == [True, False, False]
    assert loaded["w"].is_leaf
    same(loaded, state)
