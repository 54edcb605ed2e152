"""Stage a state: copy what must be copied at the call, and tell the pipeline where the rest can be read.

Modes, chosen chunk by chunk:

- *host*: copied into pooled host buffers at the call. When the budget is used up the call waits for the pipeline, so a
  state of any size goes through.
- *device*: CUDA tensors are copied into preallocated buffers on their own GPU, on a side stream; the training stream
  waits for that copy on the GPU, the host does not.
- *lazy*: tensors of the attached optimizer are read where they are; the fence keeps `optimizer.step()` waiting until
  they have been read. Everything else is copied as above.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from .buffers import BufferPool
from .device_layout import DeviceLayout, copy_chunk
from .encode import copied_bytes, output_bytes
from .job import SaveJob, StagedChunk
from .plan import Chunk
from .split import Split, Splitter, split

SnapshotMode = Literal["auto", "device", "lazy", "host"]
SNAPSHOT_MODES = ("auto", "device", "lazy", "host")
_HEADROOM_FRACTION = 0.05
_HEADROOM_BYTES = 256 << 20
_FIRST_SHARE = 16
"""One in so many of a device's chunks is copied ahead of the rest, so that encoding can begin."""
_QUIET_S = 0.02
"""A call that takes no longer has the interpreter to itself: the background thread begins when it is over."""


@dataclass(slots=True)
class DeviceSnapshot:
    """The preallocated copy of a state's CUDA chunks, one flat buffer a device, kept between saves.

    Args:
        budget_bytes: The most that a device's buffer may hold; None: what the device has free, less some headroom
            that is left to the training.
    """

    budget_bytes: int | None
    _flat: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """Device memory that it holds."""
        return sum(flat.numel() for flat in self._flat.values())

    def reserve(self, device: torch.device, num_bytes: int) -> torch.Tensor | None:
        """Return a buffer of `num_bytes` on `device`; None if the budget or the device has no room for it."""
        flat = self._flat.get(device)
        if flat is not None and flat.numel() >= num_bytes:
            return flat
        if self.budget_bytes is not None and num_bytes > self.budget_bytes:
            return None
        free_bytes = torch.cuda.mem_get_info(device)[0]
        held_bytes = flat.numel() if flat is not None else 0
        if num_bytes > free_bytes + held_bytes - headroom_bytes(device):
            return None
        del flat
        self._flat.pop(device, None)
        try:
            self._flat[device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return None
        return self._flat[device]

    def free(self) -> None:
        """Give the memory back."""
        self._flat.clear()


def headroom_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device that is left to the training where the user has set no budget."""
    return max(_HEADROOM_BYTES, int(torch.cuda.mem_get_info(device)[1] * _HEADROOM_FRACTION))


class Stager:
    """Stages the chunks of a job on the calling thread.

    Args:
        mode: The snapshot mode that the user asked for.
        staging: Host buffers for copied chunks.
        snapshot: Device buffers.
    """

    def __init__(self, mode: SnapshotMode, staging: BufferPool, snapshot: DeviceSnapshot) -> None:
        self._mode = mode
        self._staging = staging
        self._snapshot = snapshot
        self._splitter = Splitter(is_cuda_only=mode == "auto")  # CPU tensors are cheap to copy: none waits for them
        self._events: dict[torch.device, torch.cuda.Event] = {}

    def stage(self, job: SaveJob, owned_extents: Collection[int]) -> None:
        """Copy or hand over every chunk. Blocks for the host copies; returns early if the job fails.

        Args:
            job: The save; its staging is ended whatever happens.
            owned_extents: Numbers of the extents that an attached optimizer owns.
        """
        try:
            _compare_on_devices(job)
            parts = self._split(job, owned_extents)
            live = _in_place(job, parts, self._events)
            job.note_versions(parts.host_copied, parts.read_in_place)
            on_device, copied = self._copy_on_devices(job, parts)
            self._copy_to_host(job, copied)
            if live:
                job.modes.add("lazy")
            job.put_live(live)
            for staged in on_device:
                job.put(staged)
        except BaseException as exc:
            job.fail(exc)
            raise
        finally:
            job.end_staging()

    def _split(self, job: SaveJob, owned: Collection[int]) -> Split:
        """Part the chunks that must be copied from those that are read in place."""
        if self._mode in ("device", "host") or not owned:
            return self._splitter.all_copied(job)
        if self._mode == "auto":
            copying = self._splitter.all_copied(job)
            if self._fits_devices(job, copying):
                return copying
        return self._splitter.by_owner(job, owned)

    def _fits_devices(self, job: SaveJob, parts: Split) -> bool:
        return all(
            self._snapshot.reserve(device, job.layouts.of(job.table, chunks, device).num_bytes) is not None
            for device, chunks in parts.copied_on.items()
        )

    def _copy_on_devices(self, job: SaveJob, parts: Split) -> tuple[list[StagedChunk], Sequence[Chunk]]:
        """Copy CUDA chunks into the device snapshot where it has room; return those and the chunks that are left."""
        if self._mode == "host":
            return [], parts.copied
        staged: list[StagedChunk] = []
        done: set[int] = set()
        for device, here in parts.copied_on.items():
            layout = job.layouts.of(job.table, here, device)
            flat = self._snapshot.reserve(device, layout.num_bytes)
            if flat is None:
                job.notes.append(f"{device} has no room for a device snapshot: staged through host memory")
                continue
            job.modes.add("device")
            staged += _copy_on_device(job, layout, flat)
            done.update(chunk.index for chunk in here)
        if len(staged) + len(parts.copied_on_cpu) == len(parts.copied):
            return staged, parts.copied_on_cpu
        return staged, [chunk for chunk in parts.copied if chunk.index not in done]

    def _copy_to_host(self, job: SaveJob, chunks: Sequence[Chunk]) -> None:
        pending: dict[torch.device, torch.cuda.Event] = {}
        for chunk in chunks:
            start_s = job.timeline.now()
            if start_s > _QUIET_S:
                job.begin()
            buffer = self._staging.try_acquire(output_bytes(chunk.num_bytes))
            if buffer is None:
                job.start_now()
                buffer = self._staging.acquire(output_bytes(chunk.num_bytes), job.failed)
            if buffer is None:
                return
            job.modes.add("host")
            try:
                staged = StagedChunk(chunk, job.table, buffer=buffer)
                out = copied_bytes(buffer, chunk.num_bytes)
                if staged.device.type == "cuda":
                    staged.ready = pending[staged.device] = _copy_from_device(staged, out)
                else:
                    copy_chunk(job.table, chunk, out)
            except BaseException:
                buffer.release()
                raise
            job.timeline.add(chunk.index, "stage", start_s)
            job.put(staged)
        for device, event in pending.items():
            torch.cuda.current_stream(device).wait_event(event)
            job.device_copies.append(event)


def _copy_from_device(staged: StagedChunk, out: torch.Tensor) -> torch.cuda.Event:
    """Queue the copy of a CUDA chunk into page-locked memory behind the work of the current stream."""
    device = staged.device
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(side):
        copy_chunk(staged.table, staged.chunk, out, non_blocking=True)
        event = torch.cuda.Event()
        event.record(side)
    return event


def _copy_on_device(job: SaveJob, layout: DeviceLayout, flat: torch.Tensor) -> list[StagedChunk]:
    """Queue the copy of a device's chunks, a few ahead of the rest; the training stream waits for it on the GPU."""
    side = side_stream(layout.device)
    training = torch.cuda.current_stream(layout.device)
    side.wait_stream(training)
    staged = []
    num_first = -(-len(layout.chunks) // _FIRST_SHARE)
    start_s = job.timeline.now()
    with torch.cuda.device(layout.device), torch.cuda.stream(side):
        for part in (layout.chunks[:num_first], layout.chunks[num_first:]):
            layout.copy(job.table, part, flat, side)
            ready = torch.cuda.Event()
            ready.record(side)
            staged += [StagedChunk(c, job.table, snapshot=flat, layout=layout, ready=ready) for c in part]
    training.wait_event(ready)
    job.device_copies.append(ready)
    job.timeline.add(layout.chunks[0].index, "stage", start_s)
    return staged


def _compare_on_devices(job: SaveJob) -> None:
    """Queue the comparison of CUDA chunks that may be derived, before the training may change them."""
    derived = job.derived
    if not derived.candidates.derivations:
        return
    for comparison in job.comparisons.of(job.table, job.plan.chunks, derived.candidates):
        side, training = side_stream(comparison.device), torch.cuda.current_stream(comparison.device)
        side.wait_stream(training)
        comparison.queue(side)
        training.wait_event(comparison.done)
        job.device_copies.append(comparison.done)
        derived.expect(comparison.wait)


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that snapshots of a device are copied on; one a device and process."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


def _in_place(job: SaveJob, parts: Split, events: dict[torch.device, torch.cuda.Event]) -> list[StagedChunk]:
    """Get the chunks ready that are read in place, once the current streams have done what is queued on them so far.

    Args:
        job: The save.
        parts: Its chunks.
        events: Those of the save before, by device, whose waits have all been queued; they are recorded again.
    """
    for device, here in parts.live_on.items():
        events.setdefault(device, torch.cuda.Event()).record(torch.cuda.current_stream(device))
        job.live_layouts[device] = job.layouts.of(job.table, here, device)
    rows = zip(parts.live, parts.live_devices, strict=True)
    return [StagedChunk(chunk, job.table, ready=events.get(device)) for chunk, device in rows]


def stage_in_place(job: SaveJob) -> None:
    """Hand every chunk to the pipeline where it lies. For a caller that waits until the save has ended."""
    parts = split(job, None)
    job.note_versions(parts.host_copied, parts.read_in_place)
    _compare_on_devices(job)
    try:
        job.put_live(_in_place(job, parts, {}))
    finally:
        job.end_staging()
