"""Find a checkpoint, check its manifest, and restore it; fall back from a damaged newest one."""

from __future__ import annotations

import errno
import warnings

from tidegate.storage.base import Store
from tidegate.storage.errors import StorageError

from .commit import (
    MANIFEST_NAME,
    CommitRecord,
    attempt_key,
    commit_key,
    parse_commit,
    read_commit_bytes,
    read_commits,
    read_manifest,
)
from .container import ObjectIndex, read_index
from .delta import check_chain
from .errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    LoadOSError,
)
from .manifest import Manifest, parse_manifest
from .restore import LoadPlan, MapLocation, PartPaths, load_state, plan_load
from .sharded_manifest import is_sharded
from .translate import load_error

_NUM_TRIES = 20
_NUM_EMPTY_LOOKS = 3


def load_step(
    store: Store,
    step: int,
    *,
    map_location: MapLocation = None,
    into: object | None = None,
    part: PartPaths = None,
) -> object:
    """Load one committed step, or parts of it; for the arguments see `load_state`. Blocks.

    A checkpoint that is replaced while it is read is read again: the caller gets the old one or the new one.
    """
    for attempt in range(_NUM_TRIES):
        text = _commit_text(store, step)
        if text is None:
            raise CheckpointNotFoundError(f"step {step} is not committed at {store.url}; committed are: {_some(store)}")
        record = parse_commit(text, step)
        try:
            return _load(store, record, map_location, into, part)
        except CheckpointError:
            if attempt == _NUM_TRIES - 1 or _commit_text(store, step) == text:
                raise
    raise CheckpointNotFoundError(f"step {step} at {store.url} is replaced faster than it can be read")


def load_latest(
    store: Store, *, map_location: MapLocation = None, into: object | None = None, part: PartPaths = None
) -> object:
    """Load the checkpoint that was committed last and is whole, or parts of it; for the arguments see `load_state`.

    Blocks. Warns of each damaged one passed over. Of one that is loaded in part, only what is read is looked at.
    """
    num_empty_looks = 0
    for _ in range(_NUM_TRIES):
        try:
            records, damaged = read_commits(store)
        except StorageError as exc:
            raise load_error(exc, f"listing {store.url}", stage="open") from exc
        failures: dict[int, CheckpointError] = dict(damaged)
        for record in reversed(records):
            try:
                state = _load(store, record, map_location, into, part)
            except (CorruptCheckpointError, LoadOSError) as exc:
                if isinstance(exc, LoadOSError) and exc.errno != errno.EIO:
                    raise
                if not _is_still_there(store, record):
                    break  # it was replaced or retired while we read: look again
                failures[record.step] = exc
            else:
                _warn(failures, record.step)
                return state
        else:
            if failures:
                raise failures[max(failures)]
            # A listing can miss a step that comes while it runs, and the one that is retired for it.
            num_empty_looks += 1
            if num_empty_looks < _NUM_EMPTY_LOOKS:
                continue
            raise CheckpointNotFoundError(
                f"no checkpoint is committed at {store.url}. Check the path, or save one first"
            )
    raise CheckpointNotFoundError(f"the checkpoints at {store.url} are retired faster than they can be read")


def _load(
    store: Store, record: CommitRecord, map_location: MapLocation, into: object | None, part: PartPaths
) -> object:
    """Load what a commit holds, whether one rank wrote it or several. Blocks."""
    text = manifest_text(store, record)
    if is_sharded(text):
        from .sharded_load import load_sharded, parse_commit_manifest

        manifest = parse_commit_manifest(store, record, text)
        return load_sharded(store, manifest, map_location=map_location, into=into, part=part)
    checked, plan = open_checkpoint(store, record, text)
    return load_state(store, checked, plan, map_location=map_location, into=into, part=part)


def manifest_text(store: Store, record: CommitRecord) -> bytes:
    """Read and check a commit's manifest as it is stored. Blocks. Raises CorruptCheckpointError, LoadError."""
    key = record.manifest_key
    try:
        return read_manifest(store, record)
    except CheckpointError:
        raise
    except Exception as exc:
        raise load_error(exc, f"opening step {record.step}, {key}", stage="open", key=key) from exc


def _warn(failures: dict[int, CheckpointError], loaded: int) -> None:
    for step, failure in sorted(failures.items()):
        warnings.warn(
            f"checkpoint of step {step} is damaged and was passed over; step {loaded} was loaded instead: {failure}",
            CheckpointWarning,
            stacklevel=4,
        )


def open_checkpoint(store: Store, record: CommitRecord, text: bytes | None = None) -> tuple[Manifest, LoadPlan]:
    """Read and check a checkpoint's manifest and indexes, and those of all that it is a difference to. Blocks.

    Args:
        store: Where it is.
        record: Its commit.
        text: Its manifest, where the caller has read it.

    Raises:
        CorruptCheckpointError, LoadError: With the object named, and both steps where it is that of a base.
    """
    newest = manifest = _open_manifest(store, record, text)
    chain = [manifest]
    while manifest.delta is not None:
        base = manifest.delta.base
        try:
            manifest = _open_manifest(store, base)
        except CheckpointError as exc:
            raise _needs_base(newest, base, exc) from exc
        chain.append(manifest)
    plan: LoadPlan | None = None
    for manifest in reversed(chain):
        try:
            plan = plan_load(manifest, _open_objects(store, manifest), plan)
        except CheckpointError as exc:
            if manifest is newest:
                raise
            raise _needs_base(newest, manifest, exc) from exc
    return newest, plan if plan is not None else LoadPlan(())


def _needs_base(newest: Manifest, base: CommitRecord | Manifest, exc: CheckpointError) -> CheckpointError:
    return exc.saying(
        f"step {newest.step} is stored as a difference, and needs step {base.step}, which cannot be read: {exc}. "
        f"Load a step that does not need {base.step}"
    )


def _open_manifest(store: Store, record: CommitRecord, text: bytes | None = None) -> Manifest:
    key = record.manifest_key
    try:
        manifest = parse_manifest(manifest_text(store, record) if text is None else text, key)
        if manifest.step != record.step or manifest.attempt != record.attempt:
            raise CorruptCheckpointError(f"{key} belongs to another checkpoint", key=key, stage="open")
        check_chain(record, manifest.delta)
    except CheckpointError:
        raise
    except Exception as exc:
        raise load_error(exc, f"opening step {record.step}, {key}", stage="open", key=key) from exc
    return manifest


def _open_objects(store: Store, manifest: Manifest) -> list[ObjectIndex]:
    folder, indexes = attempt_key(manifest.step, manifest.attempt, ""), []
    for item in manifest.objects:
        if not item.key.startswith(folder):
            raise CorruptCheckpointError(
                f"{folder}{MANIFEST_NAME} names the object {item.key!r}, which lies outside its own attempt",
                key=item.key,
                stage="open",
            )
        try:
            index = read_index(store, item.key)
        except CheckpointError:
            raise
        except Exception as exc:
            raise load_error(exc, f"opening step {manifest.step}, {item.key}", stage="open", key=item.key) from exc
        if index.record != item:
            raise CorruptCheckpointError(
                f"object {item.key} is not the one that the manifest names", key=item.key, stage="open"
            )
        indexes.append(index)
    return indexes


def _commit_text(store: Store, step: int) -> bytes | None:
    try:
        return read_commit_bytes(store, step)
    except StorageError as exc:
        raise load_error(exc, f"reading {commit_key(step)}", stage="open") from exc


def _is_still_there(store: Store, record: CommitRecord) -> bool:
    try:
        text = _commit_text(store, record.step)
        return text is not None and parse_commit(text, record.step) == record
    except CorruptCheckpointError:
        return False


def _some(store: Store) -> str:
    steps = [record.step for record in read_commits(store)[0]]
    return ", ".join(str(step) for step in sorted(steps)[-5:]) or "none"
