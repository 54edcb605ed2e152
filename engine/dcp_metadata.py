"""Between the shard map and DCP's own `Metadata`, which DCP would pickle and we do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tidegate.codec.words import DTYPE_OF_NAME, dtype_name

from .errors import SaveError, UnsupportedStateError
from .shard_map import GlobalSpec, Offsets, PathSteps, ShardLayout, ShardMap, ShardMapMaker

ItemName = tuple[str, Offsets | None]
"""A write item's name, and where the shard begins; None for what is no tensor."""


def metadata_of(shards: ShardMap) -> Metadata:
    """Build the Metadata that DCP's planners made at the save."""
    boxes = [
        [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in zip(layout.offsets, layout.sizes, strict=True)
        ]
        for layout in shards.layouts
    ]
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, spec_number, layout_number in zip(shards.names, shards.tensor_spec, shards.tensor_layout, strict=True):
        spec = shards.specs[spec_number]
        properties = TensorProperties(dtype=DTYPE_OF_NAME[spec.dtype], requires_grad=spec.requires_grad)
        found[name] = TensorStorageMetadata(properties, torch.Size(spec.shape), list(boxes[layout_number]))
    found.update((name, BytesStorageMetadata()) for name in shards.objects)
    paths = shards.paths
    return Metadata(found, planner_data=None if paths is None else dict(paths))


def shard_map_of(metadata: Metadata, items_of_ranks: Sequence[Sequence[ItemName]]) -> ShardMap:
    """Join what DCP's coordinator planned with what the ranks have written.

    Args:
        metadata: The plan's.
        items_of_ranks: What each rank has written, by rank.

    Raises:
        SaveError: Something was planned and not written, or the other way round, or written twice.
        UnsupportedStateError: A tensor is of a kind that the manifest has no words for.
    """
    rank_of = _ranks_by_item(items_of_ranks)
    maker = ShardMapMaker(len(items_of_ranks))
    num_found = 0
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, BytesStorageMetadata):
            maker.add_value(name, _rank(rank_of, (name, None)))
            num_found += 1
        else:
            maker.add(name, _spec(name, found), _layout(name, found, rank_of))
            num_found += len(found.chunks)
    if num_found != len(rank_of):
        raise SaveError(
            f"the ranks have written {len(rank_of)} items and {num_found} were planned; do all ranks use one planner?",
            stage="commit",
        )
    maker.made.paths = _paths(metadata.planner_data)
    return maker.made


def _ranks_by_item(items_of_ranks: Sequence[Sequence[ItemName]]) -> dict[ItemName, int]:
    rank_of: dict[ItemName, int] = {}
    for rank, items in enumerate(items_of_ranks):
        for item in items:
            if item in rank_of:
                raise SaveError(f"ranks {rank_of[item]} and {rank} have both written {item[0]!r}", stage="commit")
            rank_of[item] = rank
    return rank_of


def _rank(rank_of: Mapping[ItemName, int], item: ItemName) -> int:
    try:
        return rank_of[item]
    except KeyError:
        raise SaveError(f"{item[0]!r} at {item[1]} was planned, and no rank has written it", stage="commit") from None


def _spec(name: str, found: TensorStorageMetadata) -> GlobalSpec:
    properties = found.properties
    if properties.layout is not torch.strided:
        raise UnsupportedStateError(f"cannot save {name}: its layout is {properties.layout}; make it dense", path=name)
    return GlobalSpec(dtype_name(properties.dtype), tuple(found.size), bool(properties.requires_grad))


def _layout(name: str, found: TensorStorageMetadata, rank_of: Mapping[ItemName, int]) -> ShardLayout:
    offsets = tuple(tuple(chunk.offsets) for chunk in found.chunks)
    sizes = tuple(tuple(chunk.sizes) for chunk in found.chunks)
    return ShardLayout(offsets, sizes, tuple(_rank(rank_of, (name, offset)) for offset in offsets))


def _paths(planner_data: object) -> dict[str, PathSteps] | None:
    """Return the planner's mapping of names to paths; None if it made none, or something else."""
    if not isinstance(planner_data, Mapping):
        return None
    paths = {name: tuple(steps) for name, steps in planner_data.items() if isinstance(steps, tuple)}
    is_plain = all(type(step) in (str, int) for steps in paths.values() for step in steps)
    return paths if is_plain and len(paths) == len(planner_data) else None
