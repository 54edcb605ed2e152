"""The threads of a load: some read and decode on the CPU, or send what they read to a GPU, where one more decodes.

Where a store reads into devices itself, only the one that decodes is there for a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from tidegate.codec.base import FrameHeader, frame_bound_bytes
from tidegate.codec.registry import codec_numbered, needs_gpu
from tidegate.storage.workers import WorkerPool

from .budget import ByteBudget
from .buffers import BufferPool
from .errors import CheckpointWarning
from .failure import Failure
from .frames import HostDecoder, chain_of
from .landing import Landing
from .load_plan import ReadItem
from .open_objects import FrameSource, OpenObjects
from .places import Destination
from .table import StateTable
from .translate import load_error

if TYPE_CHECKING:
    from .device_chains import DeviceChains
    from .gpu_lane import GpuLane
    from .lane_frames import LaneFrame

PIECE_BYTES = 8 << 20
"""A frame for a GPU is read in pieces of at most this, so that its reading and copying overlap too."""


@dataclass(frozen=True, slots=True)
class _Task:
    """Work for a reading thread: on which frame, and what to do with that thread's landing."""

    item: ReadItem
    run: Callable[[Landing], None]


def read_frames(
    store: FrameSource, table: StateTable, items: Sequence[ReadItem], places: Destination, *, num_threads: int
) -> None:
    """Read frames, check and decode them, and place what they hold. Blocks until all of it is done.

    Args:
        store: Where the frames are.
        table: What they hold, for error messages.
        items: The frames.
        places: Where they go.
        num_threads: How many threads read, at most.

    Raises:
        CheckpointError: The first thing that went wrong, with its frame and first tensor named.
    """
    if not items:
        return
    try:
        crew = _Crew(store, table, items, places, num_threads)
    except Exception as exc:
        raise load_error(exc, "making ready to decode frames", stage="decode") from exc
    crew.run()


class _Crew:
    def __init__(
        self, store: FrameSource, table: StateTable, items: Sequence[ReadItem], places: Destination, num_threads: int
    ) -> None:
        self._objects = OpenObjects(store)
        self._items = items
        self._places = places
        self._failure = Failure(table)
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lanes, self._lane_of = _lanes(items, places, self._failure)
        on_lanes = [item.entry.header.frame_bytes for item in items if item.chunk.index in self._lane_of]
        self._landing_bytes = -(-min(PIECE_BYTES, max(on_lanes, default=0)) // 4096) * 4096
        self._reads_into_devices = bool(on_lanes) and self._objects.reads_into_devices(sum(on_lanes))
        num_pieces = 0 if self._reads_into_devices else sum(-(-size // PIECE_BYTES) for size in on_lanes)
        num_tasks = len(items) - len(on_lanes) + num_pieces
        self._num_threads = min(num_threads, num_tasks)
        gpus = [device for device in {places.device(item.chunk) for item in items} if device.type == "cuda"]
        self._homes = {gpu: torch.cuda.current_stream(gpu) for gpu in gpus}
        self._gpu = next(iter([*(lane.device for lane in self._lanes), *gpus]), None)
        self._chained: set[int] = set()
        self._pool = self._host_pool()
        self._host = HostDecoder(self._objects, self._pool)
        self._chains = self._device_chains()

    def run(self) -> None:
        """Do all of it."""
        workers = WorkerPool(self._num_threads + len(self._lanes), "tidegate-read")
        reading: list[Future[None]] = []
        decoding: list[Future[None]] = []
        try:
            decoding += [workers.submit(lane.decode_all) for lane in self._lanes]
            reading += [workers.submit(self._read_all) for _ in range(self._num_threads)]
            self._feed_all()
            self._end_reading()
            self._wait(reading)
            self._end_decoding()
            self._wait(decoding)
        except BaseException:  # an interrupt of the caller's thread
            self._failure.stop()
            self._end_reading()
            self._end_decoding()
            self._wait([*reading, *decoding])
            raise
        finally:
            workers.close()
            self._synchronize()
            self._pool.trim()
            self._objects.close()
            self._failure.forget()
        self._failure.raise_first()
        for lane in self._lanes:
            if lane.arrivals.not_direct is not None:
                warnings.warn(
                    f"some frames could not be read right into the memory of {lane.device}, and came through host "
                    f'memory, which is slower: {lane.arrivals.not_direct}; open the store with io="direct" to do '
                    "without",
                    CheckpointWarning,
                    stacklevel=2,
                )

    def _host_pool(self) -> BufferPool:
        """Two buffers a thread, a frame and what it decodes to: nobody ever waits for another's second."""
        items = [item for item in self._items if item.chunk.index not in self._lane_of]
        headers = [frame.entry.header for item in items for frame in chain_of(item)]
        unit_bytes = max((max(h.padded_bytes, frame_bound_bytes(h.raw_bytes)) for h in headers), default=4096)
        num_each = 3 if any(item.delta is not None for item in items) else 2
        budget = ByteBudget((num_each * self._num_threads + 1) * unit_bytes, high=1.0, low=1.0)
        pin = any(self._places.device(item.chunk).type == "cuda" for item in items)
        return BufferPool(budget, unit_bytes, pin=pin)

    def _device_chains(self) -> dict[torch.device, DeviceChains]:
        """What puts chains together on the GPUs that they go to. Does not touch CUDA where there are none."""
        items = [(item, self._places.device(item.chunk)) for item in self._items if item.delta is not None]
        on_gpus = [(item, device) for item, device in items if device.type == "cuda"]
        if not on_gpus:
            return {}
        from .device_chains import chains_of, decodes_chain

        known: dict[tuple[int, int, torch.device], bool] = {}
        fitting = [(item, device) for item, device in on_gpus if decodes_chain(item, device, known)]
        self._chained = {item.chunk.index for item, _ in fitting}
        return chains_of(fitting, self._objects, self._pool, self._homes)

    def _feed_all(self) -> None:
        """Hand the frames out in order. The caller's thread does this: it allocates, and it waits for free memory."""
        for item in self._items:
            if self._failure.is_set:
                return
            try:
                self._feed(item)
            except Exception as exc:  # noqa: BLE001 - it is raised in the end, whichever thread's was first
                self._failure.note(exc, item)

    def _feed(self, item: ReadItem) -> None:
        lane = self._lane_of.get(item.chunk.index)
        if lane is None:
            self._places.prepare(item.chunk)
            self._tasks.put(_Task(item, lambda _: self._decode_on_host(item)))
            return
        if self._reads_into_devices:
            lane.arrivals.read(item, self._objects)
            return
        num_bytes = item.entry.header.frame_bytes
        starts = range(0, num_bytes, PIECE_BYTES)
        frame = lane.arrivals.open(item, len(starts))
        if frame is None:
            return
        for start in starts:
            self._tasks.put(_Task(item, self._piece(lane, frame, start, min(PIECE_BYTES, num_bytes - start))))

    def _piece(self, lane: GpuLane, frame: LaneFrame, start: int, num_bytes: int) -> Callable[[Landing], None]:
        def run(landing: Landing) -> None:
            item, piece = frame.item, landing.take()[:num_bytes]
            self._objects.read_into(item.key, item.entry.offset + start, piece)
            lane.arrivals.copy(frame, start, piece, *landing.locked(lane.device))

        return run

    def _decode_on_host(self, item: ReadItem) -> None:
        chunk = item.chunk
        out, device = self._places.direct(chunk), self._places.device(chunk)
        if out is not None and out.device.type == "cpu":
            self._host.decode_into(item, out)
            return
        chains = self._chains.get(device) if chunk.index in self._chained else None
        if chains is not None:
            self._rebuild_on(chains, item, out, device)
            return
        with self._host.decoded(item) as host, torch.cuda.stream(self._homes.get(device)):
            if out is not None:
                out.copy_(host)
            else:
                self._places.place(chunk, host if device.type == "cpu" else host.to(device))

    def _rebuild_on(self, chains: DeviceChains, item: ReadItem, out: torch.Tensor | None, device: torch.device) -> None:
        with torch.cuda.stream(self._homes[device]):
            target = torch.empty(item.chunk.num_bytes, dtype=torch.uint8, device=device) if out is None else out
        chains.rebuild(item, target)
        if out is None:
            with torch.cuda.stream(self._homes[device]):
                self._places.place(item.chunk, target)

    def _read_all(self) -> None:
        """Take tasks until there are no more. Runs in each reading thread."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        landing = Landing(self._landing_bytes)
        with torch.inference_mode(False), torch.no_grad():
            while (task := self._tasks.get()) is not None:
                if self._failure.is_set:
                    continue
                try:
                    task.run(landing)
                except Exception as exc:  # noqa: BLE001 - the caller's thread raises it
                    self._failure.note(exc, task.item)
            landing.close()

    def _end_reading(self) -> None:
        for _ in range(self._num_threads):
            self._tasks.put(None)

    def _end_decoding(self) -> None:
        for lane in self._lanes:
            lane.arrivals.end()

    def _synchronize(self) -> None:
        """Wait for the GPUs: nobody else may use their memory before."""
        for lane in self._lanes:
            try:
                lane.synchronize()
            except RuntimeError as exc:
                self._failure.note(exc)

    def _wait(self, futures: Sequence[Future[None]]) -> None:
        for future in futures:
            exc = future.exception()
            if isinstance(exc, Exception):
                self._failure.note(exc)
            elif exc is not None:
                raise exc


def _lanes(
    items: Sequence[ReadItem], places: Destination, failure: Failure
) -> tuple[list[GpuLane], dict[int, GpuLane]]:
    """Make a lane for each GPU that decodes; the second value is the lane of each chunk that is not the CPU's."""
    by_gpu: dict[torch.device, list[ReadItem]] = {}
    known: dict[tuple[int, int, torch.device], torch.device | None] = {}
    for item in items:
        header, device = item.entry.header, places.device(item.chunk)
        if item.delta is not None:
            continue  # chains are put together frame after frame: device_chains.py, or the CPU
        key = (header.codec, header.parameter, device)
        if key not in known:
            known[key] = _gpu_for(header, device)
        gpu = known[key]
        if gpu is not None:
            by_gpu.setdefault(gpu, []).append(item)
    lanes: list[GpuLane] = []
    lane_of: dict[int, GpuLane] = {}
    for gpu, some in by_gpu.items():
        from .gpu_lane import GpuLane

        lane = GpuLane(gpu, some, places, failure)
        failure.call_when_set(lane.arrivals.slots.wake)
        lanes.append(lane)
        lane_of.update((item.chunk.index, lane) for item in some)
    return lanes, lane_of


def _gpu_for(header: FrameHeader, device: torch.device) -> torch.device | None:
    """Choose the GPU that decodes a frame: the one that it goes to, or any for what no CPU decodes; else None.

    Does not touch CUDA where neither is the case.
    """
    is_gpu_only = needs_gpu(codec_numbered(header.codec, header.codec_version).name)
    if device.type != "cuda":
        return torch.device("cuda", torch.cuda.current_device()) if is_gpu_only and torch.cuda.is_available() else None
    if is_gpu_only:
        return device  # whose error says what is missing, if anything is
    from tidegate.codec.device_decode import undecodable_reason

    return device if undecodable_reason(header, device) is None else None
