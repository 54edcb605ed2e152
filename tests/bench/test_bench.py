"""The benchmarks run, and write the figures that the README quotes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(tmp_path: Path, module: str) -> dict[str, object]:
    """Run a benchmark at its smallest and return what it wrote."""
    env = {**os.environ, "OUT": str(tmp_path)}
    command = [sys.executable, "-m", module, "--tiny", "--folder", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert isinstance(results, dict)
    assert {"cpu", "cores", "torch", "commit", "gpu"} <= set(results["machine"])
    return results


@pytest.mark.slow
def test_save(tmp_path: Path) -> None:
    results = run(tmp_path, "bench.save")
    assert {"wall_of_dcp_zstd", "bytes_of_dcp_zstd", "bf16_ratio"} <= set(results["large"])  # type: ignore[call-overload]
    assert "stall_of_copy" in results["stall"]  # type: ignore[operator]
    assert len(results["memory"]) == 3  # type: ignore[arg-type]
    assert results["small"]["1000"]["overhead_bytes_per_tensor"] < 100  # type: ignore[index]


@pytest.mark.gpu
def test_gpu_save(tmp_path: Path) -> None:
    results = run(tmp_path, "bench.gpu_save")
    assert len(results["saves"]) == 9  # type: ignore[arg-type]
    assert all(save["exact"] for save in results["saves"].values())  # type: ignore[attr-defined]
