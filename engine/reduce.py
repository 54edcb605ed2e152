"""Keep only some parts of an old checkpoint: a new attempt at the same step takes its place, atomically."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tidegate.storage.base import Store

from .commit import CommitRecord, commit_key
from .derived import DerivedChunks
from .errors import LoadError
from .job import SaveJob
from .load import open_checkpoint
from .pairs import find_pairs
from .planned import plan_table
from .resources import Resources
from .restore import load_state
from .retention import delete_attempt, drop_replaced
from .save import new_attempt, write_attempt
from .snapshot import stage_in_place
from .state import describe


def reduce_checkpoint(store: Store, record: CommitRecord, parts: Sequence[str], resources: Resources) -> int:
    """Replace a checkpoint by one that holds only some keys of its state. Blocks; the parts go through host memory.

    It keeps its step, its place in the order of commits and its metadata, and is a full checkpoint, whatever it was.
    Its tensors are of the CPU then, unless `map_location` says where they go. Nothing changes after an error.

    Args:
        store: Where it is.
        record: Which one. Nothing happens if it is committed anew meanwhile.
        parts: Keys of the state, which must be a dict with text keys. Those that it lacks are passed over.
        resources: What encodes.

    Returns:
        Bytes of the new one's object.

    Raises:
        LoadError: The state is no such dict, or cannot be read.
        StorageError: The store.
    """
    manifest, plan = open_checkpoint(store, record)
    skeleton = manifest.table.skeleton
    if not isinstance(skeleton, dict):
        raise LoadError(f"step {record.step} holds no dict with text keys, so no parts of it can be kept", stage="open")
    keys = [name for name in parts if name in skeleton]
    if not keys:
        raise LoadError(f"step {record.step} holds none of {', '.join(parts)}, so nothing would be left", stage="open")
    names = [name if name.isidentifier() else f"[{json.dumps(name)}]" for name in keys]
    found = load_state(store, manifest, plan, map_location=None, into=None, part=names)
    state = dict(zip(keys, found.values(), strict=True)) if isinstance(found, dict) else {}
    table = describe(state)
    planned = plan_table(table, resources.sizes_for(table), find_pairs(table))
    job = SaveJob(
        record.step, table, planned.plan, manifest.metadata, resources.wake,
        chunk_order=planned.chunk_order, derived=DerivedChunks(planned.candidates),
    )  # fmt: skip
    job.parts = tuple(keys)
    stage_in_place(job)
    attempt = new_attempt()
    try:
        written = write_attempt(job, store, resources, attempt)
        new = written.commit(record.sequence)
        store.compare_and_put(commit_key(record.step), new.dump(), expected=record.dump())
    except BaseException:
        delete_attempt(store, record.step, attempt)
        raise
    drop_replaced(store, record)
    return written.record.num_bytes
