"""The background thread of an engine: one save at a time, from staged chunks to commit and retention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.storage.base import Store
from tidegate.storage.errors import StorageError
from tidegate.storage.workers import WorkerPool

from . import exit as at_exit
from .errors import CheckpointError, WaitTimeoutError
from .job import SaveJob
from .options import Options
from .reduce import reduce_checkpoint
from .report import SaveReport
from .resources import Resources
from .retention import Retention, drop_replaced, retire
from .save import write_checkpoint
from .translate import save_error

if TYPE_CHECKING:
    from .ranks import Ranks


class Driver:
    """Carries saves out and keeps what the training thread has not been told yet.

    Args:
        store: Where checkpoints go.
        resources: Threads, buffers and encoders.
        options: The engine's options.
        ranks: The ranks that save together, if there are several.
    """

    def __init__(self, store: Store, resources: Resources, options: Options, ranks: Ranks | None = None) -> None:
        self._store = store
        self._resources = resources
        self._options = options
        self._retention = Retention(options.keep_policy)
        self._ranks = ranks
        self._thread = WorkerPool(1, "tidegate-save")
        self._unseen_failure: CheckpointError | None = None
        self._unseen_notes: list[str] = []
        self.job: SaveJob | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return self.job is not None and not self.job.finished.is_set()

    def start(self, job: SaveJob, *, overwrite: bool) -> None:
        """Begin to carry a job out: at the end of its staging, or when the job says so.

        The one before it must have been settled.
        """
        at_exit.hold(self)
        job.future.set_running_or_notify_cancel()  # here: a save that has begun cannot be cancelled
        job.begin_by(lambda: self._thread.submit(self._run, job, overwrite))
        if job.rank_save is not None:
            job.begin()  # other ranks may wait to hear of it before it is staged
        self.job = job  # last, so that an interrupt before it leaves no job that nobody ends

    def settle(self, timeout_s: float | None) -> list[str]:
        """Wait until the save in flight has ended, and raise its failure if nobody has been told.

        Returns:
            What went wrong after the commit (retention); told once.

        Raises:
            SaveError: The failure.
            WaitTimeoutError: The save goes on.
            RankFailedError: This rank has let the deadline pass and hangs still, while all others have given up.
        """
        job = self.job
        if job is not None and not job.finished.wait(job.future.shortened(timeout_s)):
            job.future.check_in_time()
            raise WaitTimeoutError(
                f"the save of step {job.step} has not ended after {timeout_s} s; it goes on, wait again"
            )
        failure, self._unseen_failure = self._unseen_failure, None
        notes, self._unseen_notes = self._unseen_notes, []
        at_exit.let_go(self)
        if self.is_busy:  # a signal handler has begun another save meanwhile
            at_exit.hold(self)
        if failure is not None and not (job is not None and job.was_told):
            raise failure
        return notes

    def close(self) -> None:
        """End the thread. Blocks until the save in flight has ended."""
        self._thread.close()

    def _run(self, job: SaveJob, overwrite: bool) -> None:
        if not job.claim():
            return
        try:
            report = self._write(job, overwrite)
        except BaseException as exc:  # noqa: BLE001 - delivered through the future and the next settle
            job.fail(exc)
            job.take_back()  # before the state is released: the training thread may still be staging it
            self._unseen_failure = save_error(exc, f"save of step {job.step}")
            job.release_state()
            job.future.set_exception(self._unseen_failure)
        else:
            job.release_state()
            job.future.set_result(report)
            self._retain(job)
        finally:
            if self._unseen_failure is None and not self._unseen_notes:
                at_exit.let_go(self)
            job.finished.set()

    def _write(self, job: SaveJob, overwrite: bool) -> SaveReport:
        if self._ranks is None or job.rank_save is None:
            return write_checkpoint(job, self._store, self._resources, overwrite=overwrite)
        from .sharded_save import write_sharded

        return write_sharded(job, job.rank_save, self._ranks, self._store, self._resources)

    def _retain(self, job: SaveJob) -> None:
        if self._ranks is not None and not self._ranks.is_coordinator:
            return
        try:
            if job.replaced is not None:
                drop_replaced(self._store, job.replaced)
            plan = self._retention.plan(self._store)
            retire(self._store, *plan.delete)
        except StorageError as exc:
            self._unseen_notes.append(f"the save is committed, but old checkpoints could not be deleted: {exc}")
            return
        try:
            for record in plan.reduce[:1]:  # one a save, so that the next one never waits for many
                reduce_checkpoint(self._store, record, self._options.keep_parts, self._resources)
        except (StorageError, CheckpointError) as exc:
            self._unseen_notes.append(f"the save is committed, but an older checkpoint could not be reduced: {exc}")
