"""Delta chains of CUDA tensors: residuals are made and undone on the GPU, within budgets, and never on a wrong base."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.chains import bases_of, save_with_failures
from tests.kit.states import SmallTraining, odd_values
from tests.kit.stores import FailOnceStore, FlipStore
from tidegate.codec.words import WORD_OF_DTYPE
from tidegate.commit import read_commits
from tidegate.container import read_index
from tidegate.delta import DeltaPolicy
from tidegate.delta_store import load_checkpoint, save_checkpoint
from tidegate.load import manifest_text
from tidegate.manifest import parse_manifest
from tidegate.storage.memory import MemoryStore

pytestmark = pytest.mark.gpu

CHUNK = 1 << 20
NUMEL = 2_000_003
HOME = {"cuda:0": "cuda:0"}


def state_at(step: int) -> dict[str, Any]:
    """A state on the GPU that is a function of its step, and near that of the step before, but for its noise."""
    numbers = torch.Generator("cuda").manual_seed(7)
    master = torch.randn(NUMEL, generator=numbers, device="cuda").mul_(0.02)
    master.add_(torch.randn(NUMEL, generator=numbers, device="cuda"), alpha=1e-7 * step)
    noise = torch.randn(NUMEL // 2, generator=torch.Generator("cuda").manual_seed(step), device="cuda")
    return {
        "step": step,
        "model": {"w": master.bfloat16(), "small": master[:7].double()},
        "master": master,
        "exp_avg": noise,
        "count": torch.arange(999, device="cuda") + step,
        "same": torch.arange(70_001, device="cuda"),
        "host": torch.full((1000,), float(step)),
    }


def save_steps(store: Any, steps: list[int], policy: DeltaPolicy, **options: Any) -> list[tidegate.SaveReport]:
    reports = []
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, delta=policy, **options) as engine:
        for step in steps:
            engine.save_async(state_at(step), step=step)
            report = engine.wait()
            assert report is not None
            reports.append(report)
    return reports


def assert_all_load(store: Any, steps: list[int]) -> None:
    with tidegate.CheckpointEngine(store) as engine:
        assert engine.steps() == steps
        for step in steps:
            assert_same_bits(engine.load(step, map_location=HOME), state_at(step))
            assert_same_bits(engine.load(step, map_location="cpu"), state_at(step), device=False)


@pytest.mark.parametrize("snapshot", ["device", "lazy", "host"])
@pytest.mark.parametrize("codec", ["rans", "zstd", "planes"])
def test_every_step_of_a_chain_loads(codec: str, snapshot: str) -> None:
    store = MemoryStore()
    options = {"codec": codec, "snapshot": snapshot, "derive": False, "verify": "decode"}
    reports = save_steps(store, list(range(6)), DeltaPolicy(max_chain=3), **options)
    assert [report.base_step for report in reports] == [None, 0, 1, 2, None, 4]
    sizes = [report.stored_bytes for report in reports]
    most = 0.9 if codec == "planes" else 0.85  # whose full saves have their mantissas coded already
    assert max(sizes[1:4] + sizes[5:]) < most * min(sizes[0], sizes[4])
    if codec == "rans":
        assert "planes" in reports[1].by_codec, "what is left has its mantissas coded too"
    assert_all_load(store, list(range(6)))


def test_auto_may_choose_what_it_likes() -> None:
    store = MemoryStore()
    save_steps(store, [0, 1, 2, 3], DeltaPolicy(max_chain=2))
    assert [len(bases) for bases in bases_of(store).values()] == [0, 1, 2, 0]
    assert_all_load(store, [0, 1, 2, 3])


@pytest.mark.parametrize("keep_device_bytes", [0, 5 * CHUNK, None])
def test_what_has_no_room_on_the_device_is_a_difference_all_the_same(keep_device_bytes: int | None) -> None:
    store = MemoryStore()
    policy = DeltaPolicy(keep_device_bytes=keep_device_bytes)
    reports = save_steps(store, [0, 1, 2], policy, codec="rans", derive=False)
    assert bases_of(store) == {0: [], 1: [0], 2: [1, 0]}
    assert reports[2].stored_bytes < 0.85 * reports[0].stored_bytes
    assert_all_load(store, [0, 1, 2])


def test_a_real_training_on_the_gpu() -> None:
    training = SmallTraining(torch.device("cuda", 0), fused=True)
    store = MemoryStore()
    expected = {}
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec="rans", delta=DeltaPolicy(max_chain=4)) as engine:
        for step in range(7):
            training.step()
            expected[step] = copy.deepcopy(training.state)
            engine.save_async(training.state, step=step)
            engine.wait()
        for step, state in expected.items():
            assert_same_bits(engine.load(step, map_location=HOME), state)
    assert any(bases_of(store).values())


@pytest.mark.parametrize("dtype", [dtype for dtype in WORD_OF_DTYPE if not dtype.is_complex], ids=str)
def test_any_bits_of_any_dtype(dtype: torch.dtype) -> None:
    store = MemoryStore()
    numbers = torch.Generator("cuda").manual_seed(1)
    octets = torch.randint(0, 256, (800_000,), generator=numbers, device="cuda", dtype=torch.uint8)
    expected = []
    with tidegate.CheckpointEngine(store, chunk_bytes=1 << 16, codec="rans", delta=DeltaPolicy()) as engine:
        for step in range(3):
            octets[step::97] ^= 1
            state = {"x": octets.clone().view(dtype) if dtype is not torch.bool else octets % 2 == 1}
            expected.append(state)
            engine.save_async(state, step=step)
            engine.wait()
        for step, state in enumerate(expected):
            assert_same_bits(engine.load(step, map_location=HOME), state)


def test_odd_values_come_back(tmp_path: Path) -> None:
    state = {str(dtype): odd_values(dtype, 300_001, "cuda") for dtype in (torch.float16, torch.bfloat16, torch.float32)}
    with tidegate.CheckpointEngine(tmp_path, chunk_bytes=1 << 16, codec="rans", delta=DeltaPolicy()) as engine:
        for step in range(3):
            engine.save_async(state, step=step)
            engine.wait()
            assert_same_bits(engine.load(step, map_location=HOME), state)


def test_nothing_is_allocated_once_all_is_settled() -> None:
    state = state_at(0)
    with tidegate.CheckpointEngine(MemoryStore(), chunk_bytes=CHUNK, codec="rans", delta=DeltaPolicy()) as engine:
        for step in range(3):
            engine.save_async(state, step=step)
            engine.wait()
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for step in range(3, 6):
            engine.save_async(state, step=step)
            engine.wait()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= 1 << 20


def test_the_device_budget_holds() -> None:
    budget = 600 << 20
    store = MemoryStore()
    reports = save_steps(store, [0, 1, 2], DeltaPolicy(), codec="rans", device_budget_bytes=budget)
    assert all(report.peak_device_bytes <= budget for report in reports)
    assert_all_load(store, [0, 1, 2])


def test_after_a_failed_save_no_copy_is_taken_for_the_base() -> None:
    inner = MemoryStore()
    store = FailOnceStore(inner)
    save_with_failures(store, [4, 5], state_at, chunk_bytes=CHUNK, codec="rans")
    assert bases_of(inner)[5][:1] == [4]
    assert_all_load(inner, [0, 1, 4, 5])


def test_a_copy_that_was_written_to_is_found() -> None:
    store = MemoryStore()
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec="rans", delta=DeltaPolicy()) as engine:
        for step in (0, 1):
            engine.save_async(state_at(step), step=step)
            engine.wait()
        (encoder,) = engine._resources._device_encoders.values()
        assert encoder is not None
        assert encoder._deltas is not None
        for copied in encoder._deltas.kept._copies.values():
            copied[copied.numel() // 2] ^= 1
        torch.cuda.synchronize()
        engine.save_async(state_at(2), step=2)
        with pytest.raises(tidegate.SaveError, match="written to by something else"):
            engine.wait()
        engine.save_async(state_at(3), step=3)
        engine.wait()
    assert_all_load(store, [0, 1, 3])


def test_raw_stays_raw() -> None:
    store = MemoryStore()
    reports = save_steps(store, [0, 1], DeltaPolicy(), codec="raw", derive=False)
    assert reports[1].base_step is None
    assert_all_load(store, [0, 1])


def test_a_new_engine_goes_on() -> None:
    store = MemoryStore()
    for steps in ([0, 1], [2, 3]):
        save_steps(store, steps, DeltaPolicy(), codec="rans", derive=False)
    assert bases_of(store)[3][:1] == [2]
    assert_all_load(store, [0, 1, 2, 3])


def test_the_plain_store(tmp_path: Path) -> None:
    for step in (3, 5, 9):
        save_checkpoint(state_at(step), tmp_path, step=step, codec="rans")
    assert_same_bits(load_checkpoint(tmp_path, map_location=HOME), state_at(9))
    into = state_at(9)
    load_checkpoint(tmp_path, 5, into=into)
    assert_same_bits(into["master"], state_at(5)["master"])


def test_a_damaged_base_is_found_on_the_gpu() -> None:
    store = FlipStore(MemoryStore())
    save_steps(store, [0, 1], DeltaPolicy(), codec="rans", derive=False)
    first = next(stat.key for stat in store.list("step-0000000000/") if stat.key.endswith(".tg"))
    second = read_commits(store)[0][1]
    manifest = parse_manifest(manifest_text(store, second), second.manifest_key)
    assert manifest.delta is not None
    used = [entry for entry in read_index(store, first).entries if entry.chunk in manifest.delta.chunks]
    assert len(used) > 5
    for entry in used:
        store.flip(first, 8 * (entry.offset + entry.header.frame_bytes // 2))
        with tidegate.CheckpointEngine(store) as engine, pytest.raises(tidegate.CheckpointError):
            engine.load(1, map_location=HOME)
        store.flip(first, -1)
    with tidegate.CheckpointEngine(store) as engine:
        assert_same_bits(engine.load(1, map_location=HOME), state_at(1))
