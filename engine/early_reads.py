"""The first frames of a load, on their way to a GPU while it is still found out where all of them go.

To match a stored state with the caller's takes some microseconds a tensor, in which the store would have nothing to do.
So it begins with what comes first, into memory that frames pass through anyway (lane_frames.py); the lane of that GPU
takes them from there. What was begun for another GPU, or for none, was begun in vain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from tidegate.codec.base import HEADER_BYTES

from .direct_read import DirectRead
from .gpu_choice import gpu_for
from .lane_frames import LaneFrame, Slot, Slots
from .load_plan import ReadItem
from .locate import Locator, MapLocation
from .open_objects import FrameSource, OpenObjects
from .table import StateTable

_MAX_LOOKS = 64


class EarlyReads:
    """Reads that have begun before the load. Used by the thread that calls the load.

    Args:
        objects: Where the frames are; they read into devices.
        device: The GPU.
        items: Frames that it decodes if they go there, in the order of the plan.

    Attributes:
        device: The GPU.
        objects: Where the frames are. Closed with this.
        slots: Memory for the load's frames on this GPU, some of it taken.
    """

    def __init__(self, objects: OpenObjects, device: torch.device, items: Sequence[ReadItem]) -> None:
        self.device = device
        self.objects = objects
        home = torch.cuda.current_stream(device)
        self.slots = Slots(max(item.entry.header.frame_bytes for item in items), device, home)
        self._frames: dict[int, LaneFrame] = {}
        try:
            for item in items:
                slot = self.slots.make()
                if slot is None:
                    break
                self._begin(item, slot, home)
        except BaseException:
            self.close()
            raise

    def frame(self, item: ReadItem) -> LaneFrame | None:
        """Return a frame whose reading has begun; it stays this object's to wait for until it is `forgotten`."""
        return self._frames.get(item.chunk.index)

    def forget(self, item: ReadItem) -> None:
        """Leave it to others to wait for a frame, and to give its slot back."""
        self._frames.pop(item.chunk.index, None)

    def keep(self, chunks: Collection[int]) -> None:
        """Drop the frames of all other chunks. Blocks for what was begun in vain."""
        for index in [index for index in self._frames if index not in chunks]:
            frame = self._frames.pop(index)
            _wait(frame)
            if frame.slot is not None:
                self.slots.give_back(frame.slot)

    def close(self) -> None:
        """Wait for what nobody has taken, and let go of the objects; nobody else may be reading from them. Blocks."""
        self.keep(())
        self.objects.close()

    def _begin(self, item: ReadItem, slot: Slot, home: torch.cuda.Stream) -> None:
        num_bytes = item.entry.header.frame_bytes
        ready = torch.cuda.Event()
        ready.record(home)
        ready.synchronize()  # a store waits for no stream, and what is queued may still use this memory
        frame = self._frames[item.chunk.index] = LaneFrame(item, slot.memory[HEADER_BYTES:num_bytes], slot, ready)
        frame.reading = DirectRead(self.objects, item.key, item.entry.offset, slot.memory[:num_bytes])


@contextmanager
def reading_early(
    store: FrameSource, table: StateTable, items: Sequence[ReadItem], map_location: MapLocation, into: object | None
) -> Iterator[EarlyReads | None]:
    """Begin to read the first frames if they look as if they go to a GPU that the store reads into; else give None.

    Args:
        store: Where the frames are.
        table: What is stored.
        items: The frames, in the order of the plan.
        map_location: As for the load, and so is `into`.
        into: There.
    """
    try:
        early = _begin(store, table, items, map_location, into)
    except Exception:  # noqa: BLE001 - the load meets it again, and says what it was doing
        early = None
    try:
        yield early
    finally:
        if early is not None:
            early.close()


def _begin(
    store: FrameSource, table: StateTable, items: Sequence[ReadItem], map_location: MapLocation, into: object | None
) -> EarlyReads | None:
    where = Locator(map_location) if into is None else _Alike(into)
    device = next((found for spec in table.specs if (found := where(spec.device)).type == "cuda"), None)
    if device is None:
        return None
    saved_from: dict[int, str] = {}
    for spec, extent in zip(table.tensor_spec, table.tensor_extent, strict=True):
        saved_from.setdefault(extent, table.specs[spec].device)
    known: dict[tuple[int, int], bool] = {}
    fitting: list[ReadItem] = []
    for item in items:
        header = item.entry.header
        key = (header.codec, header.parameter)
        if key not in known:
            known[key] = gpu_for(header, device) == device
        if known[key] and item.delta is None and where(saved_from.get(item.chunk.first_extent, "cpu")) == device:
            fitting.append(item)
    objects = OpenObjects(store)
    if not fitting or not objects.reads_into_devices(sum(item.entry.header.frame_bytes for item in fitting)):
        return None
    return EarlyReads(objects, device, fitting)


class _Alike:
    """Guesses where the caller has what was saved from some device: all of a GPU's where the first tensor on one is."""

    def __init__(self, into: object) -> None:
        devices = (tensor.device for tensor in islice(_tensors(into), _MAX_LOOKS))
        self._gpu = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))

    def __call__(self, saved: str) -> torch.device:
        return torch.device("cpu") if saved == "cpu" else self._gpu


def _tensors(state: object) -> Iterator[torch.Tensor]:
    """Yield tensors that stand in dicts and sequences, in the order of the state; not more than a few levels deep."""
    waiting = [iter((state,))]
    while waiting and len(waiting) < _MAX_LOOKS:
        value = next(waiting[-1], waiting)
        if value is waiting:
            waiting.pop()
        elif isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            waiting.append(iter(value.values()))
        elif isinstance(value, list | tuple):
            waiting.append(iter(value))


def _wait(frame: LaneFrame) -> None:
    if frame.reading is not None:
        try:
            frame.reading.wait()
        except Exception:  # noqa: BLE001 - nobody wants what was to be read
            return
