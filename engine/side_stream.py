"""Encode chunks of CUDA tensors on side streams; only the compressed bytes leave the device.

A *lane* is a stream with an encoder of its own. Chunks go to the lanes in turn, so that the memory-bound kernels of
one chunk (digests, planes, gathering) run beside the codec's of another. A finished frame goes to the host on a copy
stream, or, where the store takes device memory, to the store as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.codec.device import DeviceEncoder

from .auto import AutoCodec
from .budget import ByteBudget
from .buffers import BufferPool
from .copy_stream import CopyStream
from .device_deltas import DeltaSlot, DeviceCoded, DeviceDeltas, PendingChunk
from .device_kept import DeviceKept
from .device_shapes import with_residual_codecs
from .encode import Room, copied_bytes, output_bytes, read_chunk
from .errors import InternalError
from .job import SaveJob, StagedChunk
from .own_streams import own_streams
from .plan import Chunk
from .rooms import DeviceRoom, HostRoom
from .side_ticket import FrameVerifier, SideStreamTicket

_POINTER_ALIGNMENT_BYTES = 16
_PRIORITY = -1
# Of the lanes' streams; PyTorch's own is 0, lower goes first. The copy of the state fills the GPU, and the first frames
# are to leave meanwhile.


@dataclass(slots=True)
class _Lane:
    """A stream, its encoder, and memory for chunks that must be brought together or to the device first."""

    stream: torch.cuda.Stream
    encoder: DeviceEncoder
    inputs: list[torch.Tensor]
    input_uses: list[torch.cuda.Event | None]
    delta_slots: list[DeltaSlot]
    num_started: int = 0
    num_deltas: int = 0


class SideStreamEncoder:
    """Encodes on one CUDA device. Every device buffer is allocated in the constructor.

    Args:
        codecs: The codecs that chunks may get.
        chunk_bytes: The longest chunk.
        device: The CUDA device.
        outputs: Host buffers for frames.
        num_lanes: Streams that encode at the same time.
        num_slots: Chunks in flight on each.
        verify: Decode each frame on the device and compare it with its chunk before it is written.
        kept_bytes: The most device memory for the bases of differences; it is taken as chunks are kept. None: no chunk
            becomes a difference.
    """

    takes_room_late = True

    def __init__(
        self,
        codecs: tuple[str, ...],
        chunk_bytes: int,
        device: torch.device,
        outputs: BufferPool,
        *,
        num_lanes: int,
        num_slots: int,
        verify: bool,
        kept_bytes: int | None = None,
    ) -> None:
        self.depth = num_lanes * num_slots
        self.device = device
        self._auto = AutoCodec(codecs, device)
        self._outputs = outputs
        self._slots = ByteBudget(self.depth, high=1.0, low=1.0)
        with torch.cuda.device(device):
            self._copies = CopyStream(device, self.depth)
            has_deltas = kept_bytes is not None
            self._lanes = [
                self._make_lane(stream, chunk_bytes, num_slots, has_deltas=has_deltas)
                for stream in own_streams(self, device, num_lanes, priority=_PRIORITY)
            ]
            self._deltas: DeviceDeltas | None = None
            if kept_bytes is not None:
                self._deltas = DeviceDeltas(DeviceKept(kept_bytes, device, self._lanes[0].stream), device)
            self._verifier = FrameVerifier(chunk_bytes, device) if verify else None
        self._num_started = 0

    @property
    def device_bytes(self) -> int:
        """Device memory that it holds."""
        inputs = sum(buffer.numel() for lane in self._lanes for buffer in lane.inputs)
        checks = self._verifier.device_bytes if self._verifier is not None else 0
        if self._deltas is not None:
            checks += self._deltas.kept.held_bytes
            checks += sum(slot.device_bytes for lane in self._lanes for slot in lane.delta_slots)
        return inputs + checks + sum(lane.encoder.device_bytes for lane in self._lanes)

    def wake(self) -> None:
        """Make whoever waits for room look whether its job has failed."""
        self._slots.wake()

    def try_reserve(self, job: SaveJob, num_bytes: int) -> Room | None:
        """Take a slot if the store takes device memory, None if there is none now; else promise a host buffer."""
        if not job.writes_from_device:
            return HostRoom(self._outputs, output_bytes(num_bytes))
        return DeviceRoom(self._slots) if self._slots.try_acquire(1) else None

    def reserve(self, job: SaveJob, num_bytes: int) -> Room | None:
        """As `try_reserve`, but block until there is a slot. None if the job has failed."""
        if not job.writes_from_device:
            return HostRoom(self._outputs, output_bytes(num_bytes))
        return DeviceRoom(self._slots) if self._slots.acquire(1, job.failed) else None

    def start(self, job: SaveJob, staged: StagedChunk, room: Room) -> SideStreamTicket:
        """Queue the chunk on the next lane. Waits for the GPU only to try codecs on the first chunk of a group."""
        lane = self._next_lane()
        if staged.ready is not None:
            self._copies.let_wait(lane.stream.cuda_stream, staged.ready)
        used_input, raw = self._device_bytes(job, lane, staged)
        codec = self._auto.codec_of(job, staged.chunk, raw, lane.encoder, lane.stream)
        coded, slot, pending = self._left(job, lane, staged.chunk, DeviceCoded(raw, staged.chunk.word, codec))
        ticket = lane.encoder.start(coded.octets, coded.word, coded.codec)
        made = SideStreamTicket(job, staged, room, ticket, coded.octets, self._copies, self._verifier, pending)
        if used_input is not None:
            lane.input_uses[used_input] = made.copied
        if slot is not None:
            slot.last_use = made.copied
        return made

    def may_take(self, job: SaveJob, base: str, chunk: Chunk) -> bool:
        """Whether a chunk of a save that is a difference to the attempt `base` is to be encoded here."""
        return self._deltas is not None and self._deltas.may_take(job, base, chunk)

    def end_save(self, job: SaveJob) -> str | None:
        """Say which codecs were chosen in a save that has ended; None if there was no choice."""
        if self._deltas is not None:
            self._deltas.end_save()
        return self._auto.end_save(job)

    def _next_lane(self) -> _Lane:
        """The lanes in turn; one whose frames are still being written from its slots is passed over."""
        for _ in self._lanes:
            self._num_started += 1
            lane = self._lanes[self._num_started % len(self._lanes)]
            if lane.encoder.num_free:
                return lane
        raise InternalError(f"a chunk was started while all {self.depth} slots of {self.device} are taken")

    def _left(
        self, job: SaveJob, lane: _Lane, chunk: Chunk, coded: DeviceCoded
    ) -> tuple[DeviceCoded, DeltaSlot | None, PendingChunk | None]:
        """Queue what makes a chunk a residual and keeps it, where the save has to do with differences."""
        if self._deltas is None or job.delta is None:
            return coded, None, None
        slot = lane.delta_slots[lane.num_deltas % len(lane.delta_slots)]
        lane.num_deltas += 1
        if slot.last_use is not None:
            self._copies.let_wait(lane.stream.cuda_stream, slot.last_use)
        left, pending = self._deltas.queue(job, job.delta, chunk, coded, slot, lane.encoder, lane.stream)
        return left, slot, pending

    def _make_lane(
        self, stream: torch.cuda.Stream, chunk_bytes: int, num_slots: int, *, has_deltas: bool
    ) -> _Lane:
        codecs = with_residual_codecs(self._auto.candidates) if has_deltas else self._auto.candidates
        encoder = DeviceEncoder(codecs, chunk_bytes, self.device, stream, num_slots=num_slots)
        with torch.cuda.stream(stream):
            inputs = [torch.empty(chunk_bytes, dtype=torch.uint8, device=self.device) for _ in range(num_slots)]
            deltas = [DeltaSlot(chunk_bytes, self.device) for _ in range(num_slots)] if has_deltas else []
        return _Lane(stream, encoder, inputs, [None] * num_slots, deltas)

    def _device_bytes(self, job: SaveJob, lane: _Lane, staged: StagedChunk) -> tuple[int | None, torch.Tensor]:
        """The chunk's bytes in device memory: where they are if they can be read there, else copied to an input.

        Returns:
            The index of the input, None where none is used, and shape (chunk.num_bytes,), uint8.
        """
        chunk = staged.chunk
        found = staged.device_bytes
        if found is None and staged.buffer is None and chunk.is_piece:
            whole = staged.table.sources[chunk.first_extent].as_bytes()
            found = None if whole is None else whole[chunk.offset : chunk.offset + chunk.num_bytes]
        if found is not None and found.data_ptr() % _POINTER_ALIGNMENT_BYTES == 0:
            return None, found
        index = lane.num_started % len(lane.inputs)
        lane.num_started += 1
        last_use = lane.input_uses[index]
        if last_use is not None:
            lane.stream.wait_event(last_use)
        raw = lane.inputs[index][: chunk.num_bytes]
        with torch.cuda.device(self.device), torch.cuda.stream(lane.stream):
            if staged.buffer is not None:
                raw.copy_(copied_bytes(staged.buffer, chunk.num_bytes), non_blocking=True)
                return index, raw
            layout = job.live_layouts.get(self.device)
            if staged.is_live and layout is not None:
                layout.copy_one(staged.table, chunk, raw, lane.stream)
            else:
                read_chunk(staged, raw)
        return index, raw
