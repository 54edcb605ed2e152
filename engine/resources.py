"""What a save needs and the next one uses again: threads, buffers, encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tidegate.codec.base import frame_bound_bytes
from tidegate.codec.errors import CodecUnavailableError as CodecMissing
from tidegate.codec.extras import install_hint
from tidegate.codec.registry import codec_named
from tidegate.storage.workers import WorkerPool

from .budget import ByteBudget
from .buffers import BufferPool
from .encode import ChunkEncoder, HostEncoder
from .errors import CodecUnavailableError
from .job import SaveJob, StagedChunk
from .options import Options, split_host_budget
from .snapshot import DeviceSnapshot

if TYPE_CHECKING:
    from .side_stream import SideStreamEncoder

_NUM_SLOTS = 3
_PORTABLE_CODEC = "zstd"


class Resources:
    """Threads, buffers and encoders of an engine. Memory is allocated at the first save and kept until `close`.

    Args:
        options: The engine's options.

    Raises:
        CodecUnavailableError: The codec that was asked for does not work on this machine.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        shares = split_host_budget(options)
        self.chunk_bytes = shares.chunk_bytes
        unit_bytes = frame_bound_bytes(shares.chunk_bytes)
        high, low = options.watermarks
        self.staging = BufferPool(ByteBudget(shares.staging_bytes, high=high, low=low), unit_bytes)
        self.outputs = BufferPool(ByteBudget(shares.output_bytes, high=high, low=low), unit_bytes)
        # "auto" writes frames that every machine reads; nvCOMP's own are for those who ask for them.
        self.codec = _PORTABLE_CODEC if options.codec == "auto" else options.codec
        if self.codec == "ans":
            _require_device_codec(self.codec)
        self._device_encoders: dict[torch.device, SideStreamEncoder | None] = {}
        self.snapshot = DeviceSnapshot(self._snapshot_budget_bytes())
        num_threads = options.num_encode_threads
        self._workers = WorkerPool(num_threads, "tidegate-encode")
        host_codec = codec_named(_PORTABLE_CODEC if self.codec == "ans" else self.codec)
        self._host_encoder = HostEncoder(
            host_codec, self._workers, num_threads, self.staging, verify=options.verify == "decode"
        )

    def encoder_for(self, job: SaveJob, staged: StagedChunk) -> ChunkEncoder:
        """Choose the encoder of a chunk: on the GPU that its tensors are on if that works there, else on the CPU."""
        if staged.device.type == "cuda":
            return self._device_encoder(job, staged.device) or self._host_encoder
        return self._host_encoder

    def prepare_for(self, job: SaveJob) -> None:
        """Page-lock buffers once there are CUDA tensors to copy, and look again for room that was missing before."""
        self._device_encoders = {device: found for device, found in self._device_encoders.items() if found is not None}
        if any(source.device.type == "cuda" for source in job.table.sources):
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

    def take_peak_host_bytes(self) -> int:
        """The most host bytes on loan since the last call."""
        return self.staging.budget.take_peak() + self.outputs.budget.take_peak()

    def close(self) -> None:
        """End the threads and free all memory. Blocks."""
        self._workers.close()
        self.staging.trim()
        self.outputs.trim()
        self.snapshot.free()
        self._device_encoders.clear()

    def _snapshot_budget_bytes(self) -> int | None:
        budget_bytes = self.options.device_budget_bytes
        if budget_bytes is None or not torch.cuda.is_available():
            return budget_bytes
        return max(0, budget_bytes - _encoder_bytes(self.codec, self.chunk_bytes, _NUM_SLOTS))

    def _device_encoder(self, job: SaveJob, device: torch.device) -> SideStreamEncoder | None:
        if device not in self._device_encoders:
            self._device_encoders[device] = self._make_device_encoder(job, device)
        return self._device_encoders[device]

    def _make_device_encoder(self, job: SaveJob, device: torch.device) -> SideStreamEncoder | None:
        from tidegate.codec.availability import unavailable_reason

        from .side_stream import SideStreamEncoder

        reason = unavailable_reason(self.codec, device)
        if reason is not None:
            job.notes.append(f"encoded on the CPU: {reason}")
            return None
        budget_bytes = self.options.device_budget_bytes
        for num_slots in range(_NUM_SLOTS, 0, -1):
            need_bytes = _encoder_bytes(self.codec, self.chunk_bytes, num_slots)
            if need_bytes > torch.cuda.mem_get_info(device)[0] or (budget_bytes or need_bytes) < need_bytes:
                continue
            try:
                return SideStreamEncoder(self.codec, self.chunk_bytes, device, num_slots=num_slots)
            except torch.OutOfMemoryError:
                continue
        job.notes.append(f"{device} has no room for the {self.codec} encoder: encoded on the CPU")
        return None


def _encoder_bytes(codec: str, chunk_bytes: int, num_slots: int) -> int:
    from tidegate.codec.device import device_encoder_bytes

    try:
        return device_encoder_bytes(codec, chunk_bytes, num_slots) + num_slots * chunk_bytes
    except CodecMissing:
        return 0  # it will be encoded on the CPU


def _require_device_codec(codec: str) -> None:
    from tidegate.codec.availability import require_device_codec

    try:
        require_device_codec(codec, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except CodecMissing as exc:
        raise CodecUnavailableError(f'{exc}. For ans, {install_hint()}; elsewhere use codec="auto" or "zstd"') from exc
