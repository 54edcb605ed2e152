"""A fault in any call to the store, in any way: the save fails cleanly or succeeds, and everything else goes on."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable

import pytest

import tidegate
from tests.faults.rig import CHUNK, FAULTS, all_keys, assert_nothing_lent, collect_garbage, held_keys, state_of
from tests.kit.bits import assert_same_bits
from tests.kit.stores import FailOnceStore
from tidegate.storage import MemoryStore

OPERATIONS = ("create", "append", "seal", "compare_and_put", "list", "delete", "read_all")
SWEEPS: list[tuple[str, str, bool]] = [
    *((operation, "io", False) for operation in OPERATIONS),
    *((operation, "timeout", True) for operation in OPERATIONS),
    *((operation, "full", False) for operation in ("create", "append", "seal", "compare_and_put")),
]


def calls_of_a_save(step: int, *, overwrite: bool = False) -> dict[str, int]:
    """How often a save of `step`, after one of step 1, calls each operation."""
    store = FailOnceStore(MemoryStore())
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec="raw", keep_last=1) as engine:
        engine.save_async(state_of(1), step=1)
        engine.wait()
        before = store.num_calls.copy()
        engine.save_async(state_of(step), step=step, overwrite=overwrite)
        engine.wait()
    return {operation: store.num_calls[operation] - before[operation] for operation in OPERATIONS}


def outcome_of(save: Callable[[], tidegate.SaveFuture], engine: tidegate.CheckpointEngine) -> BaseException | None:
    """Run a save to its end, take in what the engine has to say about it, and return why it failed."""
    try:
        future = save()
    except tidegate.CheckpointError as exc:  # at the call: the training thread's own look at the store
        return exc
    failure = future.exception(60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if failure is None:
            engine.wait()
        else:
            with pytest.raises(type(failure)) as raised:
                engine.wait()
            assert raised.value is failure, "the failure is told once more, and is the same"
            assert engine.wait() is None
    assert {w.category for w in caught} <= {tidegate.CheckpointWarning}
    return failure


def check_fault(operation: str, nth: int, error: Exception, *, after: bool, target: int) -> None:
    """Save step 1; save `target` with one fault; look at everything; save step 3."""
    store = FailOnceStore(MemoryStore())
    threads = threading.active_count()
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec="raw", keep_last=1) as engine:
        engine.save_async(state_of(1), step=1)
        engine.wait()
        store.fail(operation, nth, error, after=after)
        failure = outcome_of(lambda: engine.save_async(state_of(2), step=target, overwrite=target == 1), engine)
        is_new = failure is None
        if failure is not None:
            assert isinstance(failure, tidegate.SaveError | tidegate.StepExistsError), repr(failure)
            assert failure.__cause__ is error
            # A lost answer to the commit itself is the one failure that may leave the new state.
            is_new = after and operation == "compare_and_put" and "was put" in str(failure)
            assert is_new or "nothing was committed" in str(failure) or isinstance(failure, tidegate.StepExistsError)
        assert_same_bits(engine.load(), state_of(2 if is_new else 1))
        assert_nothing_lent(engine)
        if failure is not None and not is_new:
            assert all_keys(store) == held_keys(store), "a failed save cleans up after itself"
        engine.save_async(state_of(3), step=3)
        engine.wait()
        assert_same_bits(engine.load(), state_of(3))
        assert engine.steps() == [3]
        collect_garbage(store)
        assert_same_bits(engine.load(), state_of(3))
        assert_nothing_lent(engine)
    assert threading.active_count() == threads


@pytest.mark.parametrize("target", [2, 1], ids=["new-step", "overwrite"])
@pytest.mark.parametrize(("operation", "kind", "after"), SWEEPS, ids=lambda value: str(value))
def test_one_fault_in_a_save(operation: str, kind: str, after: bool, target: int) -> None:
    num_calls = calls_of_a_save(target, overwrite=target == 1)[operation]
    for nth in range(1, num_calls + 1):
        check_fault(operation, nth, copy.copy(FAULTS[kind]), after=after, target=target)


def test_the_sweep_covers_a_save() -> None:
    """Else the test above would prove nothing."""
    calls = calls_of_a_save(2)
    assert min(calls.values()) >= 1
    assert calls["append"] >= 4


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("step", [2, "latest"])
def test_one_fault_in_a_load(kind: str, step: int | str) -> None:
    """It fails with an error that says so, or falls back to step 1 and warns; the next load is right."""
    for operation in ("stat", "read_into", "read_all", "list"):
        store = FailOnceStore(MemoryStore())
        with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK) as engine:
            engine.save_async(state_of(1), step=1)
            engine.save_async(state_of(2), step=2)
            engine.wait()
            before = store.num_calls[operation]
            engine.load(step)  # type: ignore[arg-type]
            for nth in range(1, store.num_calls[operation] - before + 1):
                error = copy.copy(FAULTS[kind])
                store.fail(operation, nth, error)
                check_load_with_a_fault(engine, step, error)
                assert_same_bits(engine.load(step), state_of(2))  # type: ignore[arg-type]


def check_load_with_a_fault(engine: tidegate.CheckpointEngine, step: int | str, error: Exception) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loaded = engine.load(step)  # type: ignore[arg-type]
        except tidegate.LoadError as exc:
            assert exc.__cause__ is error
            return
    if caught:
        assert step == "latest"
        assert [w.category for w in caught] == [tidegate.CheckpointWarning]
        assert "step 2" in str(caught[0].message)
        assert_same_bits(loaded, state_of(1))
    else:
        assert_same_bits(loaded, state_of(2))
