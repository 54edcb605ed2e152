"""Which frames a load reads. Pure data, checked against the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.codec.words import WordType

from .container import FrameEntry, ObjectIndex
from .delta import DeltaChunk
from .errors import CorruptCheckpointError
from .manifest import Manifest
from .plan import Chunk
from .residual import residual_word


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One frame to read: its chunk and where it lies.

    Attributes:
        chunk: The chunk.
        key: The object that holds the frame.
        entry: Where in it.
        step: The step that it was saved in.
        delta: What a frame that holds a residual has to be put on; None where it holds the chunk itself.
        base: The frame of the chunk before, where there is a `delta`.
    """

    chunk: Chunk
    key: str
    entry: FrameEntry
    step: int = -1
    delta: DeltaChunk | None = None
    base: ReadItem | None = None

    @property
    def word(self) -> WordType:
        """Word type of what the frame holds."""
        return self.chunk.word if self.delta is None else residual_word(self.delta.kind, self.chunk.word)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The frames of a checkpoint, in the order of their chunks. Derived chunks have none."""

    items: tuple[ReadItem, ...]


def plan_load(manifest: Manifest, indexes: Sequence[ObjectIndex], base: LoadPlan | None = None) -> LoadPlan:
    """Find the frame of every chunk that is not derived.

    Args:
        manifest: What the frames hold.
        indexes: Those of the objects.
        base: The frames of what the checkpoint is a difference to.

    Raises:
        CorruptCheckpointError: A chunk has no frame, two, or one of another length or word type; or it is derived and
            has one.
    """
    found: dict[int, ReadItem] = {}
    derived = {derivation.chunk for derivation in manifest.derived}
    bases = {item.chunk.index: item for item in base.items} if base is not None else {}
    for index in indexes:
        for entry in index.entries:
            if entry.chunk >= len(manifest.chunks) or entry.chunk in found or entry.chunk in derived:
                raise _damaged(index.record.key, f"it holds a frame of chunk {entry.chunk}, which is not expected here")
            item = _item(manifest, index.record.key, entry, bases)
            chunk = item.chunk
            if entry.header.raw_bytes != chunk.num_bytes or entry.header.word != item.word:
                raise _damaged(
                    index.record.key,
                    f"the frame of chunk {entry.chunk} holds {entry.header.raw_bytes} bytes of "
                    f"{entry.header.word.name}; the manifest says {chunk.num_bytes} of {item.word.name}",
                )
            found[entry.chunk] = item
    if len(found) + len(derived) != len(manifest.chunks):
        missing = next(i for i in range(len(manifest.chunks)) if i not in found and i not in derived)
        key = indexes[0].record.key if indexes else "manifest"
        raise _damaged(key, f"the frame of chunk {missing} is missing")
    return LoadPlan(tuple(found[i] for i in sorted(found)))


def _item(manifest: Manifest, key: str, entry: FrameEntry, bases: Mapping[int, ReadItem]) -> ReadItem:
    chunk = manifest.chunks[entry.chunk]
    delta = manifest.delta.chunks.get(entry.chunk) if manifest.delta is not None else None
    if delta is None or manifest.delta is None:
        return ReadItem(chunk, key, entry, manifest.step)
    before = bases.get(entry.chunk)
    if before is None or before.chunk != chunk:
        raise _damaged(
            key,
            f"chunk {entry.chunk} of step {manifest.step} is a difference to step {manifest.delta.base.step}, "
            "which has no such chunk",
        )
    return ReadItem(chunk, key, entry, manifest.step, delta, before)


def _damaged(key: str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"object {key} does not fit its manifest: {why}", key=key, stage="open")
