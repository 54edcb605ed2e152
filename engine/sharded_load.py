"""Find a sharded checkpoint and open its manifest."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tidegate.codec.words import DTYPE_OF_NAME
from tidegate.storage.base import Store
from tidegate.storage.errors import StorageError

from .boxes import intersection, relative, slices
from .commit import CommitRecord, read_commits, step_folder
from .errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError, LoadError
from .flatten import assemble, flatten
from .frame_share import Sharing
from .load import manifest_text
from .local_part import BoxFinder
from .locate import Locator, MapLocation
from .parts import PartPaths
from .shard_map import ShardMap
from .shard_read import ShardRead, ShardReader
from .sharded_manifest import ShardedManifest, is_sharded, parse_sharded
from .sources import local_shard
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
    """Read and check the manifest of a commit. Blocks. Raises as `open_step`."""
    return parse_commit_manifest(store, record, manifest_text(store, record))


def parse_commit_manifest(store: Store, record: CommitRecord, text: bytes) -> ShardedManifest:
    """Check the manifest of a commit. Raises ConfigError, CorruptCheckpointError."""
    key = record.manifest_key
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


def load_sharded(
    store: Store,
    manifest: ShardedManifest,
    *,
    map_location: MapLocation,
    into: object | None,
    part: PartPaths,
    targets: Mapping[str, torch.Tensor] | None = None,
    share: Sharing | None = None,
) -> object:
    """Read a sharded checkpoint. Blocks. Needs no other rank.

    Args:
        store: Where it is.
        manifest: What it holds.
        map_location: Where whole tensors go that are not filled in place; a device, or None for the CPU.
        into: A state of the same structure: of its DTensors this rank's shards are filled in place, and what does not
            belong to them is not read. None: all tensors come back whole.
        part: The path of a part, or several.
        targets: In place of `into`: what whole tensors are read into, by name.
        share: What this rank shares with the others of its host.

    Returns:
        As for `CheckpointEngine.load`.

    Raises:
        LoadError: `into` does not fit, or a frame cannot be read. `into` may be half filled then.
    """
    names = _Names(manifest.shards, part)
    reader = ShardReader(store, manifest, share)
    try:
        with torch.inference_mode(False), torch.no_grad():
            goals = _targets(manifest.shards, names, map_location, into) if targets is None else targets
            leaves = _fill(reader, names, {name: goals[name] for name in names.wanted if name in goals})
    except CheckpointError:
        raise
    except Exception as exc:
        raise load_error(exc, f"loading step {manifest.step}", stage="read") from exc
    return names.built(leaves)


class _Names:
    """The names that are loaded, and where they go.

    Args:
        shards: What there is.
        part: What is asked for.

    Raises:
        LoadError: There is no such part.
    """

    def __init__(self, shards: ShardMap, part: PartPaths) -> None:
        self._paths = shards.paths
        self._parts = [part] if isinstance(part, str) else None if part is None else list(part)
        self._is_one = isinstance(part, str)
        everything = shards.ordered()
        self.wanted = everything if self._parts is None else [name for name in everything if self._part_of(name)]
        for name in self._parts or ():
            if not any(_is_within(found, name) for found in self.wanted):
                raise LoadError(f"there is no {name!r} in the checkpoint; its names begin {everything[:5]}", fqn=name)
        self.is_wanted = set(self.wanted)

    def prefixed(self, into: object) -> object:
        """Return the whole of which `into` is the part that was asked for."""
        if self._parts is None:
            return into
        parts = {self._parts[0]: into} if self._is_one else into
        if not isinstance(parts, Mapping) or set(parts) != set(self._parts):
            raise LoadError(f"`into` must map each of {self._parts} to what is to be filled", stage="place")
        return parts

    def built(self, leaves: Mapping[str, object]) -> object:
        """Put what was loaded together."""
        if self._parts is None:
            return self._assembled(leaves, 0)
        found = {
            part: self._assembled(
                {name: leaf for name, leaf in leaves.items() if _is_within(name, part)}, part.count(".") + 1
            )
            for part in self._parts
        }
        return found[self._parts[0]] if self._is_one else found

    def _part_of(self, name: str) -> bool:
        return any(_is_within(name, part) for part in self._parts or ())

    def _assembled(self, leaves: Mapping[str, object], depth: int) -> object:
        paths = {name: (tuple(name.split(".")) if self._paths is None else self._paths[name]) for name in leaves}
        if self._paths is None and not depth:
            return dict(leaves)
        try:
            whole = assemble(leaves, paths)
        except ValueError as exc:
            raise CorruptCheckpointError(f"the paths of the state do not fit together: {exc}", stage="open") from exc
        for _ in range(depth):
            if not isinstance(whole, Mapping | list | tuple) or len(whole) != 1:
                break
            whole = next(iter(whole.values())) if isinstance(whole, Mapping) else whole[0]
        return whole


def _is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _targets(
    shards: ShardMap, names: _Names, map_location: MapLocation, into: object | None
) -> dict[str, torch.Tensor]:
    """Return, for each tensor, what is to be filled: one of the caller's, or a new whole one."""
    tensors = [(name, spec) for name, spec, _ in shards.tensors() if name in names.is_wanted]
    if into is None:
        device = Locator(map_location)("cpu")
        return {
            name: torch.empty(
                spec.shape, dtype=DTYPE_OF_NAME[spec.dtype], device=device, requires_grad=spec.requires_grad
            )
            for name, spec in tensors
        }
    found = flatten(names.prefixed(into)).tensors
    unknown = [*(found.keys() - {name for name, _ in tensors})]
    if unknown or len(found) != len(tensors):
        missing = unknown or [name for name, _ in tensors if name not in found]
        where = "the checkpoint" if unknown else "`into`"
        raise LoadError(f"{len(missing)} tensors are not in {where}, such as {sorted(missing)[0]!r}", stage="place")
    for name, spec in tensors:
        if tuple(found[name].shape) != spec.shape or found[name].dtype != DTYPE_OF_NAME[spec.dtype]:
            raise LoadError(
                f"{name} is {spec.dtype}{list(spec.shape)} in the checkpoint and "
                f"{found[name].dtype}{list(found[name].shape)} in `into`",
                stage="place",
                fqn=name,
            )
    return found


def _fill(reader: ShardReader, names: _Names, targets: Mapping[str, torch.Tensor]) -> dict[str, object]:
    shards = reader.shards
    reads: list[ShardRead] = []
    box_of = BoxFinder()
    for name, _, layout in shards.tensors():
        if name not in targets:
            continue
        box = box_of(name, targets[name])
        if box is None:
            continue
        local = local_shard(targets[name]).detach()
        for offsets, sizes in zip(layout.offsets, layout.sizes, strict=True):
            common = intersection((offsets, sizes), box)
            if common is not None:
                goal = local[slices(relative(common, box))]
                reads.append(ShardRead(name, offsets, relative(common, (offsets, sizes)), goal))
    reader.read_tensors(reads)
    values = reader.read_values([name for name in names.wanted if name in shards.objects])
    return {name: targets[name] if name in targets else values[name] for name in names.wanted}
