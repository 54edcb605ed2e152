"""The sources of a state's extents, each made when it is first asked for: most saves need few of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch

from .layout import Layout
from .sources import ExtentSource


class LiveSources(Sequence[ExtentSource]):
    """By extent, where its live bytes are. Holds the state's tensors and storages until it is cleared.

    Any thread may read it. Two that ask at once for one extent get the same source.

    Args:
        layout: The extents; None: there are none.
        tensors: The live tensors.
        storages: Their storages as they were when the state was described, by tensor.
    """

    __slots__ = ("_held",)

    def __init__(
        self,
        layout: Layout | None = None,
        tensors: Sequence[torch.Tensor] = (),
        storages: Sequence[torch.UntypedStorage] = (),
    ) -> None:
        self._held = _Held(layout, tensors, storages) if layout is not None else None

    def __len__(self) -> int:
        held = self._held
        return 0 if held is None else len(held.layout.extent_bytes)

    @overload
    def __getitem__(self, index: int) -> ExtentSource: ...

    @overload
    def __getitem__(self, index: slice) -> list[ExtentSource]: ...

    def __getitem__(self, index: int | slice) -> ExtentSource | list[ExtentSource]:
        held = self._held
        extents = range(0 if held is None else len(held.layout.extent_bytes))[index]
        if held is None:  # and so `extents` is an empty range: an index would have raised
            return []
        if isinstance(extents, range):
            return [held.source(extent) for extent in extents]
        return held.source(extents)

    def runs(self, extents: range) -> Iterator[tuple[torch.UntypedStorage, int, int]]:
        """Yield, for neighbours that are not packed, the storage, where in it they begin, and their bytes.

        To make a source for each takes ten times as long.
        """
        held = self._held
        if held is None:
            return iter(())
        layout, here = held.layout, slice(extents.start, extents.stop)
        storages = [held.storages[first] for first, *_ in layout.extent_tensors[here]]
        return zip(storages, layout.extent_starts[here], layout.extent_bytes[here], strict=True)

    def clear(self) -> None:
        """Let go of the tensors and the storages."""
        self._held = None


class _Held:
    """What it takes to make the sources, and those that are made."""

    __slots__ = ("_made", "_tensors", "layout", "storages")

    def __init__(
        self, layout: Layout, tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]
    ) -> None:
        self.layout = layout
        self._tensors = tuple(tensors)
        self.storages = storages
        self._made: dict[int, ExtentSource] = {}

    def source(self, extent: int) -> ExtentSource:
        made = self._made.get(extent)
        return self._made.setdefault(extent, self._make(extent)) if made is None else made

    def _make(self, extent: int) -> ExtentSource:
        layout, tensors = self.layout, self._tensors
        first, *more = layout.extent_tensors[extent]
        return ExtentSource(
            self.storages[first],
            layout.extent_starts[extent],
            layout.extent_bytes[extent],
            layout.extent_words[extent],
            layout.extent_devices[extent],
            first,
            tensors[first],
            layout.extent_packings[extent],
            tuple(tensors[i] for i in more),
        )
