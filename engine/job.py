"""One save in flight: what the training thread and the background thread share about it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .buffers import HostBuffer
from .commit import CommitRecord
from .derived import DerivedChunks
from .derived_device import Comparisons
from .device_layout import DeviceLayout, LayoutCache
from .errors import TornSnapshotError
from .future import SaveFuture
from .latch import Latch
from .plan import Chunk, SavePlan
from .report import Timeline
from .sources import ExtentSource
from .table import StateTable
from .types import JSON
from .watch import Runs, VersionWatch

if TYPE_CHECKING:
    from .delta_save import DeltaSave
    from .ranks import RankSave


@dataclass(slots=True)
class StagedChunk:
    """The bytes of one chunk, somewhere that the pipeline may read.

    Exactly one of these holds: `buffer` has the copy, behind room for a frame header; `snapshot` has it on a device;
    or neither, and the extents are read where they live.

    Attributes:
        chunk: What it is.
        table: The state that it is part of.
        buffer: Host copy; released by the encoder.
        snapshot: The device snapshot that has it, shape (n,), uint8, CUDA.
        layout: Where in that.
        ready: The CUDA event after which the bytes are valid.
    """

    chunk: Chunk
    table: StateTable
    buffer: HostBuffer | None = None
    snapshot: torch.Tensor | None = None
    layout: DeviceLayout | None = None
    ready: torch.cuda.Event | None = None

    @property
    def device(self) -> torch.device:
        """Where the caller's tensors are."""
        return self.table.extent_devices[self.chunk.first_extent]

    @property
    def sources(self) -> list[ExtentSource]:
        """Its extents in the caller's memory. Made when first asked for, so the training thread should not ask."""
        sources = self.table.sources
        return [sources[i] for i in self.chunk.extents]

    @property
    def device_bytes(self) -> torch.Tensor | None:
        """The copy in a device snapshot: shape (chunk.num_bytes,), uint8, CUDA."""
        if self.snapshot is None or self.layout is None:
            return None
        return self.layout.view(self.snapshot, self.chunk)

    @property
    def is_live(self) -> bool:
        """Whether the bytes are read from the caller's own tensors."""
        return self.buffer is None and self.snapshot is None


class SaveJob:
    """A save in flight.

    The training thread puts staged chunks in and ends with `end_staging`; the background thread takes them out. The
    first failure on either side ends the save; both sides look at `failed` and stop.

    Attributes:
        failure: What went wrong first.
        check_unchanged: Called when all that is read in place has been read; raises TornSnapshotError if something that
            `_version` of the table's tensors does not show has changed it.
        rank_save: What this rank and the others know of it, where several save together.
        live_layouts: For chunks that are read in place, by device: how to gather one of them on its device.
        device_copies: Recorded behind the copies of CUDA tensors that the call has queued.
        parts: The keys of an earlier checkpoint's state that this one keeps; none: it is a save of its own.
        delta: How chunks become differences; None while they do not.
        is_let_go: Whether the caller's tensors are forgotten.
        writes_from_device: Whether the store takes frames from device memory.
        written_bytes: Bytes of the frames that are in the store.
        was_told: Whether `save_async` itself has raised that, so that nobody needs to be told again.

    Args:
        step: The step; -1 for an object that stands alone.
        table: The described state.
        plan: Its chunks.
        metadata: The caller's own JSON.
        wake: Called after a failure, so that whoever waits for buffers asks `failed` again.
        layouts: Layouts of device snapshots that earlier saves have made.
        derived: Which chunks may follow from others.
        comparisons: What earlier saves have made ready to compare these on GPUs.
        chunk_order: The plan's chunks in the order in which they are to be staged; by default that of the plan.
    """

    def __init__(
        self,
        step: int,
        table: StateTable,
        plan: SavePlan,
        metadata: Mapping[str, JSON],
        wake: Callable[[], None] = lambda: None,
        layouts: LayoutCache | None = None,
        chunk_order: Sequence[Chunk] | None = None,
        derived: DerivedChunks | None = None,
        comparisons: Comparisons | None = None,
    ) -> None:
        self.step = step
        self.table = table
        self.plan = plan
        self.metadata = metadata
        self.layouts = layouts or LayoutCache()
        self.derived = derived or DerivedChunks()
        self.comparisons = comparisons or Comparisons()
        self.chunk_order = plan.chunks if chunk_order is None else chunk_order
        self.live_layouts: dict[torch.device, DeviceLayout] = {}
        self.future = SaveFuture()
        self.finished = Latch()
        self.timeline = Timeline()
        self.notes: list[str] = []
        self.modes: set[str] = set()
        self.stall_s = 0.0
        self.snapshot_s = 0.0
        self.fence_s = 0.0
        self.failure: BaseException | None = None
        self.was_told = False
        self.parts: tuple[str, ...] = ()
        self.replaced: CommitRecord | None = None
        self.delta: DeltaSave | None = None
        self.device_copies: list[torch.cuda.Event] = []
        self.is_let_go = False
        self.writes_from_device = False
        self.check_unchanged: Callable[[], None] = _nothing
        self.rank_save: RankSave | None = None
        self.written_bytes = 0
        self._wake = wake
        self._is_drained = False
        self._queue: queue.SimpleQueue[StagedChunk | None] = queue.SimpleQueue()
        self._num_live = 0
        self._live_lock = threading.RLock()
        self._is_staging = True
        self._has_ended_staging = False
        self._may_start = Latch()
        self._begins: list[Callable[[], object]] = []
        self._unclaimed = [True]
        self._copied: VersionWatch | None = None
        self._live: VersionWatch | None = None

    def note_versions(self, host_copied: Runs, read_in_place: Runs) -> None:
        """Remember versions of tensors, before the first chunk is read by the host or left to be read in place.

        Args:
            host_copied: Those whose bytes the host copies at the call.
            read_in_place: Those whose bytes are read in place.
        """
        self._copied = VersionWatch(self.table.tensors, host_copied)
        self._live = VersionWatch(self.table.tensors, read_in_place)

    def put(self, staged: StagedChunk) -> None:
        """Hand a chunk to the background thread."""
        if staged.is_live:
            self.put_live([staged])
        else:
            self._queue.put(staged)

    def put_live(self, staged: Sequence[StagedChunk]) -> None:
        """Hand chunks that are read in place to the background thread."""
        with self._live_lock:
            self._num_live += len(staged)
        for one in staged:
            self._queue.put(one)

    def end_staging(self) -> None:
        """Say that every chunk has been put; the state may change unless chunks are still read in place.

        May be called again. Whatever interrupts it, the background thread is not left waiting once it was called again.
        """
        if self._has_ended_staging:
            return
        try:
            self._check_copied()
        except BaseException as exc:
            self.fail(exc)
            raise
        finally:
            with self._live_lock:
                self._is_staging = False
                if self._num_live == 0:
                    self._end_reading()
            self._queue.put(None)
            self.start_now()
            self._has_ended_staging = True

    def live_chunk_was_read(self) -> None:
        """Say that one chunk that is read in place has been read."""
        with self._live_lock:
            self._num_live -= 1
            if self._num_live == 0 and not self._is_staging:
                self._end_reading()

    @property
    def is_reading_in_place(self) -> bool:
        """Whether there are chunks that are read in place and have not been read yet."""
        return self._num_live > 0

    def start_now(self) -> None:
        """Let the background thread begin before staging ends: it must, where staging waits for buffers.

        Otherwise it begins when staging has ended, so that encoding does not take cores from the copy that the
        training thread waits for.
        """
        self._may_start.set()
        self.begin()

    def begin_by(self, begin: Callable[[], object]) -> None:
        """Say what lets the background thread take up the job, at the end of staging or when `begin` is called."""
        self._begins.append(begin)

    def begin(self) -> None:
        """Let the background thread take up the job, if it has not. May be called again.

        While it runs, it and the training thread take the interpreter from each other: each call into CUDA, and each
        copy, lets go of it. So a short staging is over before it begins.
        """
        for begin in self._begins:
            begin()
        self._begins.clear()  # an interrupt before it makes `begin` be called twice, and `claim` sees to that

    def claim(self) -> bool:
        """Whether this is the first call: who takes up the job asks."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def await_start(self, timeout_s: float | None = None) -> None:
        """Wait until the background thread may begin, see `start_now`, or until `timeout_s` seconds have passed."""
        self._may_start.wait(timeout_s)

    def chunks(self) -> Iterator[StagedChunk | None]:
        """Yield the chunks as they come; None when there is none at the moment, before blocking for the next."""
        self.await_start()
        while not self._is_drained:
            try:
                staged = self._queue.get_nowait()
            except queue.Empty:
                yield None
                staged = self._queue.get()
            if staged is None:
                self._is_drained = True
                return
            yield staged

    def take_back(self) -> None:
        """Give back what is staged and nobody will encode. Blocks until staging has ended."""
        for staged in self.chunks():
            if staged is not None:
                self.drop(staged)

    def drop(self, staged: StagedChunk) -> None:
        """Give back one staged chunk: nobody will encode it."""
        self.derived.let_go(staged.chunk.index)
        if staged.buffer is not None:
            staged.buffer.release()
        elif staged.is_live:
            self.live_chunk_was_read()

    def was_written(self, chunk: int, num_bytes: int, start_s: float) -> None:
        """Say that a frame is in the store."""
        self.timeline.add(chunk, "write", start_s)
        with self._live_lock:
            self.written_bytes += num_bytes

    def fail(self, failure: BaseException) -> None:
        """Record the first failure, and wake whoever waits for room."""
        if self.failure is None:
            self.failure = failure
        self._wake()

    def failed(self) -> bool:
        """Whether the save is over already."""
        return self.failure is not None

    def let_go(self) -> None:
        """Forget the caller's tensors as soon as all of them are copied, so that their memory can be used again.

        Not before the copies on GPUs are over: a tensor may belong to a stream that does not wait for them.
        """
        if self._is_staging or self._num_live or self.is_let_go:
            return
        if all(event.query() for event in self.device_copies):
            with self._live_lock:
                self._forget_tensors()

    def _forget_tensors(self) -> None:
        self.is_let_go = True
        self.table.tensors.clear()
        self.table.sources.clear()

    def release_state(self) -> None:
        """Let the state change whatever happens to the save, and forget its tensors."""
        with self._live_lock:
            self._forget_tensors()
            self._live = None
            self.check_unchanged = _nothing
        self.future.mark_staged()

    def _check_copied(self) -> None:
        """Fail the save if another thread has changed what the call was copying from host memory.

        What is copied on a GPU is not looked at: that copy runs in the order of the caller's stream, and to look at
        every tensor again would cost the training thread more than all else that it does here.
        """
        copied, self._copied = self._copied, None
        self._check_unmoved(copied)

    def _end_reading(self) -> None:
        self.snapshot_s = self.timeline.now()
        live, self._live = self._live, None
        self._check_unmoved(live)
        try:
            self.check_unchanged()
        except TornSnapshotError as exc:
            self.fail(exc)
        self.check_unchanged = _nothing  # it knows the caller's tensors
        self.future.mark_staged()

    def _check_unmoved(self, watch: VersionWatch | None) -> None:
        changed = watch.first_changed(self.table.tensors) if watch is not None else None
        if changed is not None:
            self._fail_torn(self.table.fqn(changed))

    def _fail_torn(self, fqn: str) -> None:
        self.fail(
            TornSnapshotError(
                f"tensor {fqn} was changed in place while step {self.step} was being read. Nothing was committed. "
                "Change the state only after save_async has returned and, in lazy mode, inside "
                "`with engine.fence():` or through an attached optimizer",
                fqn=fqn,
                stage="stage",
            )
        )


def _nothing() -> None:
    """Check nothing."""
