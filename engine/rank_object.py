"""The object of one rank of a sharded checkpoint: its shards and values, with their own manifest in its tail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tidegate.storage.base import Store

from .commit import attempt_key
from .container import ObjectRecord, read_index
from .errors import CorruptCheckpointError
from .job import SaveJob
from .load_plan import LoadPlan, plan_load
from .manifest import parse_manifest
from .planned import plan_table
from .report import CodecTotals
from .resources import Resources
from .save import prepare_store, write_object
from .sharded_manifest import ShardedManifest
from .snapshot import stage_in_place
from .state import describe
from .table import StateTable
from .types import JSON


def rank_object_key(step: int, attempt: str, rank: int) -> str:
    """Key of a rank's object in an attempt."""
    return attempt_key(step, attempt, f"rank-{rank:05d}.tg")


def job_in_place(items: Mapping[str, object], step: int, resources: Resources) -> SaveJob:
    """Describe what a rank writes and make a job of it, to be read where it lies.

    Args:
        items: Shards by `shard_name`, and other values by `object_name`. They must not change until the job has ended.
        step: The step.
        resources: What encodes.

    Raises:
        UnsupportedStateError: A value cannot be saved; names it.
    """
    table = describe(plain_items(items))
    planned = plan_table(table, resources.sizes_for(table))
    job = SaveJob(step, table, planned.plan, {}, resources.wake, chunk_order=planned.chunk_order)
    job.modes.add("in place")
    resources.prepare(has_cuda=planned.has_cuda)
    stage_in_place(job)
    return job


def plain_items(items: Mapping[str, object]) -> dict[str, object]:
    """Return the items with tensors that are no parameters: whether one trains is the whole tensor's affair."""
    return {name: item.detach() if isinstance(item, torch.Tensor) else item for name, item in items.items()}


def write_rank_object(
    job: SaveJob, store: Store, resources: Resources, attempt: str, rank: int
) -> tuple[ObjectRecord, dict[int, CodecTotals]]:
    """Move a job's chunks into a rank's object, and make that durable. Blocks. It is aborted on any failure."""
    key = rank_object_key(job.step, attempt, rank)
    prepare_store(store, job)
    writer = store.create(key, size_hint_bytes=job.plan.raw_bytes // 2)
    return write_object(job, writer, key, resources, stands_alone=True, attempt=attempt)


@dataclass(frozen=True, slots=True)
class RankObject:
    """A rank's object, opened and checked.

    Attributes:
        table: Its tensors.
        plan: Where their frames lie.
        nodes: What stands under each name: the skeleton of a shard or of another value.
    """

    table: StateTable
    plan: LoadPlan
    nodes: Mapping[str, JSON]

    def tensor_index(self, name: str, key: str) -> int:
        """Return the number of the tensor that a shard is; raises CorruptCheckpointError where it is none."""
        match self.nodes.get(name):
            case ["t", int(index)] if 0 <= index < len(self.table.tensor_spec):
                return index
            case _:
                raise CorruptCheckpointError(
                    f"object {key} has no tensor {name!r}, which the manifest names",
                    key=key,
                    stage="open",
                    fqn=name,
                )


def open_rank_object(store: Store, manifest: ShardedManifest, rank: int) -> RankObject:
    """Read and check the index and manifest of a rank's object. Blocks. Raises StorageError or CheckpointError."""
    record = manifest.objects[rank]
    index = read_index(store, record.key)
    if index.record != record:
        raise CorruptCheckpointError(
            f"object {record.key} is not the one that the manifest names", key=record.key, stage="open"
        )
    inner = parse_manifest(index.manifest, record.key)
    nodes = inner.table.skeleton
    if inner.step != manifest.step or inner.attempt != manifest.attempt or not isinstance(nodes, dict):
        raise CorruptCheckpointError(f"object {record.key} belongs to another checkpoint", key=record.key, stage="open")
    if inner.features:
        raise CorruptCheckpointError(
            f"object {record.key} claims {', '.join(inner.features)}, and what ranks write is stored in full",
            key=record.key,
            stage="open",
        )
    return RankObject(inner.table, plan_load(inner, [index]), nodes)
