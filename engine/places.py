"""Where a load puts the bytes of each chunk: new memory, or the caller's own tensors."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from .bits import copy_bits, is_stored_row, stored_row
from .errors import InternalError
from .load_plan import ReadItem
from .locate import Locator, MapLocation
from .plan import Chunk
from .sources import scatter
from .table import StateTable, make_tensors
from .tensors import quiet_complex32


class Destination(Protocol):
    """What takes decoded chunks."""

    def device(self, chunk: Chunk) -> torch.device:
        """Return where the chunk goes; where to several devices, one of them."""
        ...

    def prepare(self, chunk: Chunk) -> None:
        """Allocate what is needed for the chunk on GPUs. Called by one thread, before any of the others below."""
        ...

    def direct(self, chunk: Chunk) -> torch.Tensor | None:
        """Return the chunk's own memory, shape (num_bytes,), uint8; None where `place` has to part it."""
        ...

    def place(self, chunk: Chunk, packed: torch.Tensor) -> None:
        """Part a decoded chunk that has no memory of its own; on a GPU, queue that on the current stream.

        Args:
            chunk: The chunk.
            packed: Shape (num_bytes,), uint8, on the CPU or on `device(chunk)`; it may change after the call, or once
                the stream has passed.
        """
        ...


class Nowhere:
    """A destination that keeps nothing."""

    def device(self, chunk: Chunk) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    def prepare(self, chunk: Chunk) -> None:
        """Do nothing."""

    def direct(self, chunk: Chunk) -> torch.Tensor | None:
        """Return None."""
        return None

    def place(self, chunk: Chunk, packed: torch.Tensor) -> None:
        """Do nothing."""


class Places:
    """The memory of a state's extents, as uint8 tensors; a tensor of the caller's where its bytes lie in one row.

    New memory on a GPU belongs to the stream that is current there in the thread that calls `prepare` and `finish`.

    Args:
        table: What is stored.
        wanted: The tensors that are loaded, ascending.
        targets: By tensor, the caller's to be filled; None: a new one.
        map_location: Where new tensors go.

    Raises:
        ConfigError: `map_location` names no device of this machine.
    """

    def __init__(
        self,
        table: StateTable,
        wanted: Sequence[int],
        targets: Sequence[torch.Tensor | None],
        map_location: MapLocation,
    ) -> None:
        self._table = table
        self._wanted = wanted
        self._targets = targets
        self._in_place: set[int] = set()
        self._memory: list[torch.Tensor | None] = [None] * len(table.extent_bytes)
        self._rows: dict[int, int] = {}  # the caller's tensor of an extent that is filled in place, until it is needed
        self._devices: list[torch.device | None] = [None] * len(table.extent_bytes)
        where = Locator(map_location)
        changing: list[torch.Tensor] = []
        num_views = Counter(table.tensor_extent)
        kinds = [(spec, spec.num_bytes) for spec in table.specs]  # a state of many tensors has few kinds
        for i in wanted:
            extent, target = table.tensor_extent[i], targets[i]
            spec, num_bytes = kinds[table.tensor_spec[i]]
            if target is None:
                self._devices[extent] = where(spec.device)
                continue
            self._devices[extent] = target.device
            is_all = num_views[extent] == 1 and num_bytes == table.extent_bytes[extent]
            if is_all and not table.tensor_offset[i] and is_stored_row(target, spec):
                self._rows[extent] = i
                self._in_place.add(i)
                changing.append(target)
        # Decoders do not go through PyTorch, and who watches `_version` shall see that the tensors change.
        torch.autograd.graph.increment_version(changing)
        self._starts = list(itertools.accumulate((device is not None for device in self._devices), initial=0))

    @property
    def gpus(self) -> list[torch.device]:
        """The CUDA devices that something goes to."""
        return [device for device in dict.fromkeys(self._devices) if device is not None and device.type == "cuda"]

    def needed(self, items: Iterable[ReadItem]) -> list[ReadItem]:
        """Return the frames that hold a byte of a wanted tensor's extent, in their order."""
        starts = self._starts
        return [item for item in items if starts[item.chunk.end_extent] > starts[item.chunk.first_extent]]

    def device(self, chunk: Chunk) -> torch.device:
        """Return the device of the chunk's first wanted extent."""
        devices = self._devices[chunk.first_extent : chunk.end_extent]
        return next((device for device in devices if device is not None), torch.device("cpu"))

    def prepare(self, chunk: Chunk) -> None:
        """Allocate the extents of a chunk that are on a GPU, and the one that it is a piece of."""
        for extent in chunk.extents:
            device = self._devices[extent]
            if self._found(extent) is None and device is not None and (chunk.is_piece or device.type == "cuda"):
                self._memory[extent] = self._empty(extent, device)

    def direct(self, chunk: Chunk) -> torch.Tensor | None:
        """Return the part of an extent that the chunk is."""
        memory = self._memory[chunk.first_extent]
        return memory[chunk.offset : chunk.offset + chunk.num_bytes] if chunk.is_piece and memory is not None else None

    def place(self, chunk: Chunk, packed: torch.Tensor) -> None:
        """Copy each wanted extent's bytes out of a packed chunk, in as few calls as can be."""
        span = slice(chunk.first_extent, chunk.end_extent)
        sizes, memory, devices = self._table.extent_bytes[span], self._memory[span], self._devices[span]
        if not any(there is not None for there in memory) and all(device == packed.device for device in devices):
            self._memory[span] = [*scatter(packed, sizes)]
            return
        rows = [(there, size) for there, size in zip(memory, sizes, strict=True) if size]
        if all(there is not None and there.device == packed.device for there, _ in rows):
            outs = [there for there, _ in rows if there is not None]
            torch.split_with_sizes_copy(packed, [size for _, size in rows], out=outs)
            return
        for extent, piece in enumerate(torch.split_with_sizes(packed, sizes), chunk.first_extent):
            self._place_one(extent, piece)

    def finish(self) -> list[torch.Tensor | None]:
        """Make the tensors, and fill those of the caller's that were not filled in place. Blocks.

        Returns:
            By tensor; None for those that are not wanted.
        """
        tensors: list[torch.Tensor | None] = [None] * len(self._targets)
        new = [i for i in self._wanted if i not in self._in_place]
        for i, made in zip(new, self._make(new), strict=True):
            tensors[i] = made
        for i in self._wanted:
            target, tensor = self._targets[i], tensors[i]
            if target is None:
                continue
            if tensor is not None:
                with quiet_complex32():
                    copy_bits(target, tensor)
            tensors[i] = target
        for device in self.gpus:
            torch.cuda.synchronize(device)  # so that every stream of the caller's sees it
        return tensors

    def _place_one(self, extent: int, piece: torch.Tensor) -> None:
        device, memory = self._devices[extent], self._memory[extent]
        if device is None:
            return
        if memory is not None:
            memory.copy_(piece)
        else:
            self._memory[extent] = piece.clone() if device == piece.device else piece.to(device)

    def _found(self, extent: int) -> torch.Tensor | None:
        """Return an extent's memory if it has some: its own, or the caller's. Called before any other thread does."""
        i = self._rows.pop(extent, None)
        target = None if i is None else self._targets[i]
        if i is not None and target is not None:
            self._memory[extent] = stored_row(target, self._table.spec(i))
        return self._memory[extent]

    def _empty(self, extent: int, device: torch.device) -> torch.Tensor:
        return torch.empty(self._table.extent_bytes[extent], dtype=torch.uint8, device=device)

    def _made(self, extent: int) -> torch.Tensor:
        """Return an extent's memory. That of no bytes is in no chunk, so it was not needed before."""
        there, device = self._found(extent), self._devices[extent]
        if there is None and device is not None and self._table.extent_bytes[extent] == 0:
            return self._empty(extent, device)
        if there is None:
            raise InternalError(f"extent {extent} was not read")
        return there

    def _make(self, which: Sequence[int]) -> list[torch.Tensor]:
        table = self._table
        extents = sorted({table.tensor_extent[i] for i in which})
        number = {extent: n for n, extent in enumerate(extents)}
        part = StateTable(
            skeleton=None,
            specs=table.specs,
            tensor_spec=[table.tensor_spec[i] for i in which],
            tensor_extent=[number[table.tensor_extent[i]] for i in which],
            tensor_offset=[table.tensor_offset[i] for i in which],
            extent_bytes=[table.extent_bytes[extent] for extent in extents],
            extent_words=[table.extent_words[extent] for extent in extents],
        )
        return make_tensors(part, [self._made(extent) for extent in extents])
