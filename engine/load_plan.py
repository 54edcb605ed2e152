"""Which frames a load reads. Pure data, checked against the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .container import FrameEntry, ObjectIndex
from .errors import CorruptCheckpointError
from .manifest import Manifest
from .plan import Chunk


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One frame to read: its chunk and where it lies."""

    chunk: Chunk
    key: str
    entry: FrameEntry


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The frames of a checkpoint, in the order of their chunks. Derived chunks have none."""

    items: tuple[ReadItem, ...]


def plan_load(manifest: Manifest, indexes: Sequence[ObjectIndex]) -> LoadPlan:
    """Find the frame of every chunk that is not derived.

    Raises:
        CorruptCheckpointError: A chunk has no frame, two, or one of another length or word type; or it is derived and
            has one.
    """
    found: dict[int, ReadItem] = {}
    derived = {derivation.chunk for derivation in manifest.derived}
    for index in indexes:
        for entry in index.entries:
            if entry.chunk >= len(manifest.chunks) or entry.chunk in found or entry.chunk in derived:
                raise _damaged(index.record.key, f"it holds a frame of chunk {entry.chunk}, which is not expected here")
            chunk = manifest.chunks[entry.chunk]
            if entry.header.raw_bytes != chunk.num_bytes or entry.header.word != chunk.word:
                raise _damaged(
                    index.record.key,
                    f"the frame of chunk {entry.chunk} holds {entry.header.raw_bytes} bytes of "
                    f"{entry.header.word.name}; the manifest says {chunk.num_bytes} of {chunk.word.name}",
                )
            found[entry.chunk] = ReadItem(chunk, index.record.key, entry)
    if len(found) + len(derived) != len(manifest.chunks):
        missing = next(i for i in range(len(manifest.chunks)) if i not in found and i not in derived)
        key = indexes[0].record.key if indexes else "manifest"
        raise _damaged(key, f"the frame of chunk {missing} is missing")
    return LoadPlan(tuple(found[i] for i in sorted(found)))


def _damaged(key: str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"object {key} does not fit its manifest: {why}", key=key, stage="open")
