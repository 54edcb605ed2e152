"""Describe a state: take it apart into a skeleton, a tensor table and the places of its bytes."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import xxhash

from tidegate.codec.words import WordType

from .collector import collector_at_rest
from .errors import UnsupportedStateError
from .extents import Layout, RefusedTensorError, lay_out, measure
from .into import match_into
from .likeness import Alike, Likeness
from .live_sources import LiveSources
from .measure import Measured
from .paths import PathError
from .rebuild import rebuild, tensor_paths
from .retrace import make_track
from .skeleton import Walk, take_apart
from .sources import version_of
from .table import StateTable, make_tensors, validate_table
from .tensors import spec_to_json
from .tracks import Names, Track, follow

__all__ = [
    "Describer",
    "StateTable",
    "describe",
    "make_tensors",
    "match_into",
    "rebuild",
    "validate_table",
    "version_of",
]

_numbers = itertools.count(1)
"""Numbers of layouts, and of sets of extents."""


def describe(state: object) -> StateTable:
    """Take a state apart. Reads no tensor, copies nothing but arrays that are neither C nor F contiguous.

    Args:
        state: Any nesting of dicts, lists, tuples, namedtuples, dataclasses and the like; at the leaves tensors, NumPy
            arrays and plain Python values.

    Returns:
        The table, with `sources` and `tensors` that keep the state's memory alive.

    Raises:
        UnsupportedStateError: Something in it cannot be saved; the message and `path` say what and where.
    """
    with collector_at_rest():
        walk, found = _look_at(state)
        places = _place(walk, lay_out(found, walk.words, walk.roles), None)
        return _table(walk, places, found.storages)


class Describer:
    """Describes states one after another; fast where one is laid out in memory as the one before was.

    It remembers that layout in numbers, names and plain values, and keeps no tensor and no storage alive. Used by one
    thread.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None

    def describe(self, state: object) -> StateTable:
        """As the function of this name."""
        with collector_at_rest():
            table = None if self._known is None else self._describe_again(state, self._known)
            return self._describe_anew(state) if table is None else table

    def _describe_again(self, state: object, known: _Known) -> StateTable | None:
        """Describe a state by what is known; None if that is of no use."""
        walk = follow(known.track, state)
        if walk is None or walk.words != known.words or walk.roles != known.roles:
            return None
        alike = known.likeness.compare(walk.tensors)
        if alike is None:
            return None
        places = _moved(known.places, alike) if alike.moved else known.places
        if walk.names != places.names:
            signature = _signature(walk.names, places.columns_digest)
            places = replace(places, names=walk.names, signature=signature, layout_id=next(_numbers))
        if places is not known.places:
            self._known = replace(known, likeness=alike.likeness, places=places)  # at once: a signal may come any time
        return _table(walk, places, alike.storages)

    def _describe_anew(self, state: object) -> StateTable:
        walk, found = _look_at(state)
        before = None if self._known is None else self._known.places
        places = _place(walk, lay_out(found, walk.words, walk.roles), before)
        likeness = Likeness(walk.tensors, found)
        self._known = _Known(make_track(state, walk), walk.words, walk.roles, likeness, places)
        return _table(walk, places, found.storages)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a state lies, and under which names: what is the same in the tables of several saves.

    Attributes:
        names: As in its Walk.
        layout: Its extents.
        columns_digest: Digest of the layout, without addresses.
        signature: As in its StateTable, and so are the other two.
    """

    names: Names
    layout: Layout
    columns_digest: bytes
    signature: bytes
    layout_id: int
    extents_id: int


@dataclass(frozen=True, slots=True)
class _Known:
    """What a describer remembers.

    Attributes:
        track: How to walk the state again.
        words: As in its Walk.
        roles: As in its Walk.
        likeness: What its tensors were.
        places: Where they were.
    """

    track: Track
    words: dict[int, WordType]
    roles: list[str]
    likeness: Likeness
    places: _Places


def _look_at(state: object) -> tuple[Walk, Measured]:
    try:
        walk = take_apart(state)
    except PathError as exc:
        raise _unsupported(exc.path, exc.reason) from None
    try:
        return walk, measure(walk.tensors)
    except RefusedTensorError as exc:
        path = tensor_paths(walk.root, len(walk.tensors))[exc.index]
        raise _unsupported(path, exc.reason) from exc.__cause__


def _unsupported(path: str, reason: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"cannot save {path}: {reason}", path=path)


def _place(walk: Walk, layout: Layout, before: _Places | None) -> _Places:
    """Give a layout its numbers: those of the state before where they still hold."""
    digest = _columns_digest(layout)
    signature = _signature(walk.names, digest)
    extents_id = layout_id = 0
    if before is not None:
        extents_id = before.extents_id if before.layout.has_extents_of(layout) else 0
        layout_id = before.layout_id if before.names == walk.names and before.layout == layout else 0
    return _Places(
        walk.names, layout, digest, signature, layout_id or next(_numbers), extents_id or next(_numbers)
    )  # fmt: skip


def _moved(places: _Places, alike: Alike) -> _Places:
    """Return the places of a state some of whose tensors, each alone in its bytes, lie elsewhere now."""
    layout = places.layout
    addresses = list(layout.extent_addresses)
    extents = [layout.tensor_extent[i] for i in alike.moved]
    for extent, address in zip(extents, alike.moved.values(), strict=True):
        addresses[extent] = address
    is_on_host = all(layout.extent_devices[extent].type == "cpu" for extent in extents)
    return replace(
        places,
        layout=replace(layout, extent_addresses=addresses),
        layout_id=next(_numbers),
        extents_id=places.extents_id if is_on_host else next(_numbers),
    )


def _table(walk: Walk, places: _Places, storages: Sequence[torch.UntypedStorage]) -> StateTable:
    layout = places.layout
    return StateTable(
        skeleton=walk.root,
        specs=layout.specs,
        tensor_spec=layout.tensor_spec,
        tensor_extent=layout.tensor_extent,
        tensor_offset=layout.tensor_offset,
        extent_bytes=layout.extent_bytes,
        extent_words=layout.extent_words,
        extent_roles=layout.extent_roles,
        extent_devices=layout.extent_devices,
        extent_addresses=layout.extent_addresses,
        extent_packings=layout.extent_packings,
        sources=LiveSources(layout, walk.tensors, storages),
        tensors=walk.tensors,
        signature=places.signature,
        layout_id=places.layout_id,
        extents_id=places.extents_id,
    )


def _columns_digest(layout: Layout) -> bytes:
    digest = xxhash.xxh3_128()
    digest.update(json.dumps([spec_to_json(spec) for spec in layout.specs]).encode())
    digest.update(array("q", [len(layout.tensor_spec), len(layout.extent_bytes)]).tobytes())
    for column in (layout.tensor_spec, layout.tensor_extent, layout.tensor_offset, layout.extent_bytes):
        digest.update(array("q", column).tobytes())
    digest.update(bytes(layout.extent_words))
    digest.update("\0".join(layout.extent_roles).encode())
    return digest.digest()


def _signature(names: Names, columns_digest: bytes) -> bytes:
    """Sign names and columns, for this process: Python's own hash is fast, and another in the next process."""
    return xxhash.xxh3_128_digest(columns_digest + hash(tuple(names)).to_bytes(8, "little", signed=True))
