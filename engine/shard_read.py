"""Read parts of tensors out of the objects of the ranks that hold them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from tidegate.storage.base import Store

from .box_spans import Box, BoxSpans, is_stored_by_rows
from .boxes import Boxes, BoxRequest
from .errors import CorruptCheckpointError, LoadError
from .frame_plan import Frame
from .frame_share import Sharing
from .load_plan import ReadItem
from .open_objects import FrameSource
from .parts import Part, tensors_in
from .places import Places
from .rank_object import RankObject, open_rank_object
from .readers import read_frames
from .rebuild import rebuild
from .shard_map import Offsets, ShardMap, object_name, shard_name
from .sharded_manifest import ShardedManifest
from .table import StateTable
from .tensors import TensorSpec

_NUM_THREADS = max(2, min(8, os.cpu_count() or 2))


@dataclass(frozen=True, slots=True, eq=False)
class ShardBox:
    """A part of a shard.

    Attributes:
        name: The tensor's name.
        offsets: Where the shard begins in the tensor.
        box: The part, relative to the shard.
    """

    name: str
    offsets: Offsets
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class ShardRead(ShardBox):
    """A part of a shard that is wanted.

    Attributes:
        target: Where it goes: a tensor of the box's shape, without autograd.
    """

    target: torch.Tensor


_B = TypeVar("_B", bound=ShardBox)


@dataclass(frozen=True, slots=True, eq=False)
class _ObjectRead:
    """What is read of one object."""

    table: StateTable
    boxes: Boxes
    items: Sequence[ReadItem]


class ShardReader:
    """Reads from one checkpoint. Opens the object of a rank when something of it is asked for.

    Args:
        store: Where it is.
        manifest: What it holds.
        share: What this rank shares with the others of its host, if it loads together with them.
    """

    def __init__(self, store: Store, manifest: ShardedManifest, share: Sharing | None = None) -> None:
        self._store = store
        self._share = share
        self._manifest = manifest
        self._opened: dict[int, RankObject] = {}
        self._cut = {name: (spec, layout) for name, spec, layout in manifest.shards.tensors()}
        self._places: dict[int, dict[Offsets, tuple[int, tuple[int, ...]]]] = {}

    @property
    def shards(self) -> ShardMap:
        """Which rank holds what."""
        return self._manifest.shards

    @property
    def step(self) -> int:
        """The checkpoint's step."""
        return self._manifest.step

    def read_tensors(self, reads: Sequence[ShardRead]) -> None:
        """Fill the targets. Blocks. Of each frame that is needed, only one read is made here.

        Raises:
            LoadError, StorageError: Targets may be half filled then.
        """
        parts = [self._part(rank, its_reads) for rank, its_reads in self._by_rank(reads)]
        source: FrameSource = self._store
        if self._share is not None:
            source = self._share.around(self._store, [_frame(item) for part in parts for item in part.items])
        for part in parts:
            read_frames(source, part.table, part.items, part.boxes, num_threads=_NUM_THREADS)
            part.boxes.finish()

    def frames_of(self, boxes: Sequence[ShardBox]) -> list[Frame]:
        """Return the frames that hold boxes, in the order in which `read_tensors` reads them. Blocks for indexes.

        Raises as above.
        """
        found: list[Frame] = []
        for rank, its_boxes in self._by_rank(boxes):
            opened, key = self._open(rank), self._manifest.objects[rank].key
            spans = BoxSpans(opened.table)
            for box in its_boxes:
                tensor = opened.tensor_index(shard_name(box.name, box.offsets), key)
                spans.add(tensor, box.box, is_row=is_stored_by_rows(opened.table.spec(tensor)))
            found += [_frame(item) for item in spans.needed(opened.plan.items)]
        return found

    def read_values(self, names: Iterable[str]) -> Mapping[str, object]:
        """Return values that are no tensors, by name. Blocks. Raises as above."""
        by_rank: dict[int, list[str]] = defaultdict(list)
        for name in names:
            rank = self._manifest.shards.objects.get(name)
            if rank is None:
                raise LoadError(f"there is no value {name!r} in the checkpoint", stage="open", fqn=name)
            by_rank[rank].append(name)
        found: dict[str, object] = {}
        for rank in sorted(by_rank):
            found.update(self._values_from(rank, by_rank[rank]))
        return found

    def _by_rank(self, boxes: Sequence[_B]) -> list[tuple[int, list[_B]]]:
        by_rank: dict[int, list[_B]] = defaultdict(list)
        for box in boxes:
            by_rank[self._place(box.name, box.offsets)[0]].append(box)
        return sorted(by_rank.items(), key=lambda row: row[0])

    def _part(self, rank: int, reads: Sequence[ShardRead]) -> _ObjectRead:
        """Find what is to be read of a rank's object."""
        opened, key = self._open(rank), self._manifest.objects[rank].key
        requests = [
            BoxRequest(opened.tensor_index(shard_name(read.name, read.offsets), key), read.box, read.target)
            for read in reads
        ]
        for request, read in zip(requests, reads, strict=True):
            self._check_is_planned(read, opened.table.spec(request.tensor), key)
            _check_fits(request, read, opened)
        boxes = Boxes(opened.table, requests)
        return _ObjectRead(opened.table, boxes, boxes.needed(opened.plan.items))

    def _values_from(self, rank: int, names: Sequence[str]) -> dict[str, object]:
        opened = self._open(rank)
        parts = {name: Part(name, "", opened.nodes.get(object_name(name))) for name in names}
        table = opened.table
        wanted = [index for index in tensors_in(parts.values()) if index < len(table.tensor_spec)]
        places = Places(table, wanted, [None] * len(table.tensor_spec), None)
        read_frames(self._store, table, places.needed(opened.plan.items), places, num_threads=_NUM_THREADS)
        tensors = places.finish()
        return {name: rebuild(part.node, tensors, f".{name}") for name, part in parts.items()}

    def _place(self, name: str, offsets: Offsets) -> tuple[int, tuple[int, ...]]:
        """Return the rank that holds a shard, and the shard's shape."""
        if name in self._cut:
            layout = self._cut[name][1]
            places = self._places.get(id(layout))
            if places is None:
                rows = zip(layout.ranks, layout.sizes, strict=True)
                places = self._places[id(layout)] = dict(zip(layout.offsets, rows, strict=True))
            if offsets in places:
                return places[offsets]
        raise LoadError(f"there is no shard of {name!r} at {list(offsets)} in the checkpoint", stage="open", fqn=name)

    def _check_is_planned(self, read: ShardRead, stored: TensorSpec, key: str) -> None:
        """Refuse an object whose own manifest says something else than the checkpoint's."""
        planned, shape = self._cut[read.name][0].dtype, self._place(read.name, read.offsets)[1]
        if (stored.dtype, stored.shape) != (planned, shape):
            raise CorruptCheckpointError(
                f"object {key} holds {stored} of {read.name}; the manifest says {planned}{list(shape)}",
                key=key,
                stage="open",
                fqn=read.name,
            )

    def _open(self, rank: int) -> RankObject:
        if rank not in self._opened:
            self._opened[rank] = open_rank_object(self._store, self._manifest, rank)
        return self._opened[rank]


def _frame(item: ReadItem) -> Frame:
    return item.key, item.entry.offset, item.entry.header.frame_bytes


def _check_fits(request: BoxRequest, read: ShardRead, opened: RankObject) -> None:
    """Refuse a box that leaves the stored tensor, or a target of another shape."""
    shape = opened.table.spec(request.tensor).shape
    starts, sizes = request.box
    is_inside = len(starts) == len(sizes) == len(shape) and all(
        start >= 0 and size >= 0 and start + size <= whole
        for start, size, whole in zip(starts, sizes, shape, strict=True)
    )
    if not is_inside or tuple(request.target.shape) != sizes:
        raise LoadError(
            f"{read.name}: a box of {list(sizes)} at {list(starts)} was asked for, to go into a tensor of "
            f"{list(request.target.shape)}; the shard that is stored has {list(shape)}",
            stage="place",
            fqn=read.name,
        )
