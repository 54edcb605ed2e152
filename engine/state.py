"""Describe a state: take it apart into a skeleton, a tensor table and the places of its bytes."""

from __future__ import annotations

import json
from array import array

import xxhash

from tidegate.codec.words import WordType

from .collector import collector_at_rest
from .errors import UnsupportedStateError
from .extents import Layout, RefusedTensorError, lay_out
from .into import match_into
from .paths import PathError
from .rebuild import rebuild, tensor_paths
from .skeleton import Walk, take_apart
from .sources import version_of
from .table import StateTable, make_tensors, validate_table
from .tensors import spec_to_json

__all__ = ["StateTable", "describe", "make_tensors", "match_into", "rebuild", "validate_table", "version_of"]


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
        return _describe(state)


def _describe(state: object) -> StateTable:
    try:
        walk = take_apart(state)
    except PathError as exc:
        raise _unsupported(exc.path, exc.reason) from None
    try:
        layout = lay_out(walk.tensors, walk.words)
    except RefusedTensorError as exc:
        path = tensor_paths(walk.root, len(walk.tensors))[exc.index]
        raise _unsupported(path, exc.reason) from exc.__cause__
    extent_bytes = [source.num_bytes for source in layout.sources]
    extent_words = [source.word for source in layout.sources]
    return StateTable(
        skeleton=walk.root,
        specs=layout.specs,
        tensor_spec=layout.tensor_spec,
        tensor_extent=layout.tensor_extent,
        tensor_offset=layout.tensor_offset,
        extent_bytes=extent_bytes,
        extent_words=extent_words,
        sources=layout.sources,
        tensors=walk.tensors,
        signature=_signature(walk, layout, extent_bytes, extent_words),
    )





def _unsupported(path: str, reason: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"cannot save {path}: {reason}", path=path)


def _signature(walk: Walk, layout: Layout, extent_bytes: list[int], extent_words: list[WordType]) -> bytes:
    digest = xxhash.xxh3_128()
    digest.update("\0".join(walk.names).encode("utf-8", "surrogatepass"))
    digest.update(json.dumps([spec_to_json(spec) for spec in layout.specs]).encode())
    digest.update(array("q", [len(layout.tensor_spec), len(extent_bytes)]).tobytes())
    for column in (layout.tensor_spec, layout.tensor_extent, layout.tensor_offset, extent_bytes):
        digest.update(array("q", column).tobytes())
    digest.update(bytes(extent_words))
    return digest.digest()
