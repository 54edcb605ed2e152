"""`tidegate.save` and `tidegate.load`: one state, one object, no engine."""

from __future__ import annotations

import os
from pathlib import Path

from tidegate.storage.base import Store
from tidegate.storage.open import open_store, split_url

from .container import read_index
from .derived import DerivedChunks
from .device_shapes import PORTABLE_CODEC
from .errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from .job import SaveJob
from .manifest import parse_manifest
from .options import Options
from .pairs import DeriveOption, find_pairs
from .planned import plan_table
from .report import SaveReport
from .resources import Resources
from .restore import MapLocation, PartPaths, load_state, plan_load
from .save import make_report, write_object
from .snapshot import stage_in_place
from .state import describe
from .translate import load_error, save_error

_NO_STEP = -1


def save(
    state: object,
    path_or_url: str | os.PathLike[str],
    *,
    codec: str = "auto",
    derive: DeriveOption = True,
    chunk_bytes: int | None = None,
) -> SaveReport:
    """Save a state as one self-contained object. Blocks until it is durable.

    A file that is there already is replaced atomically: whatever happens, the path holds the old one or the new one.

    Args:
        state: Any nesting of dicts, lists, tuples, namedtuples and dataclasses with tensors, NumPy arrays and plain
            values at the leaves.
        path_or_url: A file, such as "model.tg", or a URL, such as "s3://bucket/run/model.tg".
        codec: As for `CheckpointEngine`, but "auto" is "zstd": a file that stands alone should open on every machine.
        derive: As for `CheckpointEngine`.
        chunk_bytes: As for `CheckpointEngine`.

    Returns:
        Sizes and times of the save.

    Raises:
        UnsupportedStateError: A leaf cannot be saved; nothing was written.
        SaveError: Nothing was replaced; on S3 it still may be, by the new state as a whole, where the server takes up a
            request after the deadline by which it gave no answer.
    """
    options = Options(codec=PORTABLE_CODEC if codec == "auto" else codec, derive=derive, chunk_bytes=chunk_bytes)
    table = describe(state)
    resources = Resources(options)
    try:
        planned = plan_table(table, resources.sizes_for(table), find_pairs(table, derive))
        job = SaveJob(
            _NO_STEP, table, planned.plan, {}, resources.wake,
            chunk_order=planned.chunk_order, derived=DerivedChunks(planned.candidates),
        )  # fmt: skip
        job.modes.add("in place")
        resources.prepare(has_cuda=planned.has_cuda)
        stage_in_place(job)
        store, key = open_file(path_or_url)
        try:
            record, totals = write_object(
                job, store.create(key, size_hint_bytes=planned.plan.raw_bytes // 2, replace=True), key, resources,
                stands_alone=True,
            )  # fmt: skip
        finally:
            store.close()
        job.stall_s = job.snapshot_s = job.timeline.now()
        return make_report(job, resources, f"{store.url}/{key}", record.num_bytes, totals)
    except CheckpointError:
        raise
    except Exception as exc:
        raise save_error(exc, f"save to {path_or_url}") from exc
    finally:
        resources.close()


def load(
    path_or_url: str | os.PathLike[str],
    *,
    map_location: MapLocation = None,
    into: object | None = None,
    part: PartPaths = None,
) -> object:
    """Load what `tidegate.save` wrote, or parts of it. Blocks. Runs nothing that the file names.

    Args:
        path_or_url: The file.
        map_location: Where tensors go: a device, or a mapping of saved to new devices. None: the CPU.
        into: A state of the same structure whose tensors are filled in place; it is half filled after an error. With
            `part`, that part; with several, a mapping of their paths to them.
        part: The path of a part, as error messages write it, such as "model" or "optimizer.state[3]", or a list of
            several. Only frames that hold tensors of theirs are read.

    Returns:
        The state; or what stands at `part` in it; or a dict of several parts by path. Dataclasses, Enums and
        namedtuples need their class in `torch.serialization.add_safe_globals`.

    Raises:
        CheckpointNotFoundError: There is no such file.
        CorruptCheckpointError: The file is damaged, or no tidegate file.
        LoadError: It cannot be read, `into` does not fit, or there is no such part.
    """
    _check_is_file(path_or_url)
    try:
        store, key = open_file(path_or_url)
        try:
            index = read_index(store, key)
            if not index.manifest:
                raise CorruptCheckpointError(
                    f"{path_or_url} is one part of a checkpoint and holds no manifest; load the checkpoint's root with "
                    "CheckpointEngine",
                    key=key,
                    stage="open",
                )
            manifest = parse_manifest(index.manifest, key)
            plan = plan_load(manifest, [index])
            return load_state(store, manifest, plan, map_location=map_location, into=into, part=part)
        finally:
            store.close()
    except CheckpointError:
        raise
    except Exception as exc:
        raise load_error(exc, f"loading {path_or_url}", stage="open") from exc


def _check_is_file(path_or_url: str | os.PathLike[str]) -> None:
    if isinstance(path_or_url, os.PathLike) or "://" not in path_or_url:
        path = Path(path_or_url)
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; load its newest checkpoint with CheckpointEngine(…).load()")
        if not path.exists():
            raise CheckpointNotFoundError(f"there is no file {path}")


def open_file(path_or_url: str | os.PathLike[str]) -> tuple[Store, str]:
    """Split the path of an object that stands alone into a store and a key."""
    text = os.fspath(path_or_url)
    if "://" in text:
        root, key = split_url(text)
        return open_store(root), key
    path = Path(os.path.realpath(text))  # a link that the caller names is the caller's own; stores follow none
    return open_store(path.parent), path.name


