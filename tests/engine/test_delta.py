"""Delta chains: bounded, exact whatever the bits, and full again whenever they cannot be a difference."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.contract.codec_contract import CONTENTS
from tests.kit.bits import assert_same_bits
from tests.kit.chains import CHUNK, assert_all_load, bases_of, save_steps, save_with_failures, state_at
from tests.kit.states import SmallTraining, save_while_training
from tests.kit.stores import FailOnceStore, FlipStore
from tidegate.codec.words import WORD_OF_DTYPE, WordType
from tidegate.delta import DeltaPolicy
from tidegate.delta_store import load_checkpoint, save_checkpoint
from tidegate.storage.memory import MemoryStore

KEEP = {"kept": None, "read again": 0, "half kept": 150_000}


@pytest.mark.parametrize("keep_bytes", KEEP.values(), ids=KEEP)
def test_a_chain_is_bounded_and_every_step_loads(keep_bytes: int | None) -> None:
    store = MemoryStore()
    reports = save_steps(store, list(range(9)), DeltaPolicy(max_chain=3, keep_bytes=keep_bytes))
    assert bases_of(store) == {
        0: [], 1: [0], 2: [1, 0], 3: [2, 1, 0], 4: [], 5: [4], 6: [5, 4], 7: [6, 5, 4], 8: [],
    }  # fmt: skip
    assert [report.base_step for report in reports] == [None, 0, 1, 2, None, 4, 5, 6, None]
    sizes = [report.stored_bytes for report in reports]
    assert max(sizes[1:4] + sizes[5:8]) < 0.8 * min(sizes[0], sizes[4], sizes[8])
    assert_all_load(store, list(range(9)))


def test_a_new_engine_goes_on_with_the_chain(tmp_path: Path) -> None:
    store = MemoryStore()
    for step in range(4):
        save_steps(store, [step])
    assert bases_of(store) == {0: [], 1: [0], 2: [1, 0], 3: [2, 1, 0]}
    save_steps(store, [10], DeltaPolicy(max_chain=1))
    assert bases_of(store)[10] == []
    assert_all_load(store)


def test_the_plain_store(tmp_path: Path) -> None:
    for step in (3, 5, 9):
        report = save_checkpoint(state_at(step), tmp_path, step=step, metadata={"loss": 1.5})
        assert report.step == step
    assert_same_bits(load_checkpoint(tmp_path), state_at(9))
    assert_same_bits(load_checkpoint(tmp_path, 5, part="master"), state_at(5)["master"])
    into = state_at(9)
    load_checkpoint(tmp_path, 3, into=into)
    with pytest.raises(tidegate.StepExistsError):
        save_checkpoint(state_at(9), tmp_path, step=9)


@pytest.mark.parametrize(
    ("codec", "old"),
    [
        *(("zstd", old) for old in CONTENTS),
        *itertools.product(("rans", "deflate", "raw", "planes"), ("random-bits", "nan-payloads")),
    ],
)
def test_every_dtype_and_pattern_on_another(codec: str, old: str) -> None:
    """A chain through every pattern, from each: NaN payloads, infinities, denormals, -0.0, random, all equal."""
    dtypes = [dtype for dtype in WORD_OF_DTYPE if dtype != torch.bool]
    sequence = [old, *CONTENTS, old, old]
    store = MemoryStore()
    policy = DeltaPolicy(max_chain=len(sequence))
    states = []
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec=codec, delta=policy) as engine:
        for step, name in enumerate(sequence):
            rng = np.random.default_rng(step)
            state = {str(dtype): _filled(dtype, name, rng) for dtype in dtypes}
            if step == len(sequence) - 1:
                state = states[-1]
            states.append(state)
            engine.save_async(state, step=step)
        engine.wait()
        for step, state in enumerate(states):
            assert_same_bits(engine.load(step), state)


def _filled(dtype: torch.dtype, name: str, rng: np.random.Generator) -> torch.Tensor:
    word: WordType = WORD_OF_DTYPE[dtype]
    numel = 4100 // dtype.itemsize * dtype.itemsize // word.itemsize
    octets = CONTENTS[name](word, numel - numel % (dtype.itemsize // word.itemsize), rng)
    return torch.from_numpy(octets.copy()).view(dtype)


@pytest.mark.parametrize("codec", ["zstd", "rans", "deflate"])
def test_A19_only_bits_count(codec: str) -> None:
    """A NaN's payload changes, +0 becomes -0, nothing changes: each is exact, and nothing costs next to nothing."""
    store = MemoryStore()
    values = torch.full((100_000,), torch.nan)
    policy = DeltaPolicy()
    with tidegate.CheckpointEngine(store, codec=codec, delta=policy) as engine:
        for step in range(4):
            if step == 1:
                values.view(torch.int32)[5] ^= 1
            elif step == 2:
                values[7] = 0.0
            elif step == 3:
                values[7] = -0.0
            engine.save_async({"x": values}, step=step)
            engine.wait()
            assert_same_bits(engine.load(step), {"x": values})
        noise = {"x": torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)}
        engine.save_async(noise, step=10)
        engine.wait()
        engine.save_async(noise, step=11)
        report = engine.wait()
    assert report is not None
    assert bases_of(store)[11] == [10]
    assert report.stored_bytes < 20_000


CHANGES: dict[str, Any] = {
    "a name": lambda s: s.update(renamed=s.pop("master")),
    "a shape": lambda s: s.update(master=s["master"].view(2, -1)),
    "a dtype": lambda s: s.update(same=s["same"].int()),
    "an order": lambda s: s.update(model=s.pop("model")),
    "a tensor more": lambda s: s.update(more=torch.randn(10)),
    "a tensor less": lambda s: s.pop("same"),
    "a tie": lambda s: s.update(noise=s["same"]),
    "a flag": lambda s: s["master"].requires_grad_(),
}


@pytest.mark.parametrize("is_restarted", [False, True], ids=["same engine", "new engine"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_structure_makes_a_full_save(change: str, is_restarted: bool) -> None:
    store, policy = MemoryStore(), DeltaPolicy()
    states = {step: state_at(step) for step in range(4)}
    for step in (2, 3):
        CHANGES[change](states[step])
    engine = tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, delta=policy)
    for step, state in states.items():
        engine.save_async(state, step=step)
        engine.wait()
        if is_restarted:
            engine.close()
            engine = tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, delta=policy)
    assert bases_of(store) == {0: [], 1: [0], 2: [], 3: [2]}
    for step, state in states.items():
        assert_same_bits(engine.load(step), state)
    engine.close()


def test_another_chunk_size_makes_a_full_save() -> None:
    store = MemoryStore()
    save_steps(store, [0])
    with tidegate.CheckpointEngine(store, chunk_bytes=2 * CHUNK, delta=DeltaPolicy()) as engine:
        engine.save_async(state_at(1), step=1)
    assert bases_of(store) == {0: [], 1: []}
    assert_all_load(store, [0, 1])


def test_after_a_failed_save_the_base_is_still_the_one_before() -> None:
    """The copies in memory are of the save that failed by then: they are not taken for the base."""
    inner = MemoryStore()
    store = FailOnceStore(inner)
    save_with_failures(store, [4])
    assert bases_of(inner) == {0: [], 1: [0], 4: [1, 0]}
    assert_all_load(inner, [0, 1, 4])


@pytest.mark.parametrize("what", ["COMMIT", "manifest.json", "rank-00000.tg"])
def test_a_base_that_is_gone_makes_a_full_save(tmp_path: Path, what: str) -> None:
    with tidegate.CheckpointEngine(tmp_path, chunk_bytes=CHUNK, delta=DeltaPolicy(keep_bytes=0)) as engine:
        engine.save_async(state_at(0), step=0)
        engine.wait()
        next(tmp_path.rglob(what)).unlink()
        engine.save_async(state_at(1), step=1)
        report = engine.wait()
        assert report is not None
        assert what == "COMMIT" or "stored in full" in " ".join(report.notes)
        assert_same_bits(engine.load(1), state_at(1))


def test_a_chunk_of_the_base_that_is_damaged_is_stored_in_full(tmp_path: Path) -> None:
    store = FlipStore(MemoryStore())
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, delta=DeltaPolicy(keep_bytes=0)) as engine:
        engine.save_async(state_at(0), step=0)
        engine.wait()
        key = next(stat.key for stat in store.list() if stat.key.endswith(".tg"))
        store.flip(key, 8 * 5000)
        engine.save_async(state_at(1), step=1)
        report = engine.wait()
        assert report is not None
        assert "cannot be read" in " ".join(report.notes)
        store.flip(key, -1)
        assert_same_bits(engine.load(1), state_at(1))
    assert bases_of(store)[1] == [0], "all other chunks are differences"


def test_a_copy_that_has_changed_in_memory_is_not_used() -> None:
    store = MemoryStore()
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, delta=DeltaPolicy()) as engine:
        engine.save_async(state_at(0), step=0)
        engine.wait()
        kept = engine._resources._deltas._kept  # type: ignore[union-attr]
        for copy in kept._copies.values():
            copy[11] ^= 1
        engine.save_async(state_at(1), step=1)
        engine.wait()
    assert bases_of(store)[1] == []
    assert_all_load(store, [0, 1])


@pytest.mark.parametrize("snapshot", ["auto", "host", "lazy"])
def test_training_under_saves(device: torch.device, snapshot: Any) -> None:
    store = MemoryStore()
    training = SmallTraining(device, fused=False, width=301)
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, snapshot=snapshot, delta=DeltaPolicy(3)) as engine:
        engine.attach(training.optimizer)
        expected = save_while_training(engine, training, 6)
        for step, state in enumerate(expected):
            assert_same_bits(engine.load(step, map_location=str(device)), state, device=False)
            assert_same_bits(engine.load(step, part="weights"), state["weights"], device=False)  # type: ignore[index]
    assert [len(bases) for bases in bases_of(store).values()] == [0, 1, 2, 3, 0, 1]


def test_verify_decode_looks_at_residuals_too() -> None:
    store = MemoryStore()
    save_steps(store, [0, 1, 2], verify="decode")
    assert_all_load(store, [0, 1, 2])


def test_a_tight_budget_is_enough() -> None:
    store = MemoryStore()
    save_steps(store, [0, 1, 2], DeltaPolicy(keep_bytes=0), host_budget_bytes=2 << 20)
    assert bases_of(store) == {0: [], 1: [0], 2: [1, 0]}
    assert_all_load(store, [0, 1, 2])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"delta": DeltaPolicy(), "codec": "ans"}, "decodes on every machine"),
        ({"delta": 3}, "DeltaPolicy"),
    ],
)
def test_what_does_not_fit_is_refused(options: Any, match: str) -> None:
    with pytest.raises(tidegate.ConfigError, match=match):
        tidegate.CheckpointEngine(MemoryStore(), **options)


@pytest.mark.parametrize("fields", [{"max_chain": 0}, {"max_chain": True}, {"max_chain": 257}, {"keep_bytes": -1}])
def test_a_policy_that_is_none_is_refused(fields: Any) -> None:
    with pytest.raises(tidegate.ConfigError):
        DeltaPolicy(**fields)
