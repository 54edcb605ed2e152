"""What saves a state that several ranks hold together, as its users run it: tidegate in three ways, DCP in three."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import tidegate
from tidegate.dcp import TidegateReader, TidegateStager, TidegateWriter
from tidegate.snapshot import SnapshotMode

from .ranks_training import RankTraining, State


class Way:
    """One way to save and to load. All ranks must call each method at the same time.

    Args:
        training: What is saved.
        root: A folder of this way's own, the same for all ranks.
        group: A gloo group of all ranks.
    """

    num_saves = 2
    during_save = False
    """Whether the training may go on while a save is in flight, as soon as `start` has returned."""

    def __init__(self, training: RankTraining, root: Path, group: dist.ProcessGroup | None) -> None:
        self.training = training
        self.root = root
        self.group = group

    def start(self, state: State, step: int) -> Callable[[], object]:
        """Start a save; return what waits for its end."""
        raise NotImplementedError

    def load(self, state: State, step: int) -> None:
        """Load a step into `state`. Blocks."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what it holds."""


class Engine(Way):
    """CheckpointEngine with a process group."""

    during_save = True
    snapshot: SnapshotMode = "device"

    def __init__(self, training: RankTraining, root: Path, group: dist.ProcessGroup | None) -> None:
        super().__init__(training, root, group)
        snapshot = self.snapshot if training.device.type == "cuda" or self.snapshot == "lazy" else "host"
        self._engine = tidegate.CheckpointEngine(
            root, process_group=dist.group.WORLD, snapshot=snapshot, keep_last=1, rank_deadline_s=300.0
        )

    def start(self, state: State, step: int) -> Callable[[], object]:
        """Start it."""
        self._engine.save_async(state, step=step)
        return self._engine.wait

    def load(self, state: State, step: int) -> None:
        """Load in place."""
        self._engine.load(step, into=state)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class LazyEngine(Engine):
    """The same, reading in place what the optimizer owns."""

    snapshot = "lazy"

    def __init__(self, training: RankTraining, root: Path, group: dist.ProcessGroup | None) -> None:
        super().__init__(training, root, group)
        self._engine.attach(training.optimizer)


class Dcp(Way):
    """dcp.async_save with its defaults."""

    def start(self, state: State, step: int) -> Callable[[], object]:
        """Start it; a stager's copies are waited for, since the state must not change before."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecated names inside PyTorch
            response = dcp.async_save(state, checkpoint_id=self._path(step), process_group=self.group, **self._more())
        if isinstance(response, Future):
            return response.result
        response.staging_completion.result()
        return response.upload_completion.result

    def load(self, state: State, step: int) -> None:
        """Load in place."""
        dcp.load(state, storage_reader=FileSystemReader(self._path(step)), process_group=self.group)

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def _more(self) -> dict[str, object]:
        return {}


class PinnedDcp(Dcp):
    """dcp.async_save with a stager that keeps page-locked memory, the fastest that DCP has."""

    def __init__(self, training: RankTraining, root: Path, group: dist.ProcessGroup | None) -> None:
        super().__init__(training, root, group)
        pinned = training.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(use_shared_memory=False, use_pinned_memory=pinned, use_non_blocking_copy=pinned)
        )

    def close(self) -> None:
        """Free the memory."""
        self._stager.close()

    def _more(self) -> dict[str, object]:
        return {"async_stager": self._stager}


class ZstdDcp(Dcp):
    """dcp.save with its ZStandard extension. One save: it takes long."""

    num_saves = 1

    def start(self, state: State, step: int) -> Callable[[], object]:
        """Save."""
        writer = FileSystemWriter(self._path(step), _extensions=[ZStandard()])
        dcp.save(state, storage_writer=writer, process_group=self.group)
        return lambda: None


class TidegateDcp(Way):
    """dcp.async_save with our writer and stager."""

    during_save = True

    def __init__(self, training: RankTraining, root: Path, group: dist.ProcessGroup | None) -> None:
        super().__init__(training, root, group)
        self._writer = TidegateWriter(str(root))
        self._stager = TidegateStager(self._writer, mode="copy")

    def start(self, state: State, step: int) -> Callable[[], object]:
        """Start it."""
        future = dcp.async_save(
            state,
            storage_writer=self._writer,
            async_stager=self._stager,
            checkpoint_id=f"step-{step}",
            process_group=self.group,
        )
        if not isinstance(future, Future):
            raise TypeError(f"dcp.async_save returned {type(future).__name__}; TidegateStager stages synchronously")
        return future.result

    def load(self, state: State, step: int) -> None:
        """Load in place."""
        dcp.load(state, storage_reader=TidegateReader(str(self.root), step=step), process_group=self.group)

    def close(self) -> None:
        """Close both."""
        self._stager.close()
        self._writer.close()


WAYS: dict[str, type[Way]] = {
    "tidegate": Engine,
    "tidegate, lazy": LazyEngine,
    "dcp.async_save + tidegate": TidegateDcp,
    "dcp.async_save": Dcp,
    "dcp.async_save, pinned": PinnedDcp,
    "dcp.save + ZStandard": ZstdDcp,
}


def next_kernel(device: torch.device) -> None:
    """Wait until a kernel that the training queues now could start."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        event.synchronize()


def timed_save(way: Way, state: State, step: int) -> tuple[float, float]:
    """Save once; return seconds until the training can go on, and until the checkpoint is there. Blocks."""
    start_s = time.perf_counter()
    wait = way.start(state, step)
    next_kernel(way.training.device)
    stall_s = time.perf_counter() - start_s
    wait()
    return stall_s, time.perf_counter() - start_s
