"""One save in flight: what the training thread and the background thread share about it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .buffers import HostBuffer
from .commit import CommitRecord
from .errors import TornSnapshotError
from .future import SaveFuture
from .latch import Latch
from .plan import Chunk, SavePlan
from .report import Timeline
from .sources import ExtentSource, versions_of
from .table import StateTable
from .types import JSON


@dataclass(slots=True)
class StagedChunk:
    """The bytes of one chunk, somewhere that the pipeline may read.

    Exactly one of these holds: `buffer` has the copy, behind room for a frame header; `device_bytes` has it in a
    device snapshot; or neither, and `sources` are read where they live.

    Attributes:
        chunk: What it is.
        sources: Its extents in the caller's memory.
        buffer: Host copy; released by the encoder.
        device_bytes: Shape (chunk.num_bytes,), uint8, CUDA.
        ready: The CUDA event after which the bytes are valid.
    """

    chunk: Chunk
    sources: tuple[ExtentSource, ...]
    buffer: HostBuffer | None = None
    device_bytes: torch.Tensor | None = None
    ready: torch.cuda.Event | None = None

    @property
    def device(self) -> torch.device:
        """Where the caller's tensors are."""
        return self.sources[0].device

    @property
    def is_live(self) -> bool:
        """Whether the bytes are read from the caller's own tensors."""
        return self.buffer is None and self.device_bytes is None


class SaveJob:
    """A save in flight.

    The training thread puts staged chunks in and ends with `end_staging`; the background thread takes them out. The
    first failure on either side ends the save; both sides look at `failed` and stop.

    Attributes:
        failure: What went wrong first.
        was_told: Whether `save_async` itself has raised that, so that nobody needs to be told again.

    Args:
        step: The step; -1 for an object that stands alone.
        table: The described state.
        plan: Its chunks.
        metadata: The caller's own JSON.
        wake: Called after a failure, so that whoever waits for buffers asks `failed` again.
    """

    def __init__(
        self,
        step: int,
        table: StateTable,
        plan: SavePlan,
        metadata: Mapping[str, JSON],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.step = step
        self.table = table
        self.plan = plan
        self.metadata = metadata
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
        self.replaced: CommitRecord | None = None
        self._wake = wake
        self._is_drained = False
        self._queue: queue.SimpleQueue[StagedChunk | None] = queue.SimpleQueue()
        self._num_live = 0
        self._live: list[ExtentSource] = []
        self._live_versions: list[int] = []
        self._live_lock = threading.RLock()
        self._is_staging = True
        self._may_start = Latch()
        self._versions = versions_of(table.tensors)

    def put(self, staged: StagedChunk) -> None:
        """Hand a chunk to the background thread."""
        if staged.is_live:
            with self._live_lock:
                self._num_live += 1
                self._live.extend(staged.sources)
                self._live_versions.extend(versions_of(_owners(staged.sources)))
        self._queue.put(staged)

    def end_staging(self) -> None:
        """Say that every chunk has been put; the state may change unless chunks are still read in place.

        May be called again. Whatever interrupts it, the background thread is not left waiting.
        """
        if not self._is_staging:
            return
        try:
            moved = _first_moved(self._versions, versions_of(self.table.tensors))
            if moved is not None:
                self._fail_torn(self.table.fqn(moved))
        except BaseException as exc:
            self.fail(exc)
            raise
        finally:
            with self._live_lock:
                self._is_staging = False
                if self._num_live == 0:
                    self._end_reading()
            self._queue.put(None)
            self._may_start.set()

    def live_chunk_was_read(self) -> None:
        """Say that one chunk that is read in place has been read."""
        with self._live_lock:
            self._num_live -= 1
            if self._num_live == 0 and not self._is_staging:
                self._end_reading()

    def start_now(self) -> None:
        """Let the background thread begin before staging ends: it must, where staging waits for buffers.

        Otherwise it begins when staging has ended, so that encoding does not take cores from the copy that the
        training thread waits for.
        """
        self._may_start.set()

    def chunks(self) -> Iterator[StagedChunk | None]:
        """Yield the chunks as they come; None when there is none at the moment, before blocking for the next."""
        self._may_start.wait()
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
        """Give back one staged chunk."""
        if staged.buffer is not None:
            staged.buffer.release()
        elif staged.is_live:
            self.live_chunk_was_read()

    def fail(self, failure: BaseException) -> None:
        """Record the first failure, and wake whoever waits for room."""
        if self.failure is None:
            self.failure = failure
        self._wake()

    def failed(self) -> bool:
        """Whether the save is over already."""
        return self.failure is not None

    def release_state(self) -> None:
        """Let the state change whatever happens to the save, and forget its tensors."""
        with self._live_lock:
            self.table.tensors.clear()
            self.table.sources.clear()
            self._versions.clear()
            self._live.clear()
        self.future.mark_staged()

    def _end_reading(self) -> None:
        self.snapshot_s = self.timeline.now()
        owners = _owners(self._live)
        moved = _first_moved(self._live_versions, versions_of(owners))
        if moved is not None:
            torn = next(s for s in self._live if any(owner is owners[moved] for owner in _owners([s])))
            self._fail_torn(self.table.fqn(torn.tensor_index))
        self._live.clear()
        self.future.mark_staged()

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


def _owners(sources: Sequence[ExtentSource]) -> list[torch.Tensor]:
    """The tensors that view some extents."""
    return [owner for source in sources for owner in (source.owner, *source.more_owners)]


def _first_moved(before: Sequence[int], now: Sequence[int]) -> int | None:
    if before == now:
        return None
    return next(i for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new)
