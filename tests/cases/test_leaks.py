"""Nothing grows from save to save, and `close` gives everything back (A25)."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
from pathlib import Path

import pytest
import torch

import tidegate
from tests.kit.children import run_forked
from tidegate.storage.local import LocalStore

MIB = 1 << 20
SIZES = (8 * MIB, 5 * MIB, 6 * MIB)
HOST_BUDGET_BYTES = 32 * MIB
NUM_WARM = 12
NUM_SAVES = 100


def in_use(device: str) -> dict[str, float]:
    """What this process holds."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as fields:
        rss_bytes = int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = {
        "rss_bytes": rss_bytes,
        "num_files": len(os.listdir("/proc/self/fd")),
        "num_threads": threading.active_count(),
    }
    if device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        found["gpu_bytes"] = total_bytes - free_bytes
        found["allocated_bytes"] = torch.cuda.memory_allocated()
    return found


def save_often(root: Path, device: str, codec: str, waits: bool) -> None:
    """Save states of three sizes in turn, and note what is in use after the warm-up, at the end, and when closed."""
    torch.set_num_threads(1)
    states = [
        {"x": torch.randn(size // 8, device=device), "y": torch.zeros(size // 8, device=device)} for size in SIZES
    ]

    def engine_in(store: LocalStore) -> tidegate.CheckpointEngine:
        return tidegate.CheckpointEngine(
            store, keep_last=1, codec=codec, chunk_bytes=MIB, host_budget_bytes=HOST_BUDGET_BYTES
        )

    with contextlib.closing(LocalStore(root / "warm", sync=False)) as store, engine_in(store) as engine:
        engine.save_async(states[0], step=0).result()  # loads every library and kernel that the others use
        engine.load(0)
    notes = {"before": in_use(device)}
    store = LocalStore(root, sync=False)
    engine = engine_in(store)
    peak_bytes = 0
    for step in range(NUM_SAVES):
        future = engine.save_async(states[step % len(states)], step=step)
        if waits:
            peak_bytes = max(peak_bytes, future.result().peak_host_bytes)
        if step + 1 in (NUM_WARM, NUM_SAVES):
            engine.wait()
            notes["warm" if step + 1 == NUM_WARM else "end"] = in_use(device)
    engine.close()
    notes["closed"] = in_use(device)
    notes["peak"] = {"host_bytes": peak_bytes}
    (root / "notes.json").write_text(json.dumps(notes))


@pytest.mark.parametrize(
    ("device", "codec", "waits"),
    [
        ("cpu", "raw", True),
        ("cpu", "zstd", False),
        pytest.param("cuda", "zstd", True, marks=pytest.mark.gpu),
        pytest.param("cuda", "raw", False, marks=pytest.mark.gpu),
    ],
)
def test_A25_nothing_grows(tmp_path: Path, device: str, codec: str, waits: bool) -> None:
    assert run_forked(save_often, tmp_path, device, codec, waits) == 0
    notes = json.loads((tmp_path / "notes.json").read_text())
    before, warm, end, closed = (notes[name] for name in ("before", "warm", "end", "closed"))
    for name in warm:
        assert end[name] <= 1.05 * warm[name], f"{name}: {notes}"
    assert end["rss_bytes"] <= warm["rss_bytes"] + 4 * MIB, "5 % of an interpreter with torch would hide much"
    assert closed["num_files"] <= before["num_files"]
    assert closed["num_threads"] == before["num_threads"] + 8, "those of the caller's own store"
    threads_bytes = 8 * MIB  # what the allocator keeps for the threads of the store
    assert closed["rss_bytes"] <= before["rss_bytes"] + 8 * MIB + threads_bytes, str(notes)
    assert notes["peak"]["host_bytes"] <= HOST_BUDGET_BYTES
    assert closed.get("allocated_bytes", 0) <= before.get("allocated_bytes", 0)
