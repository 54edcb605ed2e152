"""What this process holds of the machine, now and at most: host memory, device memory, files, threads."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from types import TracebackType

import torch

_STATUS_FIELDS = {"VmRSS": "rss_bytes", "VmHWM": "peak_rss_bytes", "VmLck": "locked_bytes", "VmPin": "pinned_bytes"}
_SAMPLE_S = 0.005


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


def settle() -> bool:
    """Give back what nobody needs, and count peaks from here on. Blocks. Returns whether the kernel does so too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak of RSS becomes the present one
    except OSError:
        return False
    return True


class Watch:
    """Measures, while its block runs, the most host and device memory above what was in use before.

    The kernel keeps the peak of resident memory, page-locked pages included, and PyTorch that of its own reserve. What
    the driver gives to other libraries has no counter, so a thread looks every 5 ms; also at resident memory, for
    kernels that cannot be told to begin anew.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="bench-watch", daemon=True)
        self._peak_device_bytes = 0
        self._peak_rss_bytes = 0
        self._kernel_counts = False
        self._before: dict[str, int] = {}
        self.host_bytes = 0
        self.reserved_bytes = 0
        self.device_bytes = 0

    def __enter__(self) -> Watch:
        self._kernel_counts = settle()
        self._before = in_use()
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        found = status_bytes()
        if self._kernel_counts:
            self._peak_rss_bytes = max(self._peak_rss_bytes, found.get("peak_rss_bytes", 0))
        self.host_bytes = self._peak_rss_bytes - self._before["rss_bytes"]
        if torch.cuda.is_available():
            self.reserved_bytes = torch.cuda.max_memory_reserved() - self._before["reserved_bytes"]
            self.device_bytes = self._peak_device_bytes - self._before["device_used_bytes"]

    def _look(self) -> None:
        self._peak_device_bytes = max(self._peak_device_bytes, device_used_bytes())
        self._peak_rss_bytes = max(self._peak_rss_bytes, status_bytes()["rss_bytes"])

    def _keep_looking(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._look()
