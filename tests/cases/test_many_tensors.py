"""A hundred thousand tiny tensors: no work, file or handle for each (A26)."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest
import torch

import tidegate
from tests.kit.bits import physical_bytes
from tests.kit.children import run_forked

NUM_FILES = 256
SMALL, LARGE = 10_000, 100_000


def save_many(root: Path, device: str) -> None:
    """Save and load 10,000 and 100,000 tensors where few files may be open, and note the times."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))
    times = {}
    for num_tensors in (SMALL, LARGE):
        rows = torch.randn(num_tensors, 8)
        state = {f"layer{i // 100}.{i % 100}": row.clone().to(device) for i, row in enumerate(rows)}
        best: dict[str, float] = {}
        with tidegate.CheckpointEngine(root / str(num_tensors), snapshot="auto") as engine:
            for step in range(3 if num_tensors == SMALL else 2):
                start_s = time.perf_counter()
                future = engine.save_async(state, step=step)
                blocked_s = time.perf_counter() - start_s
                future.result()
                saved_s = time.perf_counter() - start_s
                loaded = engine.load(step, map_location=device)
                loaded_s = time.perf_counter() - start_s - saved_s
                found = {"blocked_s": blocked_s, "saved_s": saved_s, "loaded_s": loaded_s}
                best = {name: min(value, best.get(name, value)) for name, value in found.items()}
        assert isinstance(loaded, dict)
        assert list(loaded) == list(state)
        assert len({tensor.data_ptr() for tensor in loaded.values()}) == num_tensors
        assert physical_bytes(torch.stack(list(loaded.values()))) == physical_bytes(rows)
        num_stored = sum(path.stat().st_size for path in (root / str(num_tensors) / "step-0000000000").rglob("*.*"))
        times[num_tensors] = {**best, "overhead_bytes": (num_stored - rows.nbytes) / num_tensors}
    (root / "times.json").write_text(json.dumps(times))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_A26_a_hundred_thousand_tiny_tensors(tmp_path: Path, device: str) -> None:
    assert run_forked(save_many, tmp_path, device) == 0
    small, large = json.loads((tmp_path / "times.json").read_text()).values()
    assert large["blocked_s"] < 2
    assert large["saved_s"] < 10
    assert large["loaded_s"] < 10
    for name in ("blocked_s", "saved_s", "loaded_s"):
        assert large[name] < 3 * (LARGE / SMALL) * max(small[name], 0.01), f"{name} grows faster: {small, large}"
    assert large["overhead_bytes"] < 100, "per tensor"
    for num_tensors in (SMALL, LARGE):
        step = tmp_path / str(num_tensors) / "step-0000000000"
        assert sum(len(names) for _, _, names in os.walk(step)) == 3
