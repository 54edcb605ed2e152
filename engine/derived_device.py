"""Ask GPUs, at the call, which candidates follow from their sources; the background thread takes the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.errors import CodecUnavailableError
from tidegate.codec.kernels import Kernels, indexed, kernels_of

from .derived import Candidates
from .plan import Chunk
from .rules import RULES
from .table import StateTable

_PIECE_BYTES = 256 << 10
_RATIOS = np.array([rule.ratio for rule in sorted(RULES.values(), key=lambda rule: rule.number)], dtype=np.int64)


class Comparison:
    """The candidates of one device: what to compare, and room for the answers. Used for save after save.

    Args:
        table: The state. It is not kept.
        chunks: The plan's.
        candidates: What may be derived.
        device: A CUDA device.

    Raises:
        CodecUnavailableError: The kernels do not work there.
    """

    def __init__(
        self, table: StateTable, chunks: tuple[Chunk, ...], candidates: Candidates, device: torch.device
    ) -> None:
        self.device = device
        self._kernels: Kernels = kernels_of(indexed(device))
        self._chunks = [i for i in candidates.derivations if table.extent_devices[chunks[i].first_extent] == device]
        rows = [row for flag, i in enumerate(self._chunks) for row in _rows(table, chunks[i], candidates, flag)]
        items = _split(np.array(rows, dtype=np.int64).reshape(-1, 5))
        self._num_items, self._max_bytes = len(items), int(items[:, 2].max(initial=0))
        self._items = torch.from_numpy(items).to(device)
        self._flags = torch.empty(len(self._chunks), dtype=torch.int32, device=device)
        self._found = torch.empty(len(self._chunks), dtype=torch.int32, pin_memory=True)
        self.done = torch.cuda.Event(blocking=True)

    def queue(self, stream: torch.cuda.Stream) -> None:
        """Queue the comparison, behind what the stream has, and the copy of its answers. Waits for nothing."""
        driver, num_bytes = self._kernels.driver, self._flags.nbytes
        with self._kernels.on(stream):
            driver.fill(self._flags.data_ptr(), 0, num_bytes, stream.cuda_stream)
        self._kernels.compare_pieces(
            self._items.data_ptr(), self._num_items, self._max_bytes, self._flags.data_ptr(), stream
        )
        with self._kernels.on(stream):
            self._kernels.copy_to_host(self._found.data_ptr(), self._flags.data_ptr(), num_bytes)
        self.done.record(stream)

    def wait(self) -> Mapping[int, bool]:
        """Block until it is done, and say of each of its chunks whether it follows."""
        self.done.synchronize()
        return {chunk: flag == 0 for chunk, flag in zip(self._chunks, self._found.tolist(), strict=True)}


@dataclass(slots=True)
class Comparisons:
    """The comparisons of the state that was saved last. Used by the training thread."""

    _extents_id: int = -1
    _candidates: Candidates | None = None
    _made: dict[torch.device, Comparison | None] = field(default_factory=dict)

    def of(self, table: StateTable, chunks: tuple[Chunk, ...], candidates: Candidates) -> Iterator[Comparison]:
        """Yield those of the devices that have candidates. Makes them where those or memory are new; that blocks."""
        if table.extents_id != self._extents_id or candidates is not self._candidates:
            self._made.clear()
            self._extents_id, self._candidates = table.extents_id, candidates
            for device in dict.fromkeys(table.extent_devices[chunks[i].first_extent] for i in candidates.derivations):
                self._made[device] = _comparison(table, chunks, candidates, device)
        yield from (found for found in self._made.values() if found is not None)

    def clear(self) -> None:
        """Forget all, and free their memory."""
        self._made.clear()
        self._extents_id, self._candidates = -1, None


def _comparison(
    table: StateTable, chunks: tuple[Chunk, ...], candidates: Candidates, device: torch.device
) -> Comparison | None:
    if device.type != "cuda":
        return None
    try:
        return Comparison(table, chunks, candidates, device)
    except (CodecUnavailableError, torch.OutOfMemoryError):
        return None  # its candidates are stored


def _rows(table: StateTable, chunk: Chunk, candidates: Candidates, flag: int) -> Iterator[tuple[int, ...]]:
    """Yield source, target, bytes of the target, rule and flag of each of a chunk's extents."""
    derivation = candidates.derivations[chunk.index]
    addresses, rule = table.extent_addresses, derivation.rule
    for extent, source in enumerate(derivation.sources, chunk.first_extent):
        start, num_bytes = chunk.span(extent, table.extent_bytes)
        yield addresses[source] + start * rule.ratio, addresses[extent] + start, num_bytes, rule.number, flag


def _split(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut rows into pieces of at most _PIECE_BYTES of the target, so that one kernel's blocks are alike."""
    counts = -(-rows[:, 2] // _PIECE_BYTES)
    owner = np.repeat(np.arange(len(rows)), counts)
    skip = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * _PIECE_BYTES
    items = rows[owner]
    items[:, 0] += skip * _RATIOS[items[:, 3]]
    items[:, 1] += skip
    items[:, 2] = np.minimum(_PIECE_BYTES, items[:, 2] - skip)
    return np.ascontiguousarray(items)
