"""Where a benchmark ran: processor, GPU, driver, libraries, filesystem."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

LIBRARIES: tuple[str, ...] = ("torch", "numpy", "zstandard", "xxhash")
LIBRARIES += tuple(
    f"{name}-{cuda}"
    for name in ("nvidia-libnvcomp", "nvidia-nvcomp", "kvikio", "libkvikio")
    for cuda in ("cu12", "cu13")
)
LIBRARIES += ("cupy-cuda12x", "cupy-cuda13x")


def machine(folder: Path | None = None) -> dict[str, str | int]:
    """Where this ran.

    Args:
        folder: Where the checkpoints went; its filesystem is named.
    """
    found: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _run("git", "describe", "--always", "--dirty", "--exclude", "*"),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "gds": gds_state(),
    }
    if folder is not None:
        found["filesystem"] = filesystem_of(folder)
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def filesystem_of(folder: Path) -> str:
    """Name the type and the mount point of what `folder`, or its nearest parent that exists, lies on."""
    where = os.path.realpath(folder)
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        point, fstype = line.split()[1:3]
        point = point.replace("\\040", " ")
        is_above = where == point or where.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best):
            best, kind = point, fstype
    return f"{kind} on {best}"


def gds_state() -> str:
    """Say whether files can go to and from GPU memory without the host's: KvikIO's word, and the driver's."""
    driver = "nvidia-fs loaded" if Path("/proc/driver/nvidia-fs").exists() else "no nvidia-fs driver"
    if not torch.cuda.is_available():
        return f"not asked ({driver})"
    try:
        is_there = importlib.import_module("kvikio.cufile_driver").get("is_gds_available")
    except (ImportError, AttributeError, KeyError, ValueError, RuntimeError) as exc:
        return f"unknown ({driver}; KvikIO: {type(exc).__name__})"
    return f"{'available' if is_there else 'not available'} ({driver})"


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
