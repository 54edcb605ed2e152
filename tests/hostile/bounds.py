"""Bounds on what a hostile file may cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS = Path("/proc/self/status")
LIMIT_BYTES = 200 << 20
LIMIT_CPU_S = 1.0


def _status_bytes(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


@contextmanager
def bounded(limit_bytes: int = LIMIT_BYTES, limit_cpu_s: float = LIMIT_CPU_S) -> Iterator[None]:
    """Fail if the body makes this process's memory peak, or its processor time, by more than that.

    The kernel's own high-water mark is reset first, so it sees everything, be it for an instant.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = _status_bytes("VmRSS")
    start_s = time.process_time()
    yield
    cpu_s = time.process_time() - start_s
    grown_bytes = _status_bytes("VmHWM") - before_bytes
    assert grown_bytes <= limit_bytes, f"memory peaked {grown_bytes >> 20} MiB above where it was"
    assert cpu_s <= limit_cpu_s, f"it took {cpu_s:.1f} s of processor time"
