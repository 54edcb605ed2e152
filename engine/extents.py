"""Find the extents of a set of live tensors: which bytes to store so that each is stored once and every tie is kept.

For each tensor, its *span* is the run of bytes of its storage from its first element to the end of its furthest.

- Alone in its span, a tensor whose span is no longer than its elements (contiguous, transposed, channels-last,
  expanded) is stored as the span, and comes back with its strides. One with gaps (`x[::2]`, `x[:, 1:]`) is stored
  packed, and comes back contiguous.
- Tensors of one storage whose spans overlap share one extent, the union of their spans, and come back as views of one
  storage. If that would store more than four times what they hold and no two share an element, each goes alone.
- Spans that only touch stay apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tidegate.codec.words import WordType

from .geometry import Geometry, share_an_element
from .measure import Kind, Measured, RefusedTensorError, measure
from .sources import ExtentSource, Packing, gather, scatter, version_of
from .table import StateTable, make_tensors, validate_table
from .tensors import TensorSpec, spec_from_json, spec_to_json

__all__ = [
    "ExtentSource",
    "Layout",
    "RefusedTensorError",
    "StateTable",
    "gather",
    "lay_out",
    "make_tensors",
    "scatter",
    "spec_from_json",
    "spec_to_json",
    "validate_table",
    "version_of",
]

_SPARSE_FACTOR = 4
_ALIGNMENT_BYTES = 16


@dataclass(slots=True)
class Layout:
    """Columns of a StateTable; see there."""

    specs: list[TensorSpec]
    tensor_spec: list[int]
    tensor_extent: list[int]
    tensor_offset: list[int]
    sources: list[ExtentSource]


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in its storage: which, where its span begins, and its kind."""

    index: int
    start: int
    kind: Kind

    @property
    def end(self) -> int:
        return self.start + self.kind.span_bytes

    def geometry(self) -> Geometry:
        return Geometry(self.start, self.kind.spec.itemsize, self.kind.spec.shape, self.kind.strides)


def lay_out(tensors: Sequence[torch.Tensor], words: Mapping[int, WordType]) -> Layout:
    """Find the extents of tensors. Reads no element of them.

    Args:
        tensors: Distinct tensor objects, of class Tensor or Parameter.
        words: Word types by index, where not that of the dtype, for tensors whose storage nothing else views.

    Raises:
        RefusedTensorError: One has no plain bytes.
    """
    return _Layouter(tensors).run(words)


class _Layouter:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._found: Measured = measure(tensors)
        self._specs: dict[TensorSpec, int] = {}
        self._spec: list[int] = []
        self._extent: list[int] = [0] * len(tensors)
        self._offset: list[int] = [0] * len(tensors)
        self._sources: list[ExtentSource] = []

    def run(self, words: Mapping[int, WordType]) -> Layout:
        found = self._found
        spec_of = {kind: self._intern(kind.alone_spec) for kind in dict.fromkeys(found.kinds)}
        self._spec = [spec_of[kind] for kind in found.kinds]
        self._store_unshared(words)
        for indices in found.shared.values():
            self._split_storage(indices)
        self._number()
        return Layout(list(self._specs), self._spec, self._extent, self._offset, self._sources)

    def _store_unshared(self, words: Mapping[int, WordType]) -> None:
        """Store the tensors that have a storage to themselves: nearly all, as a rule, so this loop is lean."""
        found, sources, extent = self._found, self._sources, self._extent
        shared = {i for indices in found.shared.values() for i in indices}
        kinds = dict.fromkeys(found.kinds)
        of_kind = {kind: (kind.alone_bytes, kind.word, kind.device, kind.packing) for kind in kinds}
        rows = zip(self._tensors, found.storages, found.starts, found.kinds, strict=True)
        for i, (tensor, storage, start, kind) in enumerate(rows):
            if i in shared:
                continue
            num_bytes, word, device, packing = of_kind[kind]
            if i in words:
                word = words[i]
            extent[i] = len(sources)
            sources.append(ExtentSource(storage, start, num_bytes, word, device, i, tensor, packing))

    def _intern(self, spec: TensorSpec) -> int:
        return self._specs.setdefault(spec, len(self._specs))

    def _add(
        self, indices: Sequence[int], start: int, num_bytes: int, word: WordType, packing: Packing | None
    ) -> None:
        """Add an extent that begins at byte `start` of the storage of these tensors, the first of them first."""
        first = indices[0]
        for i in indices:
            self._extent[i] = len(self._sources)
        owner, *more = [self._tensors[i] for i in indices]
        storage, device = self._found.storages[first], self._found.kinds[first].device
        self._sources.append(ExtentSource(storage, start, num_bytes, word, device, first, owner, packing, tuple(more)))

    def _split_storage(self, indices: Sequence[int]) -> None:
        """Find the extents of tensors that share a storage."""
        places = [_Place(i, self._found.starts[i], self._found.kinds[i]) for i in indices]
        group: list[_Place] = []
        end = 0
        for place in sorted(places, key=lambda place: place.start):
            if not place.kind.span_bytes:
                self._store_one_geometry([place])
                continue
            if group and place.start >= end:
                self._store_group(group)
                group = []
            group.append(place)
            end = max(end, place.end) if len(group) > 1 else place.end
        if group:
            self._store_group(group)

    def _store_group(self, group: Sequence[_Place]) -> None:
        """Store tensors whose spans overlap."""
        by_geometry: dict[tuple[object, ...], list[_Place]] = {}
        for place in group:
            spec = place.kind.spec
            by_geometry.setdefault((place.start, spec.dtype, spec.shape, place.kind.strides), []).append(place)
        distinct = [places[0] for places in by_geometry.values()]
        span_bytes = max(place.end for place in distinct) - distinct[0].start
        held_bytes = sum(place.kind.num_bytes for place in distinct)
        is_sparse = span_bytes > _SPARSE_FACTOR * held_bytes
        if len(distinct) == 1 or (is_sparse and not share_an_element([[place.geometry()] for place in distinct])):
            for places in by_geometry.values():
                self._store_one_geometry(places)
        else:
            self._store_union(sorted(group, key=lambda place: place.index))

    def _store_one_geometry(self, places: Sequence[_Place]) -> None:
        indices = sorted(place.index for place in places)
        kind = places[0].kind
        self._add(indices, places[0].start, kind.alone_bytes, kind.word, kind.packing)

    def _store_union(self, group: Sequence[_Place]) -> None:
        start = min(place.start for place in group)
        if len({place.kind.spec.itemsize for place in group}) > 1:
            start -= start % _ALIGNMENT_BYTES  # so that each offset in the extent suits its dtype
        words = {place.kind.word for place in group}
        word = words.pop() if len(words) == 1 else WordType.U8
        self._add([place.index for place in group], start, max(place.end for place in group) - start, word, None)
        for place in group:
            self._offset[place.index] = place.start - start
            self._spec[place.index] = self._intern(place.kind.spec)

    def _number(self) -> None:
        """Number the extents by device (the CPU last), word type and first appearance."""
        sources = self._sources
        ranks = {source.device: (source.device.type == "cpu", str(source.device)) for source in sources}
        if len(ranks) <= 1 and len({source.word for source in sources}) <= 1 and not self._found.shared:
            return
        order = sorted(
            range(len(sources)), key=lambda e: (ranks[sources[e].device], sources[e].word, sources[e].tensor_index)
        )
        number_of = [0] * len(order)
        for number, extent in enumerate(order):
            number_of[extent] = number
        self._sources = [sources[extent] for extent in order]
        self._extent = [number_of[extent] for extent in self._extent]
