"""torch.distributed.checkpoint's StorageWriter over our pipeline: each rank writes one object, one commit for all.

What DCP calls, in its order: `reset` (with a checkpoint_id only), `set_up_storage_writer`, `prepare_local_plan`, on the
coordinator `prepare_global_plan`, then `write_data` on every rank, and `finish` on the coordinator. After a failure it
calls nothing more.

Between those calls DCP's own collectives wait, which nothing can interrupt: they end with the process group's time-out,
or when its backend sees that a process is gone. What ranks wait for inside of ours is watched (dcp_watch.py):

    killed in …                       the others raise
    its plan, DCP's round of plans    when DCP's collective fails, at the latest at the group's time-out
    write_data                        RankFailedError that names it, after `rank_silence_s`
    DCP's round of results, finish    when DCP's collective fails, at the latest at the group's time-out

In none of them is anything committed but a checkpoint that is whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from tidegate.storage.base import Store
from tidegate.storage.errors import StorageError

from .checkpoint_id import checked_step, names_step, split_checkpoint_id
from .commit import read_commit_bytes
from .container import ObjectRecord
from .dcp_attempt import AttemptPointer, StepTicket
from .dcp_flight import Flight
from .dcp_items import RankResult, stored_name
from .dcp_metadata import shard_map_of
from .dcp_values import value_of
from .dcp_watch import RankWatch, StayingError
from .errors import ConfigError, SaveError
from .open_root import open_root
from .options import Options
from .rank_object import job_in_place, rank_object_key, write_rank_object
from .resources import Resources
from .retention import apply_retention, drop_replaced
from .save import (
    check_absent,
    commit_attempt,
    give_up,
    made_by,
    new_attempt,
    replaced_record,
    unconfirmed,
)
from .sharded_manifest import ShardedManifest, dump_sharded
from .translate import save_error
from .types import JSON


class TidegateWriter(StorageWriter):
    """Writes checkpoints for `torch.distributed.checkpoint.save` and `async_save`.

        writer = TidegateWriter("runs/7")
        dcp.save(state, storage_writer=writer, checkpoint_id="step-1200")

    Every rank makes its own, with the same arguments. Used again for each save; one save at a time.

    Args:
        root: Folder or URL of the run's checkpoints, or a Store. May be left out where each checkpoint_id is a path.
        step: The step of the next save; a checkpoint_id says it instead.
        codec: As for `CheckpointEngine`, but "auto" is "zstd".
        overwrite: Replace the step if it is committed.
        metadata: JSON to keep in the manifest; the coordinator's counts.
        chunk_bytes: The pipeline's unit; None: as for `CheckpointEngine`.
        host_budget_bytes: The most host memory for frames in flight; None: half of what is available.
        keep_last: How many of the newest checkpoints stay after a commit; None: all.
        rank_deadline_s: How long a rank may take to write; then the save has failed on all.
        rank_silence_s: A rank whose process shows no sign of life for so long while others write has failed.

    Raises:
        ConfigError: An argument is wrong.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store | None = None,
        *,
        step: int | None = None,
        codec: str = "auto",
        overwrite: bool = False,
        metadata: Mapping[str, JSON] | None = None,
        chunk_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        keep_last: int | None = None,
        rank_deadline_s: float = 1800.0,
        rank_silence_s: float = 30.0,
    ) -> None:
        super().__init__()
        self._codec = "zstd" if codec == "auto" else codec
        self._options = Options(
            codec=self._codec, chunk_bytes=chunk_bytes, host_budget_bytes=host_budget_bytes, keep_last=keep_last
        )
        self._root = root
        self._store: Store | None = None
        self._resources: Resources | None = None
        self._step = None if step is None else checked_step(step)
        self._overwrite = overwrite
        self._metadata = dict(metadata or {})
        self._watch = RankWatch(deadline_s=rank_deadline_s, silence_s=rank_silence_s)
        self._is_coordinator = False
        self._ticket: StepTicket | None = None
        self._replaces: bytes | None = None
        self._has_pointer = False
        self._flight: Flight | None = None
        self._expected: Flight | None = None
        self._lock = threading.RLock()

    # --- what DCP calls ---

    def storage_meta(self) -> StorageMeta | None:
        """Return nothing; but it is what DCP calls first, in the thread that carries the save out.

        Raises:
            SaveError: Another save is in flight.
        """
        if self._flight is not None and self._flight.is_alive:
            raise SaveError(
                f"a save of step {self._step} is still in flight, and a writer takes one at a time; wait for its "
                "future, or stage by a TidegateStager, which waits",
                stage="stage",
            )
        self._flight, self._expected = self._expected or Flight([], lambda: None), None
        self._flight.begin()
        return None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new checkpoint. Called by DCP only where the caller has given a checkpoint_id."""
        if self._flight is not None and self._flight.is_alive:
            return  # `storage_meta`, which comes next, refuses this save
        self.abort()
        if checkpoint_id is not None:
            root, self._step = split_checkpoint_id(checkpoint_id)
            if root is not None and root != self._root:
                self._close_store()
                self._root = root

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether the id ends in a step."""
        return names_step(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take a role. Raises StepExistsError on the coordinator if the step is committed and is not to be replaced.

        The parameter must be called `kwargs`: DCP looks for that name.
        """
        self.abort()
        if kwargs.get("use_collectives") is False:
            raise ConfigError("use_collectives=False writes a checkpoint that is not one; leave it True")
        self._is_coordinator = is_coordinator
        store, step = self._open()
        if is_coordinator:
            check_absent(store, step, self._overwrite)
            self._replaces = read_commit_bytes(store, step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add to the plan where this rank runs."""
        return dataclasses.replace(plan, storage_data=self._watch.host())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin an attempt, and tell the ranks. Blocks for a small object where DCP has cached their plans."""
        store, step = self._open()
        address = self._watch.serve([plan.storage_data for plan in plans])
        self._ticket = ticket = StepTicket(step, new_attempt(), address, len(plans))
        if not all(plan.usable for plan in plans):
            self._has_pointer = True
            AttemptPointer(store, step).put(ticket)
        return [dataclasses.replace(plan, storage_data=(rank, ticket)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Encode and write what the plan gives this rank, as one object. Blocks until all ranks have done so.

        The tensors are read where they are and must not change meanwhile. If it raises, the object is deleted.

        Raises:
            RankFailedError: A rank is dead, or silent past the deadline. DCP does not catch this one: `dcp.save` raises
                it on this rank at once, and the next save needs a process group without the dead rank.
        """
        store, step = self._open()
        rank, sent = plan.storage_data
        ticket = self._ticket if self._is_coordinator else None
        self._ticket = ticket = ticket or AttemptPointer(store, step).of(sent)
        what = f"save of step {step}"
        self._watch.begin(ticket.address, rank, ticket.num_ranks)
        try:
            try:
                record = self._write(plan, planner, ticket.attempt, rank)
            except Exception as exc:
                raise save_error(exc, f"{what} on rank {rank}") from exc
            finally:
                self._watch.agree(what, ticket.attempt)
        except StayingError:
            self._give_up()
            with contextlib.suppress(StorageError):  # which nobody can commit any more
                store.delete(rank_object_key(step, ticket.attempt, rank))
            raise
        result = RankResult.of(record, plan.items)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result([WriteResult(MetadataIndex(record.key), record.num_bytes, result)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written. Blocks until it is durable."""
        store, step = self._open()
        if self._ticket is None:
            raise ConfigError(
                "finish was called before write_data; use the writer through torch.distributed.checkpoint"
            )
        attempt = self._ticket.attempt
        try:
            found = [result.storage_data for rank in results for result in rank]
            if len(found) != len(results) or not all(isinstance(item, RankResult) for item in found):
                raise SaveError(f"{len(results)} ranks have given {len(found)} results, not one each", stage="commit")
            shards = shard_map_of(metadata, [item.item_names() for item in found])
            manifest = ShardedManifest(
                step, attempt, made_by(), self._metadata, tuple(item.record for item in found), shards
            )
            commit_attempt(store, step, attempt, dump_sharded(manifest), self._replaces)
        except BaseException as exc:
            self._ticket = None
            is_there = give_up(store, step, attempt)
            with contextlib.suppress(StorageError):
                self._delete_pointer(store, step)
            if is_there:
                raise unconfirmed(step, exc) from exc
            raise
        self._ticket = None
        with contextlib.suppress(StorageError):  # the save is committed: what is left is a leftover
            self._delete_pointer(store, step)
            replaced = replaced_record(self._replaces, step)
            if replaced is not None:
                drop_replaced(store, replaced)
            apply_retention(store, self._options.keep_last, None)

    # --- what the stager calls ---

    def wait_idle(self) -> None:
        """Block until no save is in flight."""
        if self._flight is not None:
            self._flight.wait_over()

    def expect(self, flight: Flight) -> None:
        """Take what is staged for the save that comes next."""
        self._expected = flight

    # --- what the caller may call ---

    def abort(self) -> None:
        """Delete what a save that has failed has left. On the coordinator that is what all ranks have written. Blocks.

        DCP tells a writer of no failure: the next save calls this, and so does `close`; after `async_save`, hand it to
        the future: `future.add_done_callback(writer.abort_if_failed)`.
        """
        if self._flight is not None and self._flight.is_alive:
            return  # what has failed is another save, that was refused for the one in flight
        self._give_up()

    def abort_if_failed(self, future: Any) -> None:
        """Abort if a save's future holds an exception."""
        if future.cancelled() or future.exception() is not None:
            self.abort()

    def close(self) -> None:
        """End the save in flight, abort what was not finished, and free threads and memory. Blocks. May be called
        again."""
        self.wait_idle()
        self.abort()
        self._watch.close()
        if self._resources is not None:
            self._resources.close()
            self._resources = None
        self._close_store()

    def __enter__(self) -> TidegateWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, plan: SavePlan, planner: SavePlanner, attempt: str, rank: int) -> ObjectRecord:
        store, step = self._open()
        resources, flight = self._made_resources(), self._flight or Flight([], lambda: None)
        try:
            flight.await_staged()
            items = {stored_name(item): value_of(item, planner) for item in plan.items}
            job = job_in_place(items, step, resources)
            flight.reads_for(job)
            record, _ = write_rank_object(job, store, resources, attempt, rank)
        finally:
            flight.end()
        return record

    def _give_up(self) -> None:
        """Delete what the attempt in progress has written; on other ranks than the coordinator, only forget it."""
        with self._lock:
            ticket, self._ticket = self._ticket, None
            if ticket is not None and self._is_coordinator and self._store is not None and self._step is not None:
                give_up(self._store, self._step, ticket.attempt)
                with contextlib.suppress(StorageError):
                    self._delete_pointer(self._store, self._step)

    def _open(self) -> tuple[Store, int]:
        if self._step is None:
            raise ConfigError("no step was given; pass checkpoint_id='step-1200' to dcp.save, or step= to the writer")
        if self._store is None:
            self._store = open_root(self._root)
        return self._store, self._step

    def _delete_pointer(self, store: Store, step: int) -> None:
        if self._has_pointer:
            self._has_pointer = False
            AttemptPointer(store, step).delete()

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None and store is not self._root:
            store.close()

    def _made_resources(self) -> Resources:
        if self._resources is None:
            self._resources = Resources(self._options)
        return self._resources
