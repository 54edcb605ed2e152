"""Read a checkpoint back: frames in, tensors out, every checksum looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from tidegate.codec.base import frame_bound_bytes
from tidegate.storage.base import Store
from tidegate.storage.workers import WorkerPool

from .budget import ByteBudget
from .buffers import BufferPool
from .collector import collector_at_rest
from .container import FrameEntry, ObjectIndex
from .errors import ConfigError, CorruptCheckpointError
from .frames import FrameDecoder
from .into import match_into
from .manifest import Manifest
from .plan import Chunk
from .rebuild import rebuild
from .sources import scatter
from .table import StateTable, make_tensors
from .translate import load_error

MapLocation = str | torch.device | Mapping[str, str] | None
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One frame to read: its chunk and where it lies."""

    chunk: Chunk
    key: str
    entry: FrameEntry


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The frames of a checkpoint, checked against its manifest."""

    items: tuple[ReadItem, ...]
    largest_bytes: int


def plan_load(manifest: Manifest, indexes: Sequence[ObjectIndex]) -> LoadPlan:
    """Find the frame of every chunk.

    Raises:
        CorruptCheckpointError: A chunk has no frame, two, or one of another length or word type.
    """
    found: dict[int, ReadItem] = {}
    for index in indexes:
        for entry in index.entries:
            if entry.chunk >= len(manifest.chunks) or entry.chunk in found:
                raise _damaged(index.record.key, f"it holds a frame of chunk {entry.chunk}, which is not expected here")
            chunk = manifest.chunks[entry.chunk]
            if entry.header.raw_bytes != chunk.num_bytes or entry.header.word != chunk.word:
                raise _damaged(
                    index.record.key,
                    f"the frame of chunk {entry.chunk} holds {entry.header.raw_bytes} bytes of "
                    f"{entry.header.word.name}; the manifest says {chunk.num_bytes} of {chunk.word.name}",
                )
            found[entry.chunk] = ReadItem(chunk, index.record.key, entry)
    if len(found) != len(manifest.chunks):
        missing = next(i for i in range(len(manifest.chunks)) if i not in found)
        key = indexes[0].record.key if indexes else "manifest"
        raise _damaged(key, f"the frame of chunk {missing} is missing")
    items = tuple(found[i] for i in range(len(manifest.chunks)))
    return LoadPlan(items, max((item.entry.header.padded_bytes for item in items), default=0))


def load_state(
    store: Store, manifest: Manifest, plan: LoadPlan, *, map_location: MapLocation, into: object | None
) -> object:
    """Read, decode and place every frame, and build the state. Blocks.

    Args:
        store: Where the frames are.
        manifest: What they hold.
        plan: Where they lie.
        map_location: Where tensors go; None: the CPU.
        into: A state of the same structure whose tensors are filled in place; None builds new ones.

    Raises:
        LoadError: With the frame and its first tensor named. `into` may be half filled then.
    """
    # Tensors made under inference mode could never be trained.
    with torch.inference_mode(False), torch.no_grad(), collector_at_rest():
        table = manifest.table
        targets = match_into(table, into) if into is not None else [None] * len(table.tensor_spec)
        extents = _Destination(table, targets, map_location)
        _read_frames(store, table, plan, extents)
        tensors = make_tensors(table, extents.finish())
        for i, target in enumerate(targets):
            if target is not None:
                if not extents.is_in_place(i):
                    target.detach().copy_(tensors[i].detach())
                tensors[i] = target
        extents.synchronize()
        return rebuild(table.skeleton, tensors)


class _Destination:
    """One uint8 tensor an extent: new memory, or the caller's own tensor where its bytes lie in the same order."""

    def __init__(self, table: StateTable, targets: Sequence[torch.Tensor | None], map_location: MapLocation) -> None:
        self._table = table
        self._extents: list[torch.Tensor | None] = [None] * len(table.extent_bytes)
        self._in_place: set[int] = set()
        self._devices = [torch.device("cpu")] * len(table.extent_bytes)
        num_views = [0] * len(table.extent_bytes)
        for extent in table.tensor_extent:
            num_views[extent] += 1
        where = _Locator(map_location)
        for i, extent in enumerate(table.tensor_extent):
            target = targets[i]
            if target is None:
                self._devices[extent] = where(table.specs[table.tensor_spec[i]].device)
                continue
            self._devices[extent] = target.device
            if num_views[extent] == 1 and _is_plain(target) and table.specs[table.tensor_spec[i]].strides is None:
                self._extents[extent] = target.detach().reshape(-1).view(torch.uint8)
                self._in_place.add(i)

    def is_in_place(self, tensor: int) -> bool:
        """Whether a tensor's bytes were decoded straight into the caller's tensor."""
        return tensor in self._in_place

    def device(self, chunk: Chunk) -> torch.device:
        """Where the first extent of a chunk goes."""
        return self._devices[chunk.first_extent]

    def piece(self, chunk: Chunk) -> torch.Tensor:
        """The destination of a chunk that lies inside one extent; its memory is allocated at the first piece."""
        whole = self._extents[chunk.first_extent]
        if whole is None:
            num_bytes = self._table.extent_bytes[chunk.first_extent]
            whole = torch.empty(num_bytes, dtype=torch.uint8, device=self._devices[chunk.first_extent])
            self._extents[chunk.first_extent] = whole
        return whole[chunk.offset : chunk.offset + chunk.num_bytes]

    def place(self, chunk: Chunk, packed: torch.Tensor) -> None:
        """Part a chunk of several extents."""
        span = range(chunk.first_extent, chunk.end_extent)
        parts = scatter(packed, [self._table.extent_bytes[i] for i in span])
        for i, part in zip(span, parts, strict=True):
            target = self._extents[i]
            if target is not None:
                target.copy_(part)
            else:
                self._extents[i] = part.to(self._devices[i])

    def synchronize(self) -> None:
        """Wait for copies on GPUs, so that every stream of the caller's sees their results. Blocks."""
        for device in {device for device in self._devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def finish(self) -> list[torch.Tensor]:
        """All extents; those of no bytes are made here."""
        return [
            extent if extent is not None else torch.empty(0, dtype=torch.uint8, device=device)
            for extent, device in zip(self._extents, self._devices, strict=True)
        ]


class _Locator:
    def __init__(self, map_location: MapLocation) -> None:
        if map_location is not None and not isinstance(map_location, str | torch.device | Mapping):
            raise ConfigError(
                f"map_location is a {type(map_location).__name__}; give a device, or a mapping of saved to new devices"
            )
        self._map = map_location if isinstance(map_location, Mapping) else None
        self._all = None if isinstance(map_location, Mapping) else _device(map_location or "cpu")

    def __call__(self, saved: str) -> torch.device:
        if self._all is not None:
            return self._all
        return _device((self._map or {}).get(saved, "cpu"))


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"map_location names no device: {exc}") from exc
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"map_location asks for {device}, and this machine has {count} CUDA devices")
        return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    return device


def _is_plain(target: torch.Tensor) -> bool:
    return target.is_contiguous() and not target.is_conj() and not target.is_neg()


def check_frames(store: Store, table: StateTable, plan: LoadPlan) -> None:
    """Read and decode every frame, check every checksum, keep nothing. Blocks. Raises LoadError naming the frame."""

    def check(decoder: FrameDecoder, item: ReadItem) -> None:
        with decoder.decoded(store, item.key, item.entry, torch.device("cpu")):
            pass

    _for_each_frame(table, plan, check, pin=False)


def _read_frames(store: Store, table: StateTable, plan: LoadPlan, extents: _Destination) -> None:
    allocate = threading.Lock()

    def read(decoder: FrameDecoder, item: ReadItem) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if item.chunk.is_piece:
                with allocate:
                    out = extents.piece(item.chunk)
                decoder.decode_into(store, item.key, item.entry, out)
            else:
                with decoder.decoded(store, item.key, item.entry, extents.device(item.chunk)) as packed:
                    extents.place(item.chunk, packed)

    pin = any(extents.device(item.chunk).type == "cuda" for item in plan.items)
    _for_each_frame(table, plan, read, pin=pin)


def _for_each_frame(
    table: StateTable, plan: LoadPlan, work: Callable[[FrameDecoder, ReadItem], None], *, pin: bool
) -> None:
    """Run `work` on every frame with a few threads, each a frame at a time, so that reads and decodes overlap."""
    if not plan.items:
        return
    num_threads = min(_NUM_THREADS, len(plan.items))
    unit_bytes = max(plan.largest_bytes, max(frame_bound_bytes(item.chunk.num_bytes) for item in plan.items))
    # Two buffers a thread, a frame and what it decodes to, and one to spare: nobody ever waits for another's second.
    pool = BufferPool(ByteBudget(3 * num_threads * unit_bytes, high=1.0, low=1.0), unit_bytes, pin=pin)
    decoder = FrameDecoder(pool, max(item.chunk.num_bytes for item in plan.items))
    stop = threading.Event()

    def run(item: ReadItem) -> None:
        if stop.is_set():
            return
        try:
            work(decoder, item)
        except Exception as exc:
            stop.set()
            names = _names(table, item.chunk)
            what = f"frame of chunk {item.chunk.index} in {item.key}, which holds {', '.join(names[:3])}"
            what += f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise load_error(exc, what, stage="decode", key=item.key, fqn=names[0] if names else "") from exc

    workers = WorkerPool(num_threads, "tidegate-read")
    try:
        futures: list[Future[None]] = [workers.submit(run, item) for item in plan.items]
        for future in futures:
            future.result()
    finally:
        stop.set()
        workers.close()
        pool.trim()


def _names(table: StateTable, chunk: Chunk) -> list[str]:
    return [table.fqn(i) for i, e in enumerate(table.tensor_extent) if chunk.first_extent <= e < chunk.end_extent]


def _damaged(key: str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"object {key} does not fit its manifest: {why}", key=key, stage="open")
