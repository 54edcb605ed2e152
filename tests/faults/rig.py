"""What the fault tests share: small states of several chunks, what a store holds, and what an engine still holds."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tidegate.commit import commit_key, leftovers, read_commits
from tidegate.container import read_index
from tidegate.load import open_checkpoint
from tidegate.storage import Store, StoreFullError, StoreIOError, StoreTimeoutError

CHUNK = 1 << 16
LIMIT_S = 30.0

FAULTS: dict[str, Exception] = {
    "full": StoreFullError("no space left [ENOSPC]", key="k", errno=28),
    "io": StoreIOError("the disk failed [EIO]", key="k", errno=5),
    "timeout": StoreTimeoutError("no answer", key="k", retryable=True),
}


def state_of(step: int) -> dict[str, object]:
    """A state that is a function of its step: pieces of one tensor, several small ones in a chunk, ties, an array."""
    numbers = torch.Generator().manual_seed(step)
    master = torch.randn(20_000, generator=numbers)
    small = torch.randint(0, 1000, (50,), generator=numbers)
    return {
        "step": step,
        "master": master,
        "model": {"w": master.bfloat16(), "head": master[:64], "flags": small > step},
        "small": [small, (small + 1, "text", None)],
        "array": np.arange(step, step + 30.0).reshape(5, 6),
    }


def assert_holds(store: Store, step: int | None) -> None:
    """Assert that the newest checkpoint is that of `step`, bit for bit; None: that there is none."""
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK) as engine:
        if step is None:
            with pytest.raises(tidegate.CheckpointNotFoundError):
                engine.load()
        else:
            assert_same_bits(engine.load(), state_of(step))


def held_keys(store: Store) -> set[str]:
    """Keys of all that the commits of a store hold; every object among them is there and whole."""
    records, damaged = read_commits(store)
    assert not damaged
    keys = set()
    for record in records:
        manifest, _ = open_checkpoint(store, record)
        keys |= {commit_key(record.step), record.manifest_key}
        keys |= {read_index(store, item.key).record.key for item in manifest.objects}
    return keys


def all_keys(store: Store) -> set[str]:
    """Keys of everything in a store, leftovers included."""
    return {stat.key for stat in store.list()}


def collect_garbage(store: Store) -> None:
    """Delete what no commit holds, as `tidegate gc` does, and assert that just what commits hold is left."""
    for stat in list(leftovers(store, min_age_s=0.0)):
        store.delete(stat.key)
    assert all_keys(store) == held_keys(store)


def assert_nothing_lent(engine: tidegate.CheckpointEngine) -> None:
    """Assert that every buffer is back: wait for it, since the last may come back just after the save has ended."""
    for pool in (engine._resources.staging, engine._resources.outputs):
        gave_up = threading.Event()

        def give_up(budget: object = pool.budget, flag: threading.Event = gave_up) -> None:
            flag.set()
            budget.wake()  # type: ignore[attr-defined]

        timer = threading.Timer(LIMIT_S, give_up)
        timer.start()
        is_free = pool.budget.acquire(pool.budget.limit_bytes, gave_up.is_set)  # all of it: needs all to be back
        timer.cancel()
        timer.join()
        assert is_free, f"{pool.budget.in_use_bytes} bytes are still lent"
        pool.budget.release(pool.budget.limit_bytes)
        assert pool.budget.in_use_bytes == 0
