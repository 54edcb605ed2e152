"""The codec of each chunk of a save: the one that was asked for, or what measurements say (choice.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from tidegate.codec.device import DeviceEncoder

from .choice import CodecChooser, Group, Trial
from .job import SaveJob
from .plan import Chunk
from .report import busy_s
from .table import StateTable

_CHUNKS_BETWEEN_LOOKS = 16
_NUM_TRIALS = 2


@dataclass(slots=True)
class _Choices:
    """The codec of each chunk of one job, and what became of them."""

    job: SaveJob | None = None
    codecs: dict[int, str] = field(default_factory=dict)
    used: dict[Group, Counter[str]] = field(default_factory=dict)
    num_left: int = 0


class AutoCodec:
    """Chooses for the chunks of one CUDA device, save after save. Used by the background thread.

    Args:
        candidates: The codecs to choose from; one of them alone is always chosen.
        device: The device.
    """

    def __init__(self, candidates: tuple[str, ...], device: torch.device) -> None:
        self.candidates = candidates
        self._device = device
        self._chooser = CodecChooser(candidates)
        self._choices = _Choices()

    def codec_of(
        self, job: SaveJob, chunk: Chunk, raw: torch.Tensor, encoder: DeviceEncoder, stream: torch.cuda.Stream
    ) -> str:
        """Choose for the next chunk. Waits for the GPU only to try the codecs on it, once a group and then rarely.

        Args:
            job: The save.
            chunk: The chunk.
            raw: Its bytes, uint8[chunk.num_bytes] on the device, valid on `stream`.
            encoder: Tries codecs.
            stream: The encoder's.
        """
        if len(self.candidates) == 1:
            return self.candidates[0]
        if self._choices.job is not job:
            self._choices = _Choices(job)
        choices, group = self._choices, _group(job.table, chunk)
        if self._chooser.needs_trial(group):
            self._chooser.learn(group, self._try_all(chunk, raw, encoder, stream))
            choices.num_left = 0
        if choices.num_left == 0:
            self._look_at_store(job)
            self._choose(job)
            choices.num_left = _CHUNKS_BETWEEN_LOOKS
        choices.num_left -= 1
        codec = choices.codecs[chunk.index]
        choices.used.setdefault(group, Counter())[codec] += 1
        return codec

    def end_save(self, job: SaveJob) -> str | None:
        """Learn the store's speed from a save that has ended, and say what was chosen in it; None if nothing was."""
        if self._choices.job is not job:
            return None
        self._look_at_store(job)
        self._chooser.end_save()
        note = self._chooser.note(self._choices.used)
        self._choices = _Choices()
        return note

    def _choose(self, job: SaveJob) -> None:
        """Choose for all chunks of the job on this device: those behind are what they are, but weigh in."""
        devices = job.table.extent_devices
        chunks = [chunk for chunk in job.chunk_order if devices[chunk.first_extent] == self._device]
        codecs = self._chooser.choose([(_group(job.table, chunk), chunk.num_bytes) for chunk in chunks])
        self._choices.codecs = {chunk.index: codec for chunk, codec in zip(chunks, codecs, strict=True)}

    def _look_at_store(self, job: SaveJob) -> None:
        # A frame that goes through host memory is no faster in the store than it crosses the bus.
        spans = job.timeline.spans()
        copy_s = 0.0 if job.writes_from_device else busy_s(spans, "copy")
        self._chooser.learn_store(job.written_bytes, max(busy_s(spans, "write"), copy_s))

    def _try_all(
        self, chunk: Chunk, raw: torch.Tensor, encoder: DeviceEncoder, stream: torch.cuda.Stream
    ) -> dict[str, Trial]:
        """Encode a chunk with every candidate. The first go of each loads kernels, so the best of two counts."""
        found: dict[str, Trial] = {}
        stream.synchronize()
        for codec in self.candidates:
            for _ in range(_NUM_TRIALS):
                ticket = encoder.start(raw, chunk.word, codec)
                try:
                    header, _ = ticket.finish()
                finally:
                    ticket.release()
                speed = raw.numel() / max(ticket.encode_s, 1e-9)
                if codec not in found or speed > found[codec].bytes_per_s:
                    found[codec] = Trial(speed, raw.numel() / header.padded_bytes)
        return found


def _group(table: StateTable, chunk: Chunk) -> Group:
    extent = chunk.first_extent
    return str(table.extent_devices[extent]), chunk.word.name.lower(), table.extent_roles[extent]
