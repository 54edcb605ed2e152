"""What `save_async` costs the training thread: no device memory, no wait for the device, little host time."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.states import SmallTraining, reference
from tests.kit.stores import WrappedStore
from tidegate.snapshot import SnapshotMode
from tidegate.storage import MemoryStore, ObjectWriter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HOME = {"cuda:0": "cuda:0"}
MIB = 1 << 20
TIMEOUT_S = 60.0


class HeldStore(WrappedStore):
    """Lets the background thread of a save come no further than `create` while it is held."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self._may_create = threading.Event()
        self._may_create.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold every `create` inside the block."""
        self._may_create.clear()
        try:
            yield
        finally:
            self._may_create.set()

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        if not self._may_create.wait(TIMEOUT_S):
            raise TimeoutError("nobody let the save go on")
        return super().create(key, size_hint_bytes=size_hint_bytes, replace=replace)


@contextmanager
def synchronizing_is_an_error() -> Iterator[None]:
    """Make torch raise where it would wait for the device. For all threads of the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def allocations() -> int:
    """How many blocks of device memory torch has handed out so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@pytest.mark.gpu
def test_torch_tells_when_it_waits() -> None:
    """What the next test relies on."""
    x = torch.ones(5, device="cuda")
    before = allocations()
    with synchronizing_is_an_error():
        y = x + 1
        with pytest.raises(RuntimeError, match="synchroniz"):
            y.sum().item()
    assert allocations() > before


@pytest.mark.gpu
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "alone"])
@pytest.mark.parametrize("snapshot", ["device", "lazy", "auto"])
def test_a_later_save_of_an_unchanged_state_takes_no_memory_and_waits_for_nothing(
    snapshot: SnapshotMode, attached: bool
) -> None:
    training = SmallTraining(torch.device("cuda"), fused=True)
    store = HeldStore()
    with tidegate.CheckpointEngine(store, codec="raw", snapshot=snapshot, chunk_bytes=MIB) as engine:
        if attached:
            engine.attach(training.optimizer)
        training.step()
        for step in range(2):
            engine.save_async(training.state, step=step)
            engine.wait()
        torch.cuda.synchronize()
        for step in range(2, 5):
            state = training.state
            expected = reference(state)
            with store.held():
                before = allocations()
                with synchronizing_is_an_error():
                    future = engine.save_async(state, step=step)
                assert allocations() == before
                assert not future.done()
            report = future.result(TIMEOUT_S)
            is_lazy = attached and snapshot == "lazy"
            assert ("lazy" in report.snapshot) == is_lazy
            assert "host" not in report.snapshot
            assert_same_bits(engine.load(step, map_location=HOME), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("snapshot", ["device", "lazy", "auto"])
def test_a_kernel_that_runs_long_is_not_waited_for(snapshot: SnapshotMode) -> None:
    """It is queued before the call and writes the state after it; the call returns while it still runs."""
    training = SmallTraining(torch.device("cuda"), fused=True)
    store = HeldStore()
    with tidegate.CheckpointEngine(store, codec="raw", snapshot=snapshot, chunk_bytes=MIB) as engine:
        engine.attach(training.optimizer)
        training.step()
        for step in range(2):
            engine.save_async(training.state, step=step)
            engine.wait()
        reference(training.state)  # so that torch has memory for the next one, and asks the driver for none
        torch.cuda.synchronize()
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with store.held():
            begun.record()
            torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
            ended.record()
            training.step()
            state = training.state
            expected = reference(state)
            assert not ended.query(), "torch itself has waited, so this shows nothing"
            start_s = time.perf_counter()
            future = engine.save_async(state, step=2)
            call_s = time.perf_counter() - start_s
            assert not ended.query(), "it returned while the kernel ran"
            if snapshot != "lazy":
                training.step()  # queued behind the snapshot; nothing waits for the host
                assert not ended.query()
        future.result(TIMEOUT_S)
        ended.synchronize()
        assert call_s < begun.elapsed_time(ended) / 1e3 / 4
        assert_same_bits(engine.load(2, map_location=HOME), expected)


@pytest.mark.parametrize("snapshot", ["device", "lazy", "auto"])
@pytest.mark.parametrize("where", DEVICES)
def test_host_time_of_a_call_is_bounded_by_that_of_cloning_the_tensors(where: str, snapshot: SnapshotMode) -> None:
    """2,000 tensors: torch needs so long to queue a clone of each, or to make it, on the CPU."""
    parameters = [torch.nn.Parameter(torch.randn(300 + i % 7, device=where)) for i in range(2000)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    store = HeldStore()
    state = {"parameters": parameters}
    with tidegate.CheckpointEngine(store, codec="raw", snapshot=snapshot, chunk_bytes=MIB) as engine:
        engine.attach(optimizer)

        def save() -> None:
            nonlocal step
            step += 1
            engine.save_async(state, step=step)

        def clone() -> None:
            copies[:] = [parameter.detach().clone() for parameter in parameters]

        step, copies = 0, []
        for _ in range(2):
            save()
            engine.wait()
        cloning_s = shortest_s(clone)
        saving_s = []
        for _ in range(7):
            with store.held():
                saving_s.append(shortest_s(save, repeats=1))
            engine.wait()
    assert min(saving_s) <= 2 * cloning_s, (saving_s, cloning_s)


def shortest_s(call: Callable[[], None], repeats: int = 7) -> float:
    """The least host time of several calls, in seconds."""
    times_s = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
