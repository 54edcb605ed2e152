"""Saves of a training state with tidegate, one after the other beside an idle GPU, and what each kept waiting."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import dataclass, field

import torch

import tidegate
from tidegate.snapshot import SnapshotMode
from tidegate.storage.sink import SinkStore

from .models import Training
from .rig import TimeBudget

NUM_WARM_UPS = 2


@dataclass(slots=True)
class Ours:
    """What saves in one snapshot mode took; all lists by save, after two that warm up.

    Attributes:
        hosts_s: Until `save_async` returned.
        stalls_s: Until the next kernel of the training stream could start.
        fences_s: How long `optimizer.step()`, called right after, waited.
        walls_s: Until the save was committed.
        state_dicts_s: To gather the state before the call: part of no figure.
        allocations: Of device memory by PyTorch, during the call.
        driver_allocations: Those of them that went to the driver.
        waits: What PyTorch said where the call waited for the device; else "no".
    """

    mode: str
    codec: str
    hosts_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    fences_s: list[float] = field(default_factory=list)
    walls_s: list[float] = field(default_factory=list)
    state_dicts_s: list[float] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)
    driver_allocations: list[int] = field(default_factory=list)
    waits: str = ""
    report: tidegate.SaveReport | None = None

    def json(self) -> dict[str, object]:
        """For the results file."""
        names = ("mode", "codec", "hosts_s", "stalls_s", "fences_s", "walls_s", "state_dicts_s", "allocations")
        found: dict[str, object] = {name: getattr(self, name) for name in (*names, "driver_allocations", "waits")}
        for name in ("hosts_s", "stalls_s", "fences_s", "walls_s"):
            values = getattr(self, name)
            found[f"median_{name.replace('s_s', '_s')}"] = statistics.median(values) if values else None
        if self.report is not None:
            found |= {"raw_bytes": self.report.raw_bytes, "stored_bytes": self.report.stored_bytes}
            found |= {"reported_stall_s": self.report.stall_s, "snapshot": self.report.snapshot}
            found |= {"notes": self.report.notes, "peak_device_bytes": self.report.peak_device_bytes}
        return found


def save_ours(training: Training, mode: SnapshotMode, codec: str, num: int, budget: TimeBudget) -> Ours:
    """Save to a sink again and again; in lazy mode step the optimizer right after each call. Blocks."""
    found = Ours(mode, codec)
    with (
        closing(SinkStore(name=mode)) as store,
        tidegate.CheckpointEngine(store, codec=codec, snapshot=mode, keep_last=1) as engine,
    ):
        if mode == "lazy":
            engine.attach(training.optimizer)
        for step in range(NUM_WARM_UPS + num):
            is_measured = step >= NUM_WARM_UPS
            save_once(training, engine, step, found if is_measured else Ours(mode, codec))
            last_s = found.walls_s[-1] if found.walls_s else 0.0
            if is_measured and not budget.allows(len(found.walls_s), last_s):
                break
        found.waits = waits_of(training, engine, NUM_WARM_UPS + num)
    return found


def save_once(training: Training, engine: tidegate.CheckpointEngine, step: int, found: Ours) -> None:
    """Do one save beside an idle GPU, and add what it took to `found`."""
    is_cuda = training.device.type == "cuda"
    start_s = time.perf_counter()
    state = training.state()
    found.state_dicts_s.append(time.perf_counter() - start_s)
    _synchronize(training)
    before = _allocations() if is_cuda else (0, 0)
    start_s = time.perf_counter()
    engine.save_async(state, step=step)
    found.hosts_s.append(time.perf_counter() - start_s)
    if is_cuda:
        next_kernel = torch.cuda.Event()
        next_kernel.record()
        next_kernel.synchronize()
        found.stalls_s.append(time.perf_counter() - start_s)
        after = _allocations()
        found.allocations.append(after[0] - before[0])
        found.driver_allocations.append(after[1] - before[1])
    else:
        found.stalls_s.append(found.hosts_s[-1])
    if found.mode == "lazy":
        training.update()
    report = engine.wait()
    if report is None:
        raise RuntimeError("the engine has no report of the save that just ended")
    found.report = report
    found.fences_s.append(report.fence_s)
    found.walls_s.append(report.wall_s)


def waits_of(training: Training, engine: tidegate.CheckpointEngine, step: int) -> str:
    """Save once more with PyTorch told to refuse what waits for the device; return what it said, or "no"."""
    if training.device.type != "cuda":
        return "there is no GPU"
    state = training.state()
    _synchronize(training)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.save_async(state, step=step)
    except (RuntimeError, tidegate.CheckpointError) as exc:
        return f"{type(exc).__name__}: {exc}"[:500]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    try:
        engine.wait()
    except tidegate.CheckpointError as exc:  # the mode is the process's: it may also have met the background thread
        return f"in the background: {exc}"[:500]
    return "no"


def _allocations() -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"], stats["segment.all.allocated"]


def _synchronize(training: Training) -> None:
    if training.device.type == "cuda":
        torch.cuda.synchronize(training.device)
