"""What a save tells about itself: sizes, times, and when each stage worked on each chunk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .trace import write_trace

Stage = Literal["stage", "encode", "copy", "write"]
"""Snapshot; codec; from a device to the host; store."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stage's work on one chunk, in seconds since the call of `save_async`."""

    chunk: int
    stage: Stage
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class CodecTotals:
    """What one codec did in a save."""

    num_frames: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    Attributes:
        step: The step; -1 for `tidegate.save`.
        url: Where the checkpoint is.
        raw_bytes: Bytes of the state, tied tensors once.
        stored_bytes: Bytes of the stored objects, headers, index and manifest included.
        stall_s: How long `save_async` kept its caller.
        snapshot_s: From the call until the state might change again (lazy mode: until it was read).
        encode_s: How long at least one chunk was being encoded.
        copy_s: How long at least one frame was on its way from a device to the host.
        write_s: How long at least one chunk was being written.
        wall_s: From the call until the checkpoint was committed.
        peak_device_bytes: The most device memory that the save's own buffers held.
        peak_host_bytes: The most host memory that the save's own buffers held.
        by_codec: Frames, raw and stored bytes by the codec that wrote them; `raw` includes chunks that did not shrink.
        derived_bytes: Bytes of the state that follow from others of it, and are not stored.
        base_step: The step that the checkpoint is a difference to; None: it is a full one.
        fence_s: How long the fence kept `optimizer.step()` waiting for this save.
        snapshot: The modes used, such as "host" or "device+host".
        notes: What was chosen or worked around, and why.
        timeline: When each stage worked on each chunk.
    """

    step: int
    url: str
    raw_bytes: int
    stored_bytes: int
    stall_s: float
    snapshot_s: float
    encode_s: float
    copy_s: float
    write_s: float
    wall_s: float
    peak_device_bytes: int
    peak_host_bytes: int
    by_codec: Mapping[str, CodecTotals]
    snapshot: str
    fence_s: float = 0.0
    derived_bytes: int = 0
    base_step: int | None = None
    notes: tuple[str, ...] = ()
    timeline: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

        Args:
            path: A file, such as "save.trace.json"; replaced if it is there.
        """
        write_trace(self, path)

    @property
    def overlap(self) -> float:
        """max(encode_s, write_s) / wall_s: 1.0 when the save waited for nothing but its slowest stage."""
        return max(self.encode_s, self.write_s) / self.wall_s if self.wall_s else 1.0


class Timeline:
    """Collects spans from every thread of a save. All times are seconds of `time.perf_counter` since its creation."""

    def __init__(self) -> None:
        self._origin_s = time.perf_counter()
        self._spans: list[Span] = []
        self._lock = threading.RLock()

    def now(self) -> float:
        """Seconds since the call of `save_async`."""
        return time.perf_counter() - self._origin_s

    def add(self, chunk: int, stage: Stage, start_s: float, end_s: float | None = None) -> None:
        """Record that `stage` worked on `chunk` from `start_s` to `end_s`, by default until now."""
        span = Span(chunk, stage, start_s, self.now() if end_s is None else end_s)
        with self._lock:
            self._spans.append(span)

    def spans(self) -> tuple[Span, ...]:
        """All spans, by start."""
        with self._lock:
            return tuple(sorted(self._spans, key=lambda span: span.start_s))


def busy_s(spans: Iterable[Span], stage: Stage) -> float:
    """Length of the union of a stage's spans, in seconds."""
    total = 0.0
    end = 0.0
    for span in sorted((s for s in spans if s.stage == stage), key=lambda s: s.start_s):
        total += max(0.0, span.end_s - max(span.start_s, end))
        end = max(end, span.end_s)
    return total
