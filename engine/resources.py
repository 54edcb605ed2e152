"""What a save needs and the next one uses again: threads, buffers, encoders."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from tidegate.codec.base import frame_bound_bytes
from tidegate.codec.errors import CodecUnavailableError as CodecMissing
from tidegate.codec.extras import install_hint
from tidegate.codec.registry import codec_named, needs_gpu
from tidegate.storage.base import Store
from tidegate.storage.workers import WorkerPool

from .budget import ByteBudget
from .buffers import BufferPool
from .chunk_sizes import ChunkSizes
from .commit import CommitRecord
from .delta_save import DeltaSave
from .deltas import Deltas
from .device_chunks import choose_device_bytes
from .device_shapes import (
    SMALL_CHUNK_BYTES,
    DeviceShape,
    device_codecs_of,
    device_shapes,
    host_codec_name,
    small_host_codec_name,
)
from .encode import ChunkEncoder, HostEncoder, output_bytes
from .errors import CodecUnavailableError
from .job import SaveJob, StagedChunk
from .options import NUM_DEVICE_OUTPUTS, Options, available_host_bytes, kept_device_bytes, split_host_budget
from .snapshot import DeviceSnapshot, headroom_bytes
from .table import StateTable

if TYPE_CHECKING:
    from .side_stream import SideStreamEncoder


class Resources:
    """Threads, buffers and encoders of an engine. Memory is allocated at the first save and kept until `close`.

    Args:
        options: The engine's options.

    Raises:
        CodecUnavailableError: The codec that was asked for does not work on this machine.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._available_bytes = available_host_bytes()
        shares = split_host_budget(options, self._available_bytes)
        self._sizes = shares.sizes
        # A chunk that becomes a residual on the CPU takes three more of its length there, for each thread; so with
        # deltas chunks stay short.
        self._is_settled = options.chunk_bytes is not None or options.delta is not None
        unit_bytes = frame_bound_bytes(shares.sizes.host_bytes)
        high, low = options.watermarks
        self.staging = BufferPool(ByteBudget(shares.staging_bytes, high=high, low=low), unit_bytes)
        outputs = ByteBudget(shares.output_bytes, high=high, low=low, max_count=shares.num_outputs)
        self.outputs = BufferPool(outputs, unit_bytes)
        self._deltas: Deltas | None = None
        self.residuals = BufferPool(ByteBudget(shares.delta_bytes or unit_bytes, high=1.0, low=1.0), unit_bytes)
        if options.delta is not None:
            self._deltas = Deltas(options.delta, self.residuals, shares.kept_bytes, self._is_on_device)
        if options.codec != "auto":
            _require_encoder(options.codec)
        self._device_encoders: dict[torch.device, SideStreamEncoder | None] = {}
        self._kept_bytes = 0
        self.snapshot = DeviceSnapshot(self._snapshot_budget_bytes())
        num_threads = options.num_encode_threads
        self._workers = WorkerPool(num_threads, "tidegate-encode")
        self._host_encoder = HostEncoder(
            codec_named(host_codec_name(options.codec)), self._workers, num_threads, self.staging, self.outputs,
            verify=options.verify == "decode",
            small_codec=codec_named(small_host_codec_name(options.codec)), small_bytes=SMALL_CHUNK_BYTES,
        )  # fmt: skip

    def sizes_for(self, table: StateTable) -> ChunkSizes:
        """Tell the longest chunks of a state. The first one with CUDA tensors settles what theirs are.

        Called by the thread that stages; they can become shorter after a save whose device had no room for an encoder.
        """
        devices = table.extent_devices
        if not self._is_settled and devices and devices[0].type == "cuda":  # the CPU's come last
            self._settle(choose_device_bytes(self.options, table))
        return self._sizes

    def encoder_for(self, job: SaveJob, staged: StagedChunk) -> ChunkEncoder:
        """Choose the encoder of a chunk: on the GPU that its tensors are on if that works there, else on the CPU."""
        encoder = self._device_encoder(job, staged.device) if staged.device.type == "cuda" else None
        base = job.delta.base if job.delta is not None else None
        if encoder is None or (base is not None and not encoder.may_take(job, base.attempt, staged.chunk)):
            return self._host_encoder
        return encoder

    def delta_save(self, job: SaveJob, store: Store, attempt: str) -> AbstractContextManager[DeltaSave | None]:
        """Make a save ready to be a difference, where the user asked for that. Blocks for a look at the store."""
        return nullcontext() if self._deltas is None or job.parts else self._deltas.save(job, store, attempt)

    def was_committed(self, job: SaveJob, record: CommitRecord) -> None:
        """Take a checkpoint that has been committed as what the next one may be a difference to."""
        if self._deltas is not None:
            self._deltas.committed(job, record)

    def prepare(self, *, has_cuda: bool) -> None:
        """Get ready for a save: page-lock buffers once there are CUDA tensors, look again for room that was missing."""
        self._device_encoders = {device: found for device, found in self._device_encoders.items() if found is not None}
        if has_cuda:
            self.staging.pin_from_now_on()
            self.outputs.pin_from_now_on()

    @property
    def device_bytes(self) -> int:
        """Device memory held now."""
        return self.snapshot.held_bytes + sum(
            encoder.device_bytes for encoder in self._device_encoders.values() if encoder is not None
        )

    def wake(self) -> None:
        """Wake whoever waits for a buffer."""
        self.staging.budget.wake()
        self.outputs.budget.wake()
        for encoder in list(self._device_encoders.values()):
            if encoder is not None:
                encoder.wake()

    def end_save(self, job: SaveJob) -> None:
        """Put what was chosen for a save that has ended into its notes."""
        for encoder in self._device_encoders.values():
            note = encoder.end_save(job) if encoder is not None else None
            if note is not None:
                job.notes.append(note)

    def take_peak_host_bytes(self) -> int:
        """The most host bytes on loan since the last call."""
        kept_bytes = self._deltas.held_bytes if self._deltas is not None else 0
        pools = (self.staging, self.outputs, self.residuals)
        return kept_bytes + sum(pool.budget.take_peak() for pool in pools)

    def close(self) -> None:
        """End the threads and free all memory. Blocks."""
        self._workers.close()
        self.staging.trim()
        self.outputs.trim()
        if self._deltas is not None:
            self._deltas.close()
        self.snapshot.free()
        self._device_encoders.clear()

    def _settle(self, device_bytes: int) -> None:
        """Make room for chunks of CUDA tensors."""
        self._is_settled = True
        shares = split_host_budget(self.options, self._available_bytes, device_bytes)
        self._sizes = shares.sizes
        for pool, limit_bytes in ((self.staging, shares.staging_bytes), (self.outputs, shares.output_bytes)):
            pool.budget.resize(limit_bytes)
            pool.add_unit(frame_bound_bytes(shares.sizes.device_bytes))

    def _snapshot_budget_bytes(self) -> int | None:
        budget_bytes = self.options.device_budget_bytes
        if budget_bytes is None or not torch.cuda.is_available():
            return budget_bytes
        if not self._is_settled:
            self._settle(choose_device_bytes(self.options))
        shapes, _ = self._shapes(torch.device("cuda"), budget_bytes, self._sizes.device_bytes)
        encoder_bytes = next((shape.num_bytes for shape in shapes), 0)  # none: it will be encoded on the CPU
        self._kept_bytes = kept_device_bytes(self.options.delta, budget_bytes - encoder_bytes)
        return budget_bytes - encoder_bytes - self._kept_bytes

    def _encoder_budget_bytes(self) -> int | None:
        """What snapshot and bases leave of the device budget: they never pass it together, whatever is free when."""
        if self.options.device_budget_bytes is None or self.snapshot.budget_bytes is None:
            return None
        return self.options.device_budget_bytes - self.snapshot.budget_bytes - self._kept_bytes

    def _bases_bytes(self, device: torch.device) -> int | None:
        """The most that bases may take on a device that has its encoder now; None where there are no differences."""
        if self.options.delta is None:
            return None
        if self.options.device_budget_bytes is not None:
            return self._kept_bytes
        return kept_device_bytes(self.options.delta, torch.cuda.mem_get_info(device)[0] - headroom_bytes(device))

    def _is_on_device(self, job: SaveJob, attempt: str, chunk: int) -> bool:
        """Whether a device keeps a chunk of an attempt, or will store the next one in full."""
        encoder = self._device_encoders.get(job.table.extent_devices[job.plan.chunks[chunk].first_extent])
        return encoder is not None and encoder.may_take(job, attempt, job.plan.chunks[chunk])

    def _shapes(
        self, device: torch.device, budget_bytes: int | None, chunk_bytes: int
    ) -> tuple[list[DeviceShape], str]:
        """The encoders that a device and a budget have room for now, largest first; where there are none, why."""
        free_bytes = torch.cuda.mem_get_info(device)[0]
        room_bytes = max(0, free_bytes - headroom_bytes(device)) if budget_bytes is None else budget_bytes
        room_bytes = min(room_bytes, free_bytes)
        codecs, reason = device_codecs_of(
            self.options.codec, chunk_bytes, device, room_bytes, portable=self.options.delta is not None
        )
        verify = self.options.verify == "decode"
        deltas = self.options.delta is not None
        shapes = device_shapes(codecs, chunk_bytes, device, verify=verify, deltas=deltas)
        fitting = [shape for shape in shapes if shape.num_bytes <= room_bytes]
        return fitting, reason or f"{device} has no room for the {self.options.codec} encoder"

    def _device_encoder(self, job: SaveJob, device: torch.device) -> SideStreamEncoder | None:
        if device not in self._device_encoders:
            self._device_encoders[device] = self._make_device_encoder(job, device)
        return self._device_encoders[device]

    def _make_device_encoder(self, job: SaveJob, device: torch.device) -> SideStreamEncoder | None:
        from .side_stream import SideStreamEncoder

        chunk_bytes = max(job.plan.sizes.device_bytes, self._sizes.device_bytes)
        shapes, reason = self._shapes(device, self._encoder_budget_bytes(), chunk_bytes)
        for shape in shapes:
            try:
                encoder = SideStreamEncoder(
                    shape.codecs, chunk_bytes, device, self.outputs,
                    num_lanes=shape.num_lanes, num_slots=shape.num_slots, verify=self.options.verify == "decode",
                    kept_bytes=self._bases_bytes(device),
                )  # fmt: skip
            except torch.OutOfMemoryError:
                continue
            if not job.writes_from_device:  # all that it will need, at once: to page-lock more holds up later steps
                chunks = job.plan.chunks
                frame_bytes = output_bytes(max((chunk.num_bytes for chunk in chunks), default=0))
                self.outputs.stock(min(len(chunks), NUM_DEVICE_OUTPUTS), frame_bytes)
            return encoder
        job.notes.append(f"encoded on the CPU: {reason}")
        self._sizes = ChunkSizes(self._sizes.host_bytes, self._sizes.host_bytes)  # from the next plan on
        return None


def _require_encoder(codec: str) -> None:
    """Refuse a codec that can encode neither here nor on the GPU that is here."""
    if not needs_gpu(codec):
        return
    from tidegate.codec.availability import require_device_codec

    try:
        require_device_codec(codec, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except CodecMissing as exc:
        raise CodecUnavailableError(
            f'{exc}. For {codec}, {install_hint()}; elsewhere use codec="auto", "zstd" or "rans"'
        ) from exc
