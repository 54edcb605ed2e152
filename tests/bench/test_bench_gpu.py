"""The benchmarks of a GPU run in small, and write the figures and plots that they promise; some run on a CPU too."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .test_bench import MACHINE, ROOT, numbers

ON_A_GPU = ("overlap", "interference", "memory")
PNGS = {"overlap": {"overlap-tiny.png", "overlap-tiny-timeline.png"}}
CODECS = {"raw", "zstd", "ans", "rans", "auto"}


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one bench with --tiny; its results go to folder/results, its checkpoints below `folder` too."""
    takes_folder = name not in ("overlap", "interference")
    command = [sys.executable, "-m", f"bench.{name}", "--tiny", *(("--folder", str(folder)) if takes_folder else ())]
    environment = {**os.environ, "OUT": str(folder / "results")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)


def results_of(name: str, folder: Path) -> Any:
    """Run one bench; return its JSON, checked for what all of them have in common."""
    done = run(name, folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert [path.name for path in folder.iterdir()] == ["results"], "it cleans up"
    files = {path.name for path in (folder / "results").iterdir()}
    assert files >= {f"{name}-tiny.json"} | PNGS.get(name, {f"{name}-tiny.png"})
    found = json.loads((folder / "results" / f"{name}-tiny.json").read_text())
    assert found["machine"].keys() >= MACHINE
    results = {key: value for key, value in found.items() if key != "machine"}
    assert all(math.isfinite(number) for number in numbers(results))
    return results


@pytest.mark.slow
def test_gil(tmp_path: Path) -> None:
    found = results_of("gil", tmp_path)
    assert {case["sink"] for case in found["cases"]} == {"no limit", "5 GB/s", "folder"}
    for case in found["cases"]:
        assert 0 < case["rate"] < 3
        assert -1 < case["lock"] < 1
        assert 0 <= case["core"] < 1
        for name in ("rate", "lock"):
            low, high = case[f"{name}_quartiles"]
            assert low <= case[name] <= high
        assert case["speed"] > 0
        assert case["num_saves"] >= len(case["rounds"]) == 2
        assert case["num_chunks"] >= 1
    assert found["summary"]["worst_rate"] == min(case["rate"] for case in found["cases"])
    assert found["summary"]["worst_lock"] == max(case["lock"] for case in found["cases"])


@pytest.mark.slow
def test_restore(tmp_path: Path) -> None:
    found = results_of("restore", tmp_path)
    loads = {load["name"]: load for load in found["loads"]}
    assert loads.keys() >= {"raw, new", "zstd, into", "torch.load", "torch.load, mmap", "DCP, into"}
    for load in loads.values():
        assert load["times"]["median_s"] > 0
    stages = {"read", "decode"} | ({"copy"} if torch.cuda.is_available() else set())
    assert loads["zstd, new"]["stages_s"].keys() == stages
    assert loads["torch.load"]["times_torch_load"] == 1.0


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    found = results_of("soak", tmp_path)
    assert found["summary"]["saves"] == 20
    assert found["growth"].keys() >= {"rss_bytes", "num_files", "num_threads", "num_root_files"}
    for name in ("num_files", "num_threads", "num_root_files"):
        assert found["growth"][name]["growth"] <= 0, found["growth"]


@pytest.mark.gpu
@pytest.mark.slow
def test_overlap(tmp_path: Path) -> None:
    found = results_of("overlap", tmp_path)
    assert {save["codec"] for save in found["saves"]} == CODECS
    assert {save["sink"] for save in found["saves"]} == {
        "no limit host", "2 host", "25 host", "no limit device", "25 device",
    }  # fmt: skip
    for save in found["saves"]:
        assert save["law"] > 0
        assert save["num_chunks"] > 1
        assert (save["auto"] is None) == (save["codec"] != "auto")
    trace = json.loads((tmp_path / "results" / "overlap-tiny.trace.json").read_text())
    assert trace["traceEvents"]


@pytest.mark.gpu
@pytest.mark.slow
def test_interference(tmp_path: Path) -> None:
    found = results_of("interference", tmp_path)
    assert {(case["mode"], case["codec"]) for case in found["cases"]} >= {
        ("device", "auto"),
        ("lazy", "ans"),
        ("device", "rans"),
    }
    for case in found["cases"]:
        assert case["num_saves"] >= 1
        assert case["quiet_p50_s"] <= case["quiet_p99_s"]
        assert case["mode"] in case["snapshot"]
        assert case["num_chunks"] > 1
    assert {case["chunk_mib"] for case in found["cases"] if case["loop"] == "Python"} == {None, 64}


@pytest.mark.gpu
@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    found = results_of("memory", tmp_path)
    assert {case["codec"] for case in found["cases"]} == {"ans", "auto"}
    assert found["summary"]["is_exact"]
    for case in found["cases"]:
        assert case["snapshot"] == "lazy"
        assert case["reported_device_bytes"] <= found["budget_bytes"]
        assert case["reported_host_bytes"] <= found["budget_bytes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("name", ON_A_GPU)
def test_without_a_gpu_it_says_so(tmp_path: Path, name: str) -> None:
    done = run(name, tmp_path)
    assert done.returncode == 2
    assert "needs an NVIDIA GPU" in done.stderr
    assert not list(tmp_path.iterdir())
