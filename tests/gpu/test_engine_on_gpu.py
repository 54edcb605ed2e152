"""The whole engine on a GPU: every codec in every snapshot mode while training changes the state; budgets."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.states import random_state
from tests.kit.stores import GateStore
from tidegate.storage.local import LocalStore

pytestmark = pytest.mark.gpu

CHUNK = 1 << 16
HOME = {"cuda:0": "cuda:0"}


@pytest.mark.parametrize("mode", ["device", "lazy", "host"])
@pytest.mark.parametrize("codec", ["raw", "zstd", "ans", "rans"])
def test_small_state_that_training_changes(tmp_path: Path, codec: str, mode: str) -> None:
    weight = torch.nn.Parameter(torch.randn(5 * CHUNK, device="cuda"))
    half = torch.nn.Parameter(weight.detach().to(torch.bfloat16)[3:])
    optimizer = torch.optim.AdamW([weight, half])
    gate = GateStore(LocalStore(tmp_path))
    expected = {}
    with tidegate.CheckpointEngine(gate, codec=codec, snapshot=mode, chunk_bytes=CHUNK) as engine:  # type: ignore[arg-type]
        engine.attach(optimizer)
        for step in range(4):
            weight.grad, half.grad = torch.randn_like(weight), torch.randn_like(half)
            optimizer.step()
            state = {"w": weight, "h": half, "optimizer": optimizer.state_dict()}
            expected[step] = copy.deepcopy(state)
            engine.wait()
            if mode != "lazy":
                gate.shut()  # nothing is written before the optimizer has stepped again
            future = engine.save_async(state, step=step)
            optimizer.step()
            gate.open()
            report = future.result(60)
            assert mode in report.snapshot
        for step, state in expected.items():
            assert_same_bits(engine.load(step, map_location=HOME), state)
    assert codec in report.by_codec


def test_small_ans_checkpoint_comes_back_on_the_cpu(tmp_path: Path) -> None:
    state = random_state(3 << 20, "cuda")
    with tidegate.CheckpointEngine(tmp_path, codec="ans", chunk_bytes=1 << 20) as engine:
        engine.save_async(state, step=0).result(60)
        assert_same_bits(engine.load(), copy.deepcopy(state), device=False)


@pytest.mark.parametrize("codec", ["zstd", "raw", "rans"])
def test_cpu_reads_what_the_gpu_wrote_and_the_other_way_round(tmp_path: Path, codec: str) -> None:
    on_gpu = random_state(6 << 20, "cuda")
    tidegate.save(on_gpu, tmp_path / "gpu.tg", codec=codec)
    on_cpu = tidegate.load(tmp_path / "gpu.tg")
    assert_same_bits(on_cpu, on_gpu, device=False)
    tidegate.save(on_cpu, tmp_path / "cpu.tg", codec=codec)
    assert_same_bits(tidegate.load(tmp_path / "cpu.tg", map_location="cuda"), on_gpu, device=False)


def test_into_fills_gpu_tensors_in_place(tmp_path: Path) -> None:
    state = random_state(6 << 20, "cuda")
    tidegate.save(state, tmp_path / "x.tg")
    target = copy.deepcopy(state)
    master = target["optimizer"]["state"][0]["master"]  # type: ignore[index]
    master.zero_()
    loaded = tidegate.load(tmp_path / "x.tg", into=target)
    assert loaded["optimizer"]["state"][0]["master"] is master  # type: ignore[index]
    assert_same_bits(loaded, state)


def test_one_engine_after_the_other_uses_the_same_memory(tmp_path: Path) -> None:
    state, chunk_bytes = torch.randn(12 << 20, device="cuda"), 16 << 20
    reserved_bytes = []
    for step in range(20):
        with tidegate.CheckpointEngine(
            tmp_path, codec="rans", snapshot="device", verify="decode", chunk_bytes=chunk_bytes, keep_last=1
        ) as engine:
            assert engine.save_async(state, step=step).result(60).snapshot == "device"
        del engine
        gc.collect()
        reserved_bytes.append(torch.cuda.memory_reserved())
    assert reserved_bytes[-1] - reserved_bytes[2] < chunk_bytes, "each takes many times as much"


def test_a_device_budget_too_small_for_a_snapshot_goes_through_the_host(tmp_path: Path) -> None:
    state = {"w": torch.randn(64 << 20, device="cuda")}
    budget = 1 << 30
    with tidegate.CheckpointEngine(tmp_path, device_budget_bytes=budget, chunk_bytes=8 << 20) as engine:
        engine.save_async(state, step=0)
        report = engine.wait()
        assert report is not None
        assert report.peak_device_bytes <= budget
        assert_same_bits(engine.load(map_location=HOME), state)
    with tidegate.CheckpointEngine(tmp_path, device_budget_bytes=64 << 20, chunk_bytes=8 << 20) as engine:
        report = engine.save_async(state, step=1).result(120)
        assert report.snapshot == "host"
        assert report.peak_device_bytes <= 64 << 20
        assert any("no room" in note for note in report.notes)
        assert_same_bits(engine.load(1, map_location=HOME), state)


def test_lazy_mode_takes_no_device_memory_beyond_its_ring(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(64 << 20, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with tidegate.CheckpointEngine(tmp_path, codec="ans", snapshot="lazy", chunk_bytes=8 << 20) as engine:
        engine.attach(optimizer)
        engine.save_async({"w": weight}, step=0).result(60)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        report = engine.save_async({"w": weight}, step=1).result(60)
        assert torch.cuda.max_memory_allocated() - before <= 1 << 20
        assert report.peak_device_bytes < 256 << 20


def test_all_memory_comes_back(tmp_path: Path) -> None:
    state = random_state(64 << 20, "cuda")

    def run() -> int:
        with tidegate.CheckpointEngine(tmp_path, snapshot="device") as engine:
            for step in range(3):
                engine.save_async(state, step=step, overwrite=True)
        torch.cuda.synchronize()
        gc.collect()  # what earlier tests left in cycles would else go in between
        return torch.cuda.memory_allocated()

    assert run() == run() == run()
