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
from .layout import Layout
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
    "measure",
    "scatter",
    "spec_from_json",
    "spec_to_json",
    "validate_table",
    "version_of",
]

_SPARSE_FACTOR = 4
_ALIGNMENT_BYTES = 16


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


@dataclass(slots=True, eq=False)
class _Extent:
    """An extent that has no number yet: columns of a Layout."""

    tensors: tuple[int, ...]
    start: int
    num_bytes: int
    word: WordType
    device: torch.device
    packing: Packing | None


def lay_out(found: Measured, words: Mapping[int, WordType], roles: Sequence[str]) -> Layout:
    """Find the extents of measured tensors.

    Args:
        found: Distinct tensor objects, measured.
        words: Word types by index, where not that of the dtype, for tensors whose storage nothing else views.
        roles: Role of each tensor.
    """
    return _Layouter(found).run(words, roles)


class _Layouter:
    def __init__(self, found: Measured) -> None:
        self._found = found
        self._specs: dict[TensorSpec, int] = {}
        self._spec: list[int] = []
        self._offset: list[int] = [0] * len(found.kinds)
        self._extents: list[_Extent] = []

    def run(self, words: Mapping[int, WordType], roles: Sequence[str]) -> Layout:
        found = self._found
        spec_of = {kind: self._intern(kind.alone_spec) for kind in dict.fromkeys(found.kinds)}
        self._spec = [spec_of[kind] for kind in found.kinds]
        self._store_unshared(words)
        for indices in found.shared.values():
            self._split_storage(indices)
        return self._numbered(roles)

    def _store_unshared(self, words: Mapping[int, WordType]) -> None:
        """Store the tensors that have a storage to themselves: nearly all, as a rule, so this loop is lean."""
        found, extents = self._found, self._extents
        shared = {i for indices in found.shared.values() for i in indices}
        kinds = dict.fromkeys(found.kinds)
        of_kind = {kind: (kind.alone_bytes, kind.word, kind.device, kind.packing) for kind in kinds}
        for i, (start, kind) in enumerate(zip(found.starts, found.kinds, strict=True)):
            if i in shared:
                continue
            num_bytes, word, device, packing = of_kind[kind]
            if i in words:
                word = words[i]
            extents.append(_Extent((i,), start, num_bytes, word, device, packing))

    def _intern(self, spec: TensorSpec) -> int:
        return self._specs.setdefault(spec, len(self._specs))

    def _add(
        self, indices: Sequence[int], start: int, num_bytes: int, word: WordType, packing: Packing | None
    ) -> None:
        """Add an extent that begins at byte `start` of the storage of these tensors, the first of them first."""
        device = self._found.kinds[indices[0]].device
        self._extents.append(_Extent(tuple(indices), start, num_bytes, word, device, packing))

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

    def _numbered(self, roles: Sequence[str]) -> Layout:
        """Number the extents by device (the CPU last), word type, role and first appearance."""
        devices = {extent.device for extent in self._extents}
        ranks = {device: (device.type == "cpu", str(device)) for device in devices}
        extents = sorted(self._extents, key=lambda e: (ranks[e.device], e.word, roles[e.tensors[0]], e.tensors[0]))
        extent_of = [0] * len(self._offset)
        for number, extent in enumerate(extents):
            for i in extent.tensors:
                extent_of[i] = number
        firsts = [extent.tensors[0] for extent in extents]
        addresses = self._found.addresses
        return Layout(
            specs=list(self._specs),
            tensor_spec=self._spec,
            tensor_extent=extent_of,
            tensor_offset=self._offset,
            extent_bytes=[extent.num_bytes for extent in extents],
            extent_words=[extent.word for extent in extents],
            extent_roles=[roles[first] for first in firsts],
            extent_devices=[extent.device for extent in extents],
            extent_addresses=[addresses[first] and addresses[first] - self._offset[first] for first in firsts],
            extent_starts=[extent.start for extent in extents],
            extent_packings=[extent.packing for extent in extents],
            extent_tensors=[extent.tensors for extent in extents],
        )
