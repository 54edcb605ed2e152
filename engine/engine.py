"""The façade: one engine, one root, one save in flight."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import torch

from tidegate.storage.base import Store
from tidegate.storage.errors import StorageError
from tidegate.storage.output_file import IOMode

from .checkpoint_id import checked_step
from .commit import committed_steps
from .delta import DeltaPolicy
from .driver import Driver
from .errors import CheckpointError, CheckpointWarning, ConfigError, SaveError
from .fence import Fence
from .future import SaveFuture
from .job import SaveJob
from .join import join_ranks
from .load import load_latest, load_step
from .open_root import open_root
from .options import OnBusy, Options, Verify
from .pairs import DeriveOption
from .preparation import Preparation
from .report import SaveReport
from .resources import Resources
from .restore import MapLocation, PartPaths
from .retention import KeepBest
from .save import check_absent
from .snapshot import SnapshotMode, Stager
from .translate import load_error, save_error
from .types import JSON

if TYPE_CHECKING:
    import torch.distributed as dist

    from .ranks import RankSave


class CheckpointEngine:
    """Saves checkpoints of a training run in the background, and loads them.

    Not shared between threads: call it from the training thread. It is no longer usable in a forked child.

    Args:
        root: Folder or URL of the run's checkpoints, or a Store (which stays open when the engine is closed).
        codec: "auto" chooses for every chunk of CUDA tensors, from measured ratios and speeds, what makes the save
            shortest, and takes "zstd" for those of the CPU. "rans", "zstd", "raw" and "deflate" decode on every
            machine, "ans" and nvCOMP's other codecs ("gdeflate", "lz4", "bitcomp", "cascaded") on NVIDIA GPUs only.
        snapshot: How the state is staged: "host", "device", "lazy", or "auto", the first that fits (snapshot.py).
        chunk_bytes: The pipeline's unit; a multiple of 4,096. None: 64 MiB of tensors in host memory; of CUDA tensors
            1/512 of the smallest GPU that this process sees, or of the device budget, as a power of two from 64 to 256
            MiB, less where the first state has not 32 chunks of that, or a GPU no room to encode them; with `delta` 64
            MiB of all. Made smaller where the host budget asks for it, what None gives CUDA tensors first.
        device_budget_bytes: The most GPU memory for snapshot and encoder on a device; None: what is free, less some
            headroom.
        host_budget_bytes: The most host memory for copies and frames in flight; None: half of what is available.
        watermarks: (high, low) fractions of a budget: above high, stages wait; at low, they go on.
        verify: "checksum", or "decode": every frame is decoded and compared before it is written.
        on_busy: What `save_async` does while a save is in flight: "wait" for it, "skip" (the future is cancelled), or
            raise an "error".
        keep_last: How many of the newest checkpoints stay after a commit; None: all.
        keep_every: Steps that are multiples of it stay as well.
        keep_best: Those with the best value of a metric in their `metadata` stay as well.
        keep_parts: Of checkpoints that are not among the newest `keep_full_last` only these keys of the state stay,
            such as ["model"]; one is reduced after each save.
        keep_full_last: See there.
        io: How folders are written: "direct" (past the page cache), "buffered", "gds" (from device memory, by KvikIO),
            or "auto", which measures once and takes the faster.
        derive: Do not store what follows from the rest of the state: bf16 and fp16 tensors that are, in every bit, the
            rounding of an fp32 one, and tensors that are alike. Each save looks at every bit. Or the paths of such
            tensors, and for each that of what it follows from; or False. None: as True, but as False with a
            `process_group`, where what follows is often on another rank than its source.
        delta: Store checkpoints as differences to the one before; see DeltaPolicy. None: store all of each.
        process_group: The ranks that save and load together, each an engine with the same arguments at the same time.
            States are then mappings with DTensors or whatever else `torch.distributed.checkpoint` can shard. Not with
            `derive`, `delta` and `keep_parts`.
        rank_deadline_s: How long a save may take on all ranks; then it has failed on all.
        rank_silence_s: A rank whose process shows no sign of life for so long has failed.

    Raises:
        ConfigError: An argument is wrong.
        CodecUnavailableError: The codec does not work on this machine; the text says what to install.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        codec: str = "auto",
        snapshot: SnapshotMode = "auto",
        chunk_bytes: int | None = None,
        device_budget_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        watermarks: tuple[float, float] = (0.9, 0.7),
        verify: Verify = "checksum",
        on_busy: OnBusy = "wait",
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: KeepBest | None = None,
        keep_parts: Sequence[str] = (),
        keep_full_last: int | None = None,
        io: IOMode = "auto",
        derive: DeriveOption | None = None,
        delta: DeltaPolicy | None = None,
        process_group: dist.ProcessGroup | None = None,
        rank_deadline_s: float = 1800.0,
        rank_silence_s: float = 30.0,
    ) -> None:
        self._options = Options(
            codec=codec,
            snapshot=snapshot,
            chunk_bytes=chunk_bytes,
            device_budget_bytes=device_budget_bytes,
            host_budget_bytes=host_budget_bytes,
            watermarks=watermarks,
            verify=verify,
            on_busy=on_busy,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            keep_parts=keep_parts,
            keep_full_last=keep_full_last,
            derive=derive,
            delta=delta,
        )
        self._resources = Resources(self._options)
        try:
            self._store = open_root(root, io)
            self._ranks = join_ranks(process_group, self._options, rank_deadline_s, rank_silence_s)
        except BaseException:
            self._resources.close()
            raise
        self._owns_store = self._store is not root
        self._stager = Stager(snapshot, self._resources.staging, self._resources.snapshot)
        self._driver = Driver(self._store, self._resources, self._options, self._ranks)
        self._fence = Fence(lambda: self._driver.job)
        self._preparation = Preparation(self._resources, with_ranks=self._ranks is not None)
        self._saving_thread: int | None = None
        self._pid = os.getpid()
        self._is_closed = False

    def save_async(
        self, state: object, *, step: int, overwrite: bool = False, metadata: Mapping[str, JSON] | None = None
    ) -> SaveFuture:
        """Snapshot a state and save it in the background.

        Returns when the state may change again; in lazy mode, when it may change inside the fence. Blocks for the
        snapshot, and for the save before this one where `on_busy` is "wait". Never deadlocks in a signal handler: one
        that has interrupted `save_async` is refused. A handler sees the state as it finds it, also between two
        tensors of an `optimizer.step()`; to save whole steps only, let it set a flag for the loop.

        Args:
            state: Any nesting of dicts, lists, tuples, namedtuples and dataclasses with tensors, NumPy arrays and
                plain values at the leaves.
            step: The training step, 0 … 9,999,999,999.
            overwrite: Replace the step if it is committed, atomically.
            metadata: JSON to keep in the manifest.

        Raises:
            UnsupportedStateError: A leaf cannot be saved; names its path. Nothing was written.
            StepExistsError: The step is committed. Nothing was written.
            SaveError: The save *before* this one failed, and nobody has been told; this one was not begun. Or a save is
                in flight and `on_busy` is "error".
        """
        start_s = time.perf_counter()
        self._check_usable()
        step = checked_step(step)
        metadata = _checked_metadata(metadata)
        self._check_not_inside_save()
        if self._driver.is_busy and self._options.on_busy != "wait":
            return self._refuse(step)
        try:
            self._settle_and_lock()
            save = self._ranks.begin(step, overwrite) if self._ranks is not None else None
            with self._telling_ranks(save):
                job = self._describe(state, step, overwrite, metadata, save)
            self._begin(job, overwrite)
        finally:
            self._saving_thread = None
        job.stall_s = time.perf_counter() - start_s
        return job.future

    def wait(self, timeout: float | None = None) -> SaveReport | None:
        """Block until the save in flight has ended, and return its report; None if there never was one.

        Raises:
            SaveError: It failed. Raised once, here or by the next `save_async`.
            WaitTimeoutError: It has not ended within `timeout` seconds; it goes on.
        """
        self._check_usable()
        self._settle(timeout)
        job = self._driver.job
        return None if job is None or job.future.exception() else job.future.result()

    def load(
        self,
        step: int | Literal["latest"] = "latest",
        *,
        map_location: MapLocation = None,
        into: object | None = None,
        part: PartPaths = None,
    ) -> object:
        """Load a committed checkpoint, or parts of it. Blocks. A save in flight does not disturb it.

        Args:
            step: The step, or "latest": the checkpoint committed last. Where that one is damaged, the one before it is
                loaded and a CheckpointWarning says so.
            map_location: Where tensors go: a device, or a mapping of saved to new devices. None: the CPU.
            into: A state of the same structure whose tensors are filled in place; it is half filled after an error.
                With `part`, that part; with several, a mapping of their paths to them.
            part: The path of a part, as error messages write it, such as "model" or "optimizer.state[3]", or a list of
                several. Only frames that hold tensors of theirs are read.

        Returns:
            The state; or what stands at `part` in it; or a dict of several parts by path.

        Raises:
            CheckpointNotFoundError: The step, or any step, is not committed.
            CorruptCheckpointError: It is damaged, and for "latest" all before it are.
            LoadError: It cannot be read, `into` does not fit, or there is no such part.
        """
        if self._ranks is not None:
            return self._ranks.load(self._store, step, map_location=map_location, into=into, part=part)
        if step == "latest":
            return load_latest(self._store, map_location=map_location, into=into, part=part)
        return load_step(self._store, checked_step(step), map_location=map_location, into=into, part=part)

    def steps(self) -> list[int]:
        """List the committed steps in ascending order. Blocks for a look at the store."""
        try:
            return committed_steps(self._store)
        except StorageError as exc:
            raise load_error(exc, f"listing {self._store.url}", stage="open") from exc

    @contextmanager
    def fence(self) -> Iterator[None]:
        """Wait until a lazy save has read the state, then run the body, which may change it."""
        self._fence.wait()
        yield

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let lazy saves read this optimizer's parameters and state in place, and fence every `optimizer.step()`."""
        self._fence.attach(optimizer)

    def close(self) -> None:
        """Finish the save in flight and free threads and memory. Blocks.

        Raises:
            SaveError: That save failed, and nobody has been told. Everything is freed nonetheless.
        """
        if self._is_closed:
            return
        self._check_not_inside_save()
        try:
            if self._pid == os.getpid():
                self._settle(None)
        finally:
            self._is_closed = True
            self._fence.detach()
            self._preparation.clear()
            if self._pid == os.getpid():
                self._driver.close()
                if self._ranks is not None:
                    self._ranks.close()
                self._resources.close()
                if self._owns_store:
                    self._store.close()

    def __enter__(self) -> CheckpointEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as exc:
            if error is None:
                raise
            error.add_note(f"tidegate: the save in flight failed too: {exc}")

    @contextmanager
    def _telling_ranks(self, save: RankSave | None) -> Iterator[None]:
        """Tell the other ranks if the body fails: they wait for this one."""
        try:
            yield
        except BaseException as exc:
            if save is None or self._ranks is None:
                raise
            self._ranks.fail_plan(save, exc)
            if isinstance(exc, CheckpointError) or not isinstance(exc, Exception):
                raise
            raise save_error(exc, f"save of step {save.step}", stage="plan") from exc

    def _describe(
        self, state: object, step: int, overwrite: bool, metadata: Mapping[str, JSON], save: RankSave | None
    ) -> SaveJob:
        if self._ranks is None or save is None:
            table = self._preparation.describe(state)
            self._check_absent(step, overwrite)
            return self._preparation.job_of(table, step, metadata)
        if self._ranks.is_coordinator:
            self._check_absent(step, overwrite)
        table = self._preparation.describe(self._ranks.plan(save, state))
        job = self._preparation.job_of(table, step, metadata)
        self._ranks.equip(job, save)
        return job

    def _check_absent(self, step: int, overwrite: bool) -> None:
        try:
            check_absent(self._store, step, overwrite)
        except StorageError as exc:
            raise save_error(exc, f"save of step {step}") from exc

    def _begin(self, job: SaveJob, overwrite: bool) -> None:
        """Start the background thread and stage the state. What goes wrong here ends the job and is told here only."""
        owned = self._fence.owned_extents(job.table)
        try:
            self._driver.start(job, overwrite=overwrite)
            self._stager.stage(job, owned)
        except BaseException as exc:
            job.was_told = True
            job.fail(exc)
            job.end_staging()
            if not isinstance(exc, Exception):
                raise
            raise save_error(exc, f"save of step {job.step}", stage="stage") from exc

    def _refuse(self, step: int) -> SaveFuture:
        """Answer a save that comes while another is in flight."""
        busy = self._driver.job
        if self._options.on_busy == "error":
            raise SaveError(
                f"step {step} was not saved: the save of step {busy.step if busy else '?'} is still in flight; "
                'wait() for it first, or use on_busy="wait"',
                stage="stage",
            )
        future = SaveFuture()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future

    def _settle_and_lock(self) -> None:
        """Wait until no save is in flight, and let none begin on this thread but ours."""
        while True:
            self._settle(None)
            self._saving_thread = threading.get_ident()
            if not self._driver.is_busy:
                return
            self._saving_thread = None  # a signal handler has begun one between those lines

    def _check_not_inside_save(self) -> None:
        if self._saving_thread == threading.get_ident():
            raise SaveError(
                "a signal handler that interrupted save_async cannot save or wait, for that save cannot go on before "
                "it returns; let it set a flag, and save when the training loop sees it",
                stage="stage",
            )

    def _settle(self, timeout_s: float | None) -> None:
        self._check_not_inside_save()
        for note in self._driver.settle(timeout_s):
            warnings.warn(note, CheckpointWarning, stacklevel=3)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ConfigError("this engine is closed; make a new CheckpointEngine")
        if self._pid != os.getpid():
            raise ConfigError("this engine was made before a fork; its threads are not here, make a new one")


def _checked_metadata(metadata: Mapping[str, JSON] | None) -> Mapping[str, JSON]:
    if not metadata:
        return {}
    try:
        copied = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"metadata is not JSON: {exc}; put what is not JSON into the state") from exc
    return copied  # type: ignore[no-any-return]
