"""The benchmarks run, in small, and write the figures that bench/README.md promises."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RATIOS = {
    "large": ("wall_of_dcp_zstd", "bytes_of_dcp_zstd", "load_of_torch_load", "bf16_ratio"),
    "stall": ("stall_of_copy",),
    "small": ("growth_for_ten_times_the_tensors",),
}
MACHINE = {"cpu", "cores", "kernel", "python", "commit", "time", "gpu", "torch", "zstandard"}
SAVERS = {"tidegate", "torch.save", "dcp+zstd 1 thread", "dcp+zstd 2 threads", "copy", "raw write"}


def numbers(x: object) -> Iterator[float]:
    """Every number in a result."""
    if isinstance(x, dict):
        for value in x.values():
            yield from numbers(value)
    elif isinstance(x, list):
        for value in x:
            yield from numbers(value)
    elif isinstance(x, int | float):
        yield float(x)


@pytest.mark.slow
def test_the_cpu_benchmark_runs_and_keeps_its_promises(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.save", "--tiny", "--folder", str(tmp_path)]
    environment = {**os.environ, "OUT": str(tmp_path / "results")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "results" / "save-cpu-tiny.json").read_text())
    assert found["machine"].keys() >= MACHINE
    for part, names in RATIOS.items():
        for name in names:
            assert found[part][name] > 0, f"{part}.{name}"
    assert found["large"]["save"].keys() == SAVERS
    assert found["large"]["load"].keys() == {"tidegate", "torch.load"}
    for times in (*found["large"]["save"].values(), *found["large"]["load"].values()):
        assert 0 < times["min_s"] <= times["median_s"] <= times["max_s"]
    assert found["large"]["bf16_ratio"] > 1.2
    assert len(found["memory"]) == 3
    assert all(0 < budget["peak_of_budget"] < 10 for budget in found["memory"].values())
    assert {"100", "1000"} <= found["small"].keys()
    assert all(0 < found["small"][count]["overhead_bytes_per_tensor"] < 200 for count in ("100", "1000"))
    results = {name: part for name, part in found.items() if name != "machine"}
    assert all(math.isfinite(number) for number in numbers(results))
    assert [path.name for path in tmp_path.iterdir()] == ["results"], "it cleans up"
