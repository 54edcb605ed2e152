"""torch.distributed.checkpoint's StorageReader over our frames: a rank reads the frames that cover what it asks for.

Of those that several ranks of one host ask for, one rank reads each, for all of them (shared_frames.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from tidegate.storage.base import Store

from .box_spans import Box
from .checkpoint_id import checked_step, names_step, split_checkpoint_id
from .dcp_metadata import metadata_of
from .dcp_share import PlannedShare, shared_out
from .dcp_values import as_dcp_bytes
from .errors import CheckpointError, ConfigError
from .frame_share import PATIENCE_S
from .open_root import open_root
from .options import check_seconds
from .shard_map import Offsets
from .shard_read import ShardBox, ShardRead, ShardReader
from .sharded_load import open_newest, open_step
from .translate import load_error

_ReadItems = Sequence[ReadItem]


class TidegateReader(StorageReader):
    """Reads checkpoints for `torch.distributed.checkpoint.load`, at any number of ranks.

        dcp.load(state, storage_reader=TidegateReader("runs/7", step=1200))

    Args:
        root: Folder or URL of the run's checkpoints, or a Store. May be left out where the checkpoint_id is a path.
        step: The step, or "latest": the checkpoint that was committed last. A checkpoint_id says it instead.
        share_timeout_s: How long a rank waits for what another of its host reads, before it reads that itself; 0: every
            rank reads for itself. At most 512 MiB a rank are in the host's shared memory meanwhile.

    Raises:
        ConfigError: An argument is wrong.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store | None = None,
        *,
        step: int | Literal["latest"] = "latest",
        share_timeout_s: float = PATIENCE_S,
    ) -> None:
        super().__init__()
        check_seconds("share_timeout_s", share_timeout_s, may_be_0=True)
        self._root = root
        self._step: int | Literal["latest"] = "latest" if step == "latest" else checked_step(step)
        self._store: Store | None = None
        self._reader: ShardReader | None = None
        self._share = PlannedShare(share_timeout_s)
        self._share_timeout_s = share_timeout_s

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to read another checkpoint. Called by DCP only where the caller has given a checkpoint_id."""
        self._reader = None
        if checkpoint_id is not None:
            root, self._step = split_checkpoint_id(checkpoint_id)
            if root is not None and root != self._root:
                self.close()
                self._root = root

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether the id ends in a step."""
        return names_step(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the manifest, and build DCP's Metadata from it. Blocks.

        Raises:
            CheckpointNotFoundError: The step, or any step, is not committed.
            CorruptCheckpointError: It is damaged.
        """
        store = self._open()
        manifest = open_newest(store) if self._step == "latest" else open_step(store, self._step)
        self._share = PlannedShare(self._share_timeout_s)
        self._reader = ShardReader(store, manifest, self._share)
        return metadata_of(manifest.shards)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing more than `read_metadata` has done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan which frames this rank needs, if there are other ranks. Blocks for indexes.

        Raises:
            LoadError: An index cannot be read, or does not hold what the manifest says.
        """
        if not self._share.is_wanted:
            return plan
        reader = self._opened()
        boxes = [ShardBox(*_box(item)) for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        with _as_load_error(reader.step):
            return self._share.tell(plan, reader.frames_of(boxes))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Decide which frames each rank reads for the others of its host."""
        return shared_out(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read what the plan asks for into the planner's tensors. Blocks, also until others have what this rank reads.

        Raises:
            LoadError: With the frame and its first tensor named.
        """
        reader = self._opened()
        self._share.heed(plan)
        try:
            with _as_load_error(reader.step), torch.inference_mode(False), torch.no_grad():
                self._read_tensors(reader, [i for i in plan.items if i.type is not LoadItemType.BYTE_IO], planner)
                self._read_values(reader, [i for i in plan.items if i.type is LoadItemType.BYTE_IO], planner)
                self._share.finish()
        finally:
            self._share.close()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def close(self) -> None:
        """Close the store, if this opened it. May be called again."""
        store, self._store = self._store, None
        if store is not None and store is not self._root:
            store.close()

    def __enter__(self) -> TidegateReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _read_tensors(reader: ShardReader, items: _ReadItems, planner: LoadPlanner) -> None:
        targets = [planner.resolve_tensor(item) for item in items]
        reader.read_tensors(
            [ShardRead(*_box(item), target.detach()) for item, target in zip(items, targets, strict=True)]
        )
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    @staticmethod
    def _read_values(reader: ShardReader, items: _ReadItems, planner: LoadPlanner) -> None:
        values: Mapping[str, object] = reader.read_values([item.storage_index.fqn for item in items])
        for item in items:
            planner.load_bytes(item, as_dcp_bytes(values[item.storage_index.fqn]))

    def _opened(self) -> ShardReader:
        if self._reader is None:
            raise ConfigError("read_metadata was not called before; use the reader through dcp.load")
        return self._reader

    def _open(self) -> Store:
        if self._store is None:
            self._store = open_root(self._root)
        return self._store


def _box(item: ReadItem) -> tuple[str, Offsets, Box]:
    """Return the name, the offsets and the part of a shard that an item asks for."""
    index = item.storage_index
    return index.fqn, tuple(index.offset or ()), (tuple(item.storage_offsets), tuple(item.lengths))


@contextlib.contextmanager
def _as_load_error(step: int) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as exc:
        raise load_error(exc, f"loading step {step}", stage="read") from exc
