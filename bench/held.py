"""What this process holds of the machine, now and at most: host memory, device memory, files, threads."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from types import TracebackType

import torch

_STATUS_FIELDS = {"VmRSS": "rss_bytes", "VmHWM": "peak_rss_bytes", "VmLck": "locked_bytes", "VmPin": "pinned_bytes"}
_SAMPLE_S = 0.002


def status_bytes() -> dict[str, int]:
    """What the kernel counts for this process: resident now and at most, locked, pinned; in bytes."""
    found = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS_FIELDS:
            found[_STATUS_FIELDS[name]] = int(value.split()[0]) * 1024
    return found


def device_used_bytes() -> int:
    """What the driver counts as used on the current GPU, by everybody; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def in_use() -> dict[str, int]:
    """All of it at this moment."""
    found = status_bytes()
    found["num_files"] = len(os.listdir("/proc/self/fd"))
    found["num_threads"] = len(os.listdir("/proc/self/task"))
    if torch.cuda.is_available():
        found["device_used_bytes"] = device_used_bytes()
        found["allocated_bytes"] = torch.cuda.memory_allocated()
        found["reserved_bytes"] = torch.cuda.memory_reserved()
    return found


def settle() -> None:
    """Give back what nobody needs, and let the kernel count peaks from here on. Blocks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak of RSS becomes the present one


class Watch:
    """Measures, while its block runs, the most host and device memory above what was in use before.

    The kernel keeps the peak of resident memory, page-locked pages included, and PyTorch that of its own reserve; what
    the driver gives to other libraries has no counter, so a thread looks every 2 ms.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="bench-watch", daemon=True)
        self._peak_device_bytes = 0
        self._before: dict[str, int] = {}
        self.host_bytes = 0
        self.reserved_bytes = 0
        self.device_bytes = 0

    def __enter__(self) -> Watch:
        settle()
        self._before = in_use()
        self._peak_device_bytes = device_used_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.host_bytes = status_bytes()["peak_rss_bytes"] - self._before["rss_bytes"]
        if torch.cuda.is_available():
            self.reserved_bytes = torch.cuda.max_memory_reserved() - self._before["reserved_bytes"]
            self.device_bytes = self._peak_device_bytes - self._before["device_used_bytes"]

    def json(self) -> dict[str, int]:
        """For the results file."""
        return {
            "host_bytes": self.host_bytes,
            "torch_reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
        }

    def _look(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._peak_device_bytes = max(self._peak_device_bytes, device_used_bytes())
