"""What every benchmark shares: the machine line, repeats, a table, and one JSON a run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("torch", "numpy", "zstandard", "xxhash")
LIBRARIES += ("nvidia-libnvcomp-cu12", "nvidia-libnvcomp-cu13", "cupy-cuda12x", "cupy-cuda13x")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the repeats of one thing."""

    values_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle one."""
        return statistics.median(self.values_s)

    def json(self) -> dict[str, float | int]:
        """For the results file."""
        values = self.values_s
        return {"median_s": self.median_s, "min_s": min(values), "max_s": max(values), "n": len(values)}


def repeat(
    work: Callable[[], object], *, num: int = 5, warm_up: int = 1, before: Callable[[], object] | None = None
) -> Times:
    """Time `work` several times; `before` runs ahead of each, untimed."""
    values = []
    for i in range(warm_up + num):
        if before is not None:
            before()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        work()
        if i >= warm_up:
            values.append(time.perf_counter() - start_s)
    return Times(tuple(values))


def interleave(works: dict[str, Callable[[], object]], *, num: int = 5, warm_up: int = 1) -> dict[str, Times]:
    """Time several things in turn, A B C A B C …, so that a machine whose speed drifts drifts for all alike."""
    values: dict[str, list[float]] = {name: [] for name in works}
    for i in range(warm_up + num):
        for name, work in works.items():
            start_s = time.perf_counter()
            work()
            if i >= warm_up:
                values[name].append(time.perf_counter() - start_s)
    return {name: Times(tuple(found)) for name, found in values.items()}


def machine() -> dict[str, str | int]:
    """Where this ran."""
    found: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _run("git", "rev-parse", "--short", "HEAD"),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_results(name: str, results: dict[str, object], folder: Path | None = None) -> Path:
    """Write one run's JSON under bench/results/ (or $OUT, where that is set)."""
    folder = folder or Path(os.environ.get("OUT", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
    return path


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns."""
    cells = [list(head), *([f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"
