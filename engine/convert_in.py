"""Write states of other formats as checkpoints of ours."""

from __future__ import annotations

import os
from pathlib import Path

from .commit import read_commit_bytes
from .dcp_files import open_dcp
from .dcp_metadata import shard_map_of
from .device_shapes import PORTABLE_CODEC
from .job import SaveJob
from .open_root import open_root
from .options import Options
from .planned import plan_table
from .rank_object import job_in_place, write_rank_object
from .resources import Resources
from .save import check_absent, commit_attempt, give_up, made_by, new_attempt, write_checkpoint
from .shard_map import object_name, shard_name
from .sharded_manifest import ShardedManifest, dump_sharded
from .snapshot import stage_in_place
from .state import describe


def state_to_root(state: object, root: str | os.PathLike[str], *, step: int, codec: str) -> None:
    """Save a state as a step of a root. It is read where it is, so a mapped one of any size goes through. Blocks.

    Raises:
        StepExistsError: The step is committed already.
    """
    table = describe(state)
    store = open_root(root)
    resources = Resources(_options(codec))
    try:
        planned = plan_table(table, resources.sizes_for(table))
        job = SaveJob(step, table, planned.plan, {}, resources.wake, chunk_order=planned.chunk_order)
        stage_in_place(job)
        write_checkpoint(job, store, resources, overwrite=False)
    finally:
        resources.close()
        store.close()


def _options(codec: str) -> Options:
    return Options(codec=PORTABLE_CODEC if codec == "auto" else codec)


def dcp_to_root(folder: Path, root: str | os.PathLike[str], *, step: int, codec: str) -> None:
    """Write a checkpoint of DCP's as a sharded one of ours: with the same shards, all in one object.

    Raises:
        StepExistsError: The step is committed already.
    """
    found = open_dcp(folder)
    store = open_root(root)
    resources = Resources(_options(codec))
    try:
        check_absent(store, step, False)
        shards = shard_map_of(found.metadata, [list(found.items)])
        items = {
            object_name(name) if offsets is None else shard_name(name, offsets): item
            for (name, offsets), item in found.items.items()
        }
        attempt = new_attempt()
        try:
            record, _ = write_rank_object(job_in_place(items, step, resources), store, resources, attempt, 0)
            manifest = ShardedManifest(step, attempt, made_by(), {}, (record,), shards)
            commit_attempt(store, step, attempt, dump_sharded(manifest), read_commit_bytes(store, step))
        except BaseException:
            give_up(store, step, attempt)
            raise
    finally:
        resources.close()
        store.close()
