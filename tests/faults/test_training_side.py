"""Faults on the training thread's side: an interrupt during the snapshot, a state that shrinks or cannot be read."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tidegate
from tests.faults.rig import CHUNK, all_keys, assert_nothing_lent, held_keys
from tests.kit.bits import assert_same_bits
from tests.kit.states import filled
from tests.kit.stores import GateStore
from tidegate.errors import TornSnapshotError
from tidegate.storage import LocalStore, MemoryStore

TIGHT_BYTES = 1 << 20
LARGE = {"num_tensors": 40, "num_bytes": CHUNK}


@contextlib.contextmanager
def held_back(gate: GateStore) -> Iterator[None]:
    """Shut the gate for the body, and open it however that ends."""
    gate.shut()
    try:
        yield
    finally:
        gate.open()


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """SIGINT reaches Python whatever the shell or an earlier test has made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGINT, before or signal.default_int_handler)


noticed = threading.Event()


def interrupt_when_blocked(gate: GateStore) -> threading.Thread:
    """Send SIGINT to the main thread as soon as the pipeline is full, so that the snapshot waits for room."""

    def send() -> None:
        gate.await_waiting(2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not noticed.wait(20):  # Python lost it, in a finalizer say
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    noticed.clear()
    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_ctrl_c_during_the_snapshot() -> None:
    gate = GateStore(MemoryStore())
    with tidegate.CheckpointEngine(gate, chunk_bytes=CHUNK, codec="raw", host_budget_bytes=TIGHT_BYTES) as engine:
        engine.save_async(filled(1.0, **LARGE), step=1)
        engine.wait()
        with held_back(gate):
            sender = interrupt_when_blocked(gate)
            with pytest.raises(KeyboardInterrupt):
                engine.save_async(filled(2.0, **LARGE), step=2)
            noticed.set()
            sender.join()
        assert engine.wait() is None, "the interrupt was raised at the call already"
        assert_same_bits(engine.load(), filled(1.0, **LARGE))
        assert all_keys(gate) == held_keys(gate)
        assert_nothing_lent(engine)
        engine.save_async(filled(3.0, **LARGE), step=2)
        engine.wait()
        assert_same_bits(engine.load(), filled(3.0, **LARGE))


def test_ctrl_c_then_a_last_save_as_scripts_do_it(tmp_path: Path) -> None:
    """`except KeyboardInterrupt: save` must save, and the script must end."""
    script = """
        import signal, sys, threading, torch, tidegate
        state = {"x": torch.zeros(1 << 20), "y": torch.zeros(1 << 20)}
        with tidegate.CheckpointEngine(sys.argv[1], chunk_bytes=1 << 16, host_budget_bytes=1 << 20) as engine:
            step = 0
            try:
                threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
                while True:
                    step += 1
                    state["x"].fill_(step), state["y"].fill_(step)
                    engine.save_async(state, step=step)
            except KeyboardInterrupt:
                state["x"].fill_(7), state["y"].fill_(7)
                engine.save_async(state, step=10**6)
                engine.wait()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=True, timeout=60)
    with tidegate.CheckpointEngine(tmp_path) as engine:
        assert engine.steps()[-1] == 10**6
        assert_same_bits(engine.load(), {"x": torch.full((1 << 20,), 7.0), "y": torch.full((1 << 20,), 7.0)})


def lazy_engine(store: GateStore, weights: list[torch.nn.Parameter]) -> tidegate.CheckpointEngine:
    """An engine that reads these weights in place, with room for few frames."""
    engine = tidegate.CheckpointEngine(
        store, chunk_bytes=CHUNK, codec="raw", snapshot="lazy", host_budget_bytes=TIGHT_BYTES
    )
    engine.attach(torch.optim.SGD(weights, lr=1.0))
    return engine


@pytest.mark.parametrize("new_bytes", [0, CHUNK // 2])
def test_a_storage_that_shrinks_while_it_is_read_in_place(new_bytes: int) -> None:
    """The gate holds the first frames back, so the last tensors have not been read when their storages shrink."""
    gate = GateStore(MemoryStore())
    weights = [torch.nn.Parameter(torch.full((CHUNK // 4,), float(i))) for i in range(40)]
    with lazy_engine(gate, weights) as engine:
        engine.save_async(list(weights), step=1)
        engine.wait()
        before = [torch.nn.Parameter(torch.full((CHUNK // 4,), float(i))) for i in range(40)]
        with held_back(gate):
            engine.save_async(list(weights), step=2)
            gate.await_waiting(2)
            weights[39].untyped_storage().resize_(new_bytes)
        with pytest.raises(TornSnapshotError, match=r"smaller|changed"):
            engine.wait()
        assert engine.steps() == [1]
        assert_same_bits(engine.load(), before)
        assert all_keys(gate) == held_keys(gate)
        assert_nothing_lent(engine)
        engine.save_async(list(before), step=3)
        engine.wait()
        assert_same_bits(engine.load(), before)


def test_a_storage_that_shrinks_after_the_snapshot_is_nobodys_business(tmp_path: Path) -> None:
    gate = GateStore(LocalStore(tmp_path))
    weights = [torch.full((CHUNK // 4,), float(i)) for i in range(8)]
    with tidegate.CheckpointEngine(gate, chunk_bytes=CHUNK) as engine:
        with held_back(gate):
            future = engine.save_async(list(weights), step=1)
            for weight in weights:
                weight.untyped_storage().resize_(0)
        future.result(60)
        assert_same_bits(engine.load(), [torch.full((CHUNK // 4,), float(i)) for i in range(8)])


def test_a_snapshot_that_raises_is_told_at_the_call_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state cannot be read: at each chunk in turn."""
    state = filled(1.0, num_tensors=5, num_bytes=CHUNK)
    store = MemoryStore()
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK) as engine:
        for nth in range(1, 6):
            num_calls = 0
            with monkeypatch.context() as patched:
                from tidegate import snapshot

                copy_chunk = snapshot.copy_chunk

                def failing(*args: object, real: object = copy_chunk, last: int = nth) -> None:
                    nonlocal num_calls
                    num_calls += 1
                    if num_calls == last:
                        raise error
                    real(*args)  # type: ignore[operator]

                patched.setattr(snapshot, "copy_chunk", failing)
                with pytest.raises(tidegate.SaveError, match=f"step {nth} failed") as caught:
                    engine.save_async(state, step=nth)
            assert caught.value.__cause__ is error
            assert engine.wait() is None
            assert all_keys(store) == set()
            assert_nothing_lent(engine)
        engine.save_async(state, step=9)
        engine.wait()
        assert_same_bits(engine.load(), state)


def test_an_optimizer_that_cannot_be_looked_at_is_told_before_anything_begins() -> None:
    weight = torch.nn.Parameter(torch.zeros(CHUNK))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with tidegate.CheckpointEngine(MemoryStore(), snapshot="lazy", chunk_bytes=CHUNK) as engine:
        engine.attach(optimizer)
        groups, optimizer.param_groups = optimizer.param_groups, [{"params": [None]}]
        with pytest.raises(AttributeError):
            engine.save_async({"w": weight}, step=1)
        optimizer.param_groups = groups
        assert engine.wait() is None
        engine.save_async({"w": weight}, step=1)
        engine.wait()
        assert_same_bits(engine.load(), {"w": weight})


def test_saving_and_loading_leave_the_callers_storages_resizable(tmp_path: Path) -> None:
    """FSDP frees and refills storages in place; `numpy()` on one of them would forbid that for good."""
    weight = torch.nn.Parameter(torch.ones(CHUNK // 4))
    alone = torch.ones(CHUNK // 8, dtype=torch.int64)  # a chunk of its own: encoded and decoded in place
    state = {"w": weight, "alone": alone, "small": [torch.ones(3), torch.ones(4)]}
    tidegate.save(state, tmp_path / "one.tg")
    for snapshot in ("host", "lazy"):
        with tidegate.CheckpointEngine(tmp_path / snapshot, snapshot=snapshot, chunk_bytes=CHUNK) as engine:  # type: ignore[arg-type]
            engine.attach(torch.optim.SGD([weight], lr=1.0))
            engine.save_async(state, step=1)
    loaded = tidegate.load(tmp_path / "one.tg", into=state)
    assert loaded["alone"] is alone  # type: ignore[index]
    fresh = tidegate.load(tmp_path / "one.tg")
    for tensor in [weight, alone, fresh["w"], fresh["alone"], *fresh["small"]]:  # type: ignore[index]
        tensor.untyped_storage().resize_(0)


def test_a_save_in_flight_cannot_be_cancelled(tmp_path: Path) -> None:
    gate = GateStore(LocalStore(tmp_path))
    with tidegate.CheckpointEngine(gate, chunk_bytes=CHUNK) as engine:
        with held_back(gate):
            future = engine.save_async(filled(1.0), step=1)
            assert not future.cancel()
        assert future.result(60).step == 1
        engine.wait()
        assert engine.steps() == [1]
