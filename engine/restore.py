"""Read a checkpoint back: frames in, tensors out, every checksum looked at."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from tidegate.storage.base import Store

from .collector import collector_at_rest
from .derived_places import DerivingPlaces
from .errors import ConfigError, LoadError
from .into import match_parts
from .load_plan import LoadPlan, ReadItem, plan_load
from .locate import MapLocation
from .manifest import Manifest
from .parts import Part, PartPaths, find_parts, tensors_in, whole
from .paths import shown
from .places import Nowhere, Places
from .readers import read_frames
from .rebuild import rebuild
from .table import StateTable

__all__ = ["LoadPlan", "MapLocation", "PartPaths", "ReadItem", "check_frames", "load_state", "plan_load"]

_NUM_THREADS = max(2, min(10, os.cpu_count() or 2))
# They read, and without a GPU decode: more than there are cores would only need more buffers.


def load_state(
    store: Store,
    manifest: Manifest,
    plan: LoadPlan,
    *,
    map_location: MapLocation,
    into: object | None,
    part: PartPaths = None,
) -> object:
    """Read, decode and place frames, and build the state or parts of it. Blocks.

    Args:
        store: Where the frames are.
        manifest: What they hold.
        plan: Where they lie.
        map_location: Where tensors go; None: the CPU.
        into: A state of the same structure whose tensors are filled in place; None builds new ones. With `part`, the
            part; with several, a mapping of their paths to them.
        part: Path of the part to load, or several; None: all. Only frames that hold bytes of theirs are read.

    Returns:
        The state; the part, just as it stands in the state; or a dict of parts by path.

    Raises:
        ConfigError: An argument is of another form.
        LoadError: With the frame and its first tensor named. `into` may be half filled then.
    """
    table = manifest.table
    # Tensors made under inference mode could never be trained.
    with torch.inference_mode(False), torch.no_grad(), collector_at_rest():
        parts = _parts_of(table, part)
        wanted = range(len(table.tensor_spec)) if part is None else _existing(table, tensors_in(parts))
        targets = match_parts(table, _pairs(parts, into, part)) if into is not None else [None] * len(table.tensor_spec)
        places = _places(manifest, wanted, targets, map_location)
        read_frames(store, table, places.needed(plan.items), places, num_threads=_NUM_THREADS)
        tensors = places.finish()
        built = {found.name: rebuild(found.node, tensors, found.steps) for found in parts}
    return built if _is_several(part) else next(iter(built.values()))


def check_frames(store: Store, table: StateTable, plan: LoadPlan) -> None:
    """Read and decode every frame, check every checksum, keep nothing. Blocks. Raises LoadError naming the frame."""
    with torch.inference_mode(False), torch.no_grad():
        read_frames(store, table, plan.items, Nowhere(), num_threads=_NUM_THREADS)


def _places(
    manifest: Manifest, wanted: Sequence[int], targets: Sequence[torch.Tensor | None], map_location: MapLocation
) -> Places:
    if not manifest.derived:
        return Places(manifest.table, wanted, targets, map_location)
    return DerivingPlaces(manifest.table, wanted, targets, map_location, manifest.chunks, manifest.derived)


def _is_several(part: PartPaths) -> bool:
    return part is not None and not isinstance(part, str)


def _parts_of(table: StateTable, part: PartPaths) -> list[Part]:
    if part is None:
        return [whole(table.skeleton)]
    if isinstance(part, str):
        return find_parts(table.skeleton, [part])
    if not isinstance(part, Sequence) or not all(isinstance(name, str) for name in part):
        raise ConfigError(f"part is {shown(part)}; give the path of a part of the state, or a list of several")
    return find_parts(table.skeleton, list(dict.fromkeys(part)))


def _existing(table: StateTable, tensors: Sequence[int]) -> list[int]:
    """Leave out what a damaged skeleton names that is not there; building the part will say so."""
    return [index for index in tensors if index < len(table.tensor_spec)]


def _pairs(parts: Sequence[Part], into: object, part: PartPaths) -> list[tuple[Part, object]]:
    if not _is_several(part):
        return [(found, into) for found in parts]
    names = [found.name for found in parts]
    if not isinstance(into, Mapping) or set(into) != set(names):
        what = shown(list(into)) if isinstance(into, Mapping) else f"a {type(into).__qualname__}"
        raise LoadError(
            f"`into` must map each path of `part` to what is to be filled: {shown(names)}; it is {what}", stage="place"
        )
    return [(found, into[found.name]) for found in parts]
