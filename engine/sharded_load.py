"""Find a sharded checkpoint and open its manifest."""

from __future__ import annotations

from tidegate.storage.base import Store
from tidegate.storage.errors import StorageError

from .commit import CommitRecord, read_commits, step_folder
from .errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from .load import read_manifest
from .sharded_manifest import ShardedManifest, is_sharded, parse_sharded
from .translate import load_error


def open_step(store: Store, step: int) -> ShardedManifest:
    """Open a committed step. Blocks.

    Raises:
        CheckpointNotFoundError: It is not committed.
        CorruptCheckpointError: It is damaged.
        ConfigError: It was not written by several ranks.
    """
    records = [record for record in committed(store) if record.step == step]
    if not records:
        raise CheckpointNotFoundError(f"step {step} is not committed at {store.url}")
    return open_sharded(store, records[0])


def open_newest(store: Store) -> ShardedManifest:
    """Open the checkpoint that was committed last. Blocks. Raises as `open_step`."""
    records = committed(store)
    if not records:
        raise CheckpointNotFoundError(f"no checkpoint is committed at {store.url}. Check the path, or save one first")
    return open_sharded(store, records[-1])


def committed(store: Store) -> list[CommitRecord]:
    """List the commits, oldest first. Blocks. A damaged one counts as none. Raises LoadError."""
    try:
        return read_commits(store)[0]
    except StorageError as exc:
        raise load_error(exc, f"listing {store.url}", stage="open") from exc


def open_sharded(store: Store, record: CommitRecord) -> ShardedManifest:
    """Read and check the manifest of a commit. Blocks."""
    key = record.manifest_key
    try:
        text = read_manifest(store, record)
    except CheckpointError:
        raise
    except Exception as exc:
        raise load_error(exc, f"opening step {record.step}, {key}", stage="open", key=key) from exc
    if not is_sharded(text):
        raise ConfigError(
            f"step {record.step} at {store.url} was not written by several ranks; load it with CheckpointEngine"
        )
    manifest = parse_sharded(text, key)
    folder = f"{step_folder(record.step)}/{record.attempt}/"
    if (manifest.step, manifest.attempt) != (record.step, record.attempt) or not all(
        item.key.startswith(folder) for item in manifest.objects
    ):
        raise CorruptCheckpointError(f"{key} belongs to another checkpoint", key=key, stage="open")
    return manifest
