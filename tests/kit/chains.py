"""States that change a little from step to step, and what a store says of the chains that they are saved in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.stores import FailOnceStore
from tidegate.commit import CommitRecord, read_commits
from tidegate.delta import DeltaPolicy
from tidegate.storage import StoreIOError
from tidegate.storage.base import Store

CHUNK = 1 << 16
NUMEL = 60_000


def state_at(step: int, *, numel: int = NUMEL) -> dict[str, object]:
    """A state that is a function of its step, and near that of the step before."""
    numbers = torch.Generator().manual_seed(7)
    master = torch.randn(numel, generator=numbers).mul_(0.02)
    master.add_(torch.randn(numel, generator=numbers), alpha=1e-7 * step)
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(step))
    return {
        "step": step,
        "model": {"w": master.bfloat16()},
        "master": master,
        "noise": noise,
        "same": torch.arange(999),
    }


def save_steps(
    store: Store, steps: list[int], policy: DeltaPolicy | None = None, *, chunk_bytes: int = CHUNK, **options: object
) -> list[tidegate.SaveReport]:
    """Save the states of some steps one after the other, through one engine."""
    policy = DeltaPolicy(max_chain=3) if policy is None else policy
    reports = []
    with tidegate.CheckpointEngine(store, chunk_bytes=chunk_bytes, delta=policy, **options) as engine:  # type: ignore[arg-type]
        for step in steps:
            engine.save_async(state_at(step), step=step)
            report = engine.wait()
            assert report is not None
            reports.append(report)
    return reports


def save_with_failures(
    store: FailOnceStore,
    then: list[int],
    state_of: Callable[[int], object] = state_at,
    *,
    chunk_bytes: int = CHUNK,
    codec: str = "auto",
) -> None:
    """Save steps 0 and 1, fail to save 2 and 3 at different operations, and save those of `then`."""
    with tidegate.CheckpointEngine(store, chunk_bytes=chunk_bytes, codec=codec, delta=DeltaPolicy()) as engine:
        for step in (0, 1):
            engine.save_async(state_of(step), step=step)
            engine.wait()
        for step, operation in ((2, "seal"), (3, "compare_and_put")):
            store.fail(operation, 1, StoreIOError("the disk failed", key="k", errno=5))
            engine.save_async(state_of(step), step=step)
            with pytest.raises(tidegate.SaveError):
                engine.wait()
        for step in then:
            engine.save_async(state_of(step), step=step)
            engine.wait()


def records_of(store: Store) -> dict[int, CommitRecord]:
    """The COMMIT records by step."""
    records, damaged = read_commits(store)
    assert not damaged
    return {record.step: record for record in records}


def bases_of(store: Store) -> dict[int, list[int]]:
    """By step, the steps that it needs, the nearest first."""
    return {step: [base for base, _ in record.bases] for step, record in records_of(store).items()}


def assert_all_load(store: Store, steps: list[int] | None = None) -> None:
    """Assert that every listed step loads, bit for bit; and that these are listed, where some are given."""
    with tidegate.CheckpointEngine(store) as engine:
        assert steps is None or engine.steps() == sorted(steps)
        for step in engine.steps():
            assert_same_bits(engine.load(step), state_at(step))
