"""Little memory and slow stores: what is accepted is saved, within the budgets, and nothing grows."""

from __future__ import annotations

import gc
import os
import threading
from typing import Literal

import pytest
import torch

import tidegate
from tests.cases.test_gpu_memory import fill_but
from tests.kit.bits import assert_same_bits
from tests.kit.states import reference
from tests.kit.stores import GateStore, SlowStore
from tidegate.codec.availability import unavailable_reason
from tidegate.codec.base import frame_bound_bytes
from tidegate.snapshot import SnapshotMode
from tidegate.storage import MemoryStore, SinkStore

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
HOME = {"cuda:0": "cuda:0"}
MIB = 1 << 20
TIMEOUT_S = 60.0


def state_of(num_mib: int, device: str, num_small: int = 100) -> dict[str, torch.Tensor]:
    """Half fp32, half bf16; one large tensor, some of a chunk or so, many small ones."""

    def normal(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(numel, device=device, dtype=dtype)

    quarter = num_mib * MIB // 4
    state = {"large": normal(quarter // 4, torch.float32)}
    state |= {f"middle{i}": normal(quarter // 16, torch.float32) for i in range(4)}
    state |= {f"half{i}": normal(quarter // 8, torch.bfloat16) for i in range(4)}
    return state | {f"small{i}": normal(1001 + i, torch.bfloat16) for i in range(num_small)}


def num_throttles(engine: tidegate.CheckpointEngine) -> int:
    """How often its host budgets have made somebody wait."""
    resources = engine._resources
    return resources.staging.budget.num_throttles + resources.outputs.budget.num_throttles


@pytest.mark.gpu
@pytest.mark.parametrize("snapshot", ["auto", "device"])
def test_a_gpu_that_the_training_has_filled(snapshot: SnapshotMode) -> None:
    """The save goes through the host, and what the training allocates right after the call is there."""
    state = state_of(96, "cuda")
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    torch.empty(1, dtype=torch.uint8, device="cuda").fill_(1)  # loads the kernel that is used below, which takes memory
    with tidegate.CheckpointEngine(MemoryStore(), codec="auto", snapshot=snapshot, chunk_bytes=4 * MIB) as engine:
        taken = fill_but(300 * MIB)
        try:
            free_bytes = torch.cuda.mem_get_info()[0]
            if not 200 * MIB <= free_bytes <= 364 * MIB:
                pytest.skip(f"{free_bytes >> 20} MiB are free, not 300: somebody else uses this GPU")
            for step in range(2):
                future = engine.save_async(state, step=step)
                activations = torch.empty(180 * MIB, dtype=torch.uint8, device="cuda")
                activations.fill_(step)
                report = future.result(TIMEOUT_S)
                assert report.snapshot == "host"
                assert any("no room" in note for note in report.notes), report.notes
                assert report.peak_device_bytes <= 300 * MIB
                del activations
                torch.cuda.empty_cache()
        finally:
            taken.clear()
            torch.cuda.empty_cache()
        for step in range(2):
            assert_same_bits(engine.load(step), expected)


@pytest.mark.parametrize("snapshot", ["host", "device", "lazy"])
@pytest.mark.parametrize("where", DEVICES)
def test_a_slow_store_and_a_small_host_budget(where: str, snapshot: SnapshotMode) -> None:
    """24 MiB go through 8 MiB at 100 MB/s while the training goes on behind the fence."""
    state = state_of(24, where)
    expected = reference(state)
    optimizer = torch.optim.SGD(list(state.values()), lr=0.1)
    budget_bytes = 8 * MIB
    store = SlowStore(MemoryStore(), bytes_per_s=100e6)
    with tidegate.CheckpointEngine(
        store, codec="raw", snapshot=snapshot, chunk_bytes=MIB, host_budget_bytes=budget_bytes
    ) as engine:
        engine.attach(optimizer)
        future = engine.save_async(state, step=0)
        with engine.fence():
            torch._foreach_add_(list(state.values()), 1)
        report = future.result(TIMEOUT_S)
        assert 0 < report.peak_host_bytes <= budget_bytes
        assert num_throttles(engine) > 0
        assert report.wall_s >= 0.95 * report.raw_bytes / 100e6, "the store was slow"
        assert_same_bits(engine.load(map_location=HOME), expected)
    store.close()


@pytest.mark.gpu
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("verify", ["checksum", "decode"])
@pytest.mark.parametrize("snapshot", ["host", "device", "lazy"])
def test_frames_wait_on_the_gpu_for_host_memory(
    snapshot: SnapshotMode, verify: Literal["checksum", "decode"], num_buffers: int
) -> None:
    """More chunks are encoded than host memory has room for, on the CPU too: each gets its turn, and keeps its bits."""
    state = {"gpu": state_of(24, "cuda"), "cpu": state_of(8, "cpu", num_small=5)}
    expected = reference(state)
    store = SlowStore(MemoryStore(), bytes_per_s=300e6)
    with tidegate.CheckpointEngine(store, codec="rans", snapshot=snapshot, chunk_bytes=MIB, verify=verify) as engine:
        outputs, (high, _) = engine._resources.outputs, engine._resources.options.watermarks
        limit_bytes = int(num_buffers * frame_bound_bytes(MIB) / high) + 1
        outputs.budget.resize(limit_bytes)
        for step in range(2):
            report = engine.save_async(state, step=step).result(TIMEOUT_S)
            assert outputs.budget.num_throttles > 0
            assert outputs.budget.take_peak() <= limit_bytes
            assert not any("on the CPU" in note for note in report.notes), report.notes
            assert_same_bits(engine.load(step, map_location=HOME), expected)
        assert outputs.budget.in_use_bytes == 0
    store.close()


@pytest.mark.gpu
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("with_cpu", [False, True], ids=["", "cpu too"])
@pytest.mark.parametrize("codec", ["rans", "zstd", "auto"])
def test_the_fence_opens_when_all_is_encoded(codec: str, with_cpu: bool) -> None:
    """Not only when there is host memory for the frames: here nothing is written until the training has gone on."""
    if codec == "zstd" and (reason := unavailable_reason("zstd", torch.device("cuda"))):
        pytest.skip(reason)
    state = {f"p{i}": torch.randn(MIB // 4, device="cuda") for i in range(4)}
    if with_cpu:  # such as step counters, which the optimizer owns as well
        state["step"] = torch.randn(100)
    optimizer = torch.optim.SGD(list(state.values()), lr=0.1)
    gate = GateStore(MemoryStore())
    with tidegate.CheckpointEngine(gate, codec=codec, snapshot="lazy", chunk_bytes=MIB) as engine:
        engine.attach(optimizer)
        engine.save_async(state, step=0)
        engine.wait()
        resources = engine._resources
        resources.outputs.budget.resize(int(frame_bound_bytes(MIB) / resources.options.watermarks[0]) + 1)
        for step in range(1, 4):
            expected = reference(state)
            gate.shut()
            future = engine.save_async(state, step=step)
            with engine.fence():
                torch._foreach_add_(list(state.values()), 1)
            assert not future.done()
            gate.open()
            report = future.result(TIMEOUT_S)
            assert report.snapshot == "lazy"
            assert_same_bits(engine.load(step, map_location=HOME), expected)


@pytest.mark.parametrize("rate", [50e6, 200e6])
@pytest.mark.parametrize("where", DEVICES)
def test_a_sink_of_a_set_rate(where: str, rate: float) -> None:
    """The host budget holds a fraction of what the sink takes in 0.3 s: the save waits for the sink, and ends."""
    state = state_of(int(rate * 0.3) >> 20, where)
    budget_bytes = 6 * MIB
    store = SinkStore(bytes_per_s=rate)
    with tidegate.CheckpointEngine(
        store, codec="raw", chunk_bytes=MIB, host_budget_bytes=budget_bytes, device_budget_bytes=1024 * MIB
    ) as engine:
        report = engine.save_async(state, step=0).result(TIMEOUT_S)
        assert 0 < report.peak_host_bytes <= budget_bytes
        assert num_throttles(engine) > 0
        assert engine.steps() == [0]
        assert store.taken_bytes > report.raw_bytes
        assert report.wall_s >= store.busy_s
    store.close()


@pytest.mark.parametrize("on_busy", ["wait", "skip", "error"])
@pytest.mark.parametrize("snapshot", ["device", "lazy"])
@pytest.mark.parametrize("where", DEVICES)
def test_a_burst_of_saves(where: str, snapshot: SnapshotMode, on_busy: Literal["wait", "skip", "error"]) -> None:
    """Of 30 saves, each that is accepted is committed with its own values, and nothing is held at the end."""
    state = state_of(2, where, num_small=5)
    optimizer = torch.optim.SGD([state["large"]], lr=0.1)
    gate = GateStore(MemoryStore())
    accepted = []
    with tidegate.CheckpointEngine(gate, snapshot=snapshot, codec="raw", chunk_bytes=MIB, on_busy=on_busy) as engine:
        engine.attach(optimizer)
        for step in range(100, 103):
            engine.save_async(state, step=step)
            engine.wait()
        before = in_use(where)
        for step in range(30):
            if on_busy != "wait" and step % 5 == 0:
                gate.open()
                engine.wait()
                gate.shut()
            with engine.fence():
                fill(state, step)
            if begun(engine, state, step):
                accepted.append(step)
        gate.open()
        engine.wait()
        after = in_use(where)
        assert accepted == list(range(0, 30, 1 if on_busy == "wait" else 5))
        assert engine.steps() == [*accepted, 100, 101, 102]
        for step in accepted[::6]:
            fill(state, step)
            assert_same_bits(engine.load(step, map_location=HOME), state)
        for name, held in before.items():
            assert after[name] <= held, (name, before, after)


def begun(engine: tidegate.CheckpointEngine, state: object, step: int) -> bool:
    """Save, and tell whether the engine has accepted that."""
    try:
        return not engine.save_async(state, step=step).cancelled()
    except tidegate.SaveError as exc:
        assert "still in flight" in str(exc)
        return False


def fill(state: dict[str, torch.Tensor], value: int) -> None:
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(value)


def in_use(where: str) -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    found = {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
    if where == "cuda":
        torch.cuda.synchronize()
        found["device bytes"] = torch.cuda.memory_allocated()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("verify", ["checksum", "decode"])
@pytest.mark.parametrize(
    ("codec", "budget_mib"),
    [("ans", 64), ("ans", 1024), ("rans", 64), ("rans", 1024), ("zstd", 1024), ("auto", 256), ("auto", 1024)],
)
@pytest.mark.parametrize("snapshot", ["device", "lazy"])
def test_device_memory_stays_within_the_budget(
    snapshot: SnapshotMode, codec: str, verify: Literal["checksum", "decode"], budget_mib: int
) -> None:
    """All that the engine allocates counts, from before it is made; beside that there is 1 MiB to gather small ones."""
    device = torch.device("cuda", 0)
    reason = unavailable_reason("zstd" if codec == "auto" else codec, device)  # its trial takes memory of its own, once
    if reason is not None:
        pytest.skip(reason)
    state = state_of(64, "cuda")
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    optimizer = torch.optim.SGD([state["large"], state["half0"]], lr=0.1)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with tidegate.CheckpointEngine(
        MemoryStore(), codec=codec, snapshot=snapshot, verify=verify, chunk_bytes=4 * MIB,
        device_budget_bytes=budget_mib * MIB,
    ) as engine:  # fmt: skip
        engine.attach(optimizer)
        for step in range(2):
            report = engine.save_async(state, step=step).result(TIMEOUT_S)
            assert report.peak_device_bytes <= budget_mib * MIB
        peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
        assert peak_bytes <= (budget_mib + 1) * MIB, report.notes
        if snapshot == "lazy":
            assert "lazy" in report.snapshot
        if budget_mib == 64 and snapshot == "device":
            assert any("no room" in note for note in report.notes), report.notes
        assert_same_bits(engine.load(1), expected)
