"""Which checkpoint the next one may be a difference to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tidegate.storage.base import Store
from tidegate.storage.errors import StorageError

from .buffers import BufferPool
from .commit import CommitRecord, is_committed, read_commits
from .delta import DeltaPolicy
from .delta_save import DeltaSave
from .errors import CheckpointError
from .frames import HostDecoder
from .job import SaveJob
from .kept import KeptChunks
from .load import manifest_text, open_checkpoint
from .manifest import Manifest
from .open_objects import OpenObjects
from .plan import Chunk
from .rebuild import tensor_paths
from .sharded_manifest import is_sharded
from .table import StateTable


@dataclass(frozen=True, slots=True)
class _Last:
    """The checkpoint that was committed last: its record, and what its chunks are.

    Attributes:
        record: Its COMMIT record.
        signature: Its table's, where this process has saved it; else b"".
        chunks: Its plan's.
        stored: The chunks that are not derived.
    """

    record: CommitRecord
    signature: bytes
    chunks: tuple[Chunk, ...]
    stored: frozenset[int]


class Deltas:
    """Finds the base of each save of an engine. Used by the background thread.

    Args:
        policy: What the user asked for.
        pool: Room for residuals and for what is read again.
        kept_bytes: The most that copies of the last checkpoint's chunks may take.
        is_on_device: Asked for a save, an attempt and a chunk whether that need not be read again, as a GPU has it.
    """

    def __init__(
        self,
        policy: DeltaPolicy,
        pool: BufferPool,
        kept_bytes: int,
        is_on_device: Callable[[SaveJob, str, int], bool] = lambda job, attempt, chunk: False,
    ) -> None:
        self._is_on_device = is_on_device
        self._policy = policy
        self._pool = pool
        self._kept = KeptChunks(kept_bytes)
        self._last: _Last | None = None
        self._has_looked = False

    @property
    def held_bytes(self) -> int:
        """Host memory of copies."""
        return self._kept.held_bytes

    @contextmanager
    def save(self, job: SaveJob, store: Store, attempt: str) -> Iterator[DeltaSave]:
        """Make a save ready, as a difference where it can be one. Blocks for a look at the store.

        Args:
            job: The save; its `delta` is set meanwhile.
            store: Where it goes.
            attempt: Its attempt.
        """
        save = DeltaSave(attempt, self._kept, self._pool)
        objects = OpenObjects(store)
        try:
            self._find_base(save, job, store)
            save.decoder = HostDecoder(objects, self._pool)
            job.delta = save
            yield save
            job.notes.extend(dict.fromkeys(save.notes))
        finally:
            job.delta = None
            objects.close()

    def committed(self, job: SaveJob, record: CommitRecord) -> None:
        """Take a checkpoint that has been committed as the base of the next one."""
        derived = {derivation.chunk for derivation in job.derived.found()}
        stored = frozenset(chunk.index for chunk in job.plan.chunks) - derived
        self._last = _Last(record, job.table.signature, job.plan.chunks, stored)

    def close(self) -> None:
        """Free all memory."""
        self._kept.clear()
        self._pool.trim()

    def _find_base(self, save: DeltaSave, job: SaveJob, store: Store) -> None:
        try:
            if self._last is None and not self._has_looked:
                self._last = _newest(store, job)
            self._has_looked = True
            last = self._last
            if last is None or not self._may_follow(last, job, store):
                return
            attempt = last.record.attempt
            if not all(self._kept.has(attempt, i) or self._is_on_device(job, attempt, i) for i in last.stored):
                _, plan = open_checkpoint(store, last.record)
                save.items = {item.chunk.index: item for item in plan.items}
            save.base = last.record
        except (CheckpointError, StorageError) as exc:
            save.notes.append(f"stored in full: the checkpoint before cannot be read ({exc})")

    def _may_follow(self, last: _Last, job: SaveJob, store: Store) -> bool:
        """Whether a save may be a difference to the last one: it is there, of the same kind, and the chain may grow."""
        chain = [(last.record.step, last.record.attempt), *last.record.bases]
        is_known = last.signature in (b"", job.table.signature) and last.chunks == job.plan.chunks
        if not is_known or len(chain) > self._policy.max_chain or job.step in [step for step, _ in chain]:
            return False
        # Each of the chain must be what its step is now, or commit.check_bases would refuse the save in the end.
        return all(is_committed(store, step, attempt) for step, attempt in chain)


def _newest(store: Store, job: SaveJob) -> _Last | None:
    """Return the newest checkpoint of a store if it is of the state that a job saves."""
    records, _ = read_commits(store)
    if not records:
        return None
    text = manifest_text(store, records[-1])
    if is_sharded(text):
        return None
    manifest, plan = open_checkpoint(store, records[-1], text)
    if manifest.chunks != job.plan.chunks or not _is_alike(manifest, job.table):
        return None
    stored = frozenset(item.chunk.index for item in plan.items)
    return _Last(records[-1], b"", manifest.chunks, stored)


def _is_alike(manifest: Manifest, table: StateTable) -> bool:
    """Whether two states have the same names, kinds of tensors, and extents."""
    before, num_tensors = manifest.table, len(table.tensor_spec)
    return (
        len(before.tensor_spec) == num_tensors
        and all(before.spec(i) == table.spec(i) for i in range(num_tensors))
        and before.tensor_extent == table.tensor_extent
        and before.tensor_offset == table.tensor_offset
        and before.extent_bytes == table.extent_bytes
        and before.extent_words == table.extent_words
        and tensor_paths(before.skeleton, num_tensors) == tensor_paths(table.skeleton, num_tensors)
    )
