"""The codec of each chunk of a save: the one that was asked for, or what measurements say (choice.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from tidegate.codec.device import DeviceEncoder
from tidegate.codec.registry import needs_gpu

from .choice import CodecChooser, Figures, Group, Trial
from .job import SaveJob
from .plan import Chunk, SavePlan
from .report import busy_s
from .table import StateTable

_CHUNKS_BETWEEN_LOOKS = 16
_NUM_FIRST_TRIALS = 2


@dataclass(slots=True)
class _Choice:
    """The codec of each chunk, and what that was chosen for.

    Attributes:
        plan: The plan of the save.
        figures: The chooser's, at that time.
        codecs: By chunk.
    """

    plan: SavePlan
    figures: Figures
    codecs: dict[int, str]


@dataclass(slots=True)
class _Save:
    """What happened in one save so far: chunks by group and codec, and whether a group was tried again."""

    job: SaveJob | None = None
    used: dict[Group, Counter[str]] = field(default_factory=dict)
    num_to_look: int = 0
    has_tried: bool = False


class AutoCodec:
    """Chooses for the chunks of one CUDA device, save after save. Used by the background thread.

    Args:
        candidates: The codecs to choose from; one of them alone is always chosen.
        device: The device.
    """

    def __init__(self, candidates: tuple[str, ...], device: torch.device) -> None:
        self.candidates = candidates
        self._device = device
        self._chooser = CodecChooser(candidates, bound=frozenset(filter(needs_gpu, candidates)))
        self._save = _Save()
        self._choice: _Choice | None = None

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
        if self._save.job is not job:
            self._save = _Save(job)
        save, group = self._save, group_of(job.table, chunk)
        if self._chooser.needs_trial(group, again=not save.has_tried):
            save.has_tried = True
            self._chooser.learn(group, self._try_all(group, chunk, raw, encoder, stream))
            save.num_to_look = 0
        if save.num_to_look == 0:
            self._look_at_store(job)
            save.num_to_look = _CHUNKS_BETWEEN_LOOKS
        save.num_to_look -= 1
        codec = self._chosen(job)[chunk.index]
        save.used.setdefault(group, Counter())[codec] += 1
        return codec

    def end_save(self, job: SaveJob) -> str | None:
        """Learn the store's speed from a save that has ended, and say what was chosen in it; None if nothing was."""
        if self._save.job is not job:
            return None
        self._look_at_store(job)
        self._chooser.end_save()
        note = self._chooser.note(self._save.used)
        self._save = _Save()
        return note

    def _chosen(self, job: SaveJob) -> dict[int, str]:
        """The choice for all chunks of the job on this device; made again only for another plan or other figures."""
        figures = self._chooser.figures
        if self._choice is None or self._choice.plan is not job.plan or not self._choice.figures.is_like(figures):
            devices = job.table.extent_devices
            chunks = [chunk for chunk in job.chunk_order if devices[chunk.first_extent] == self._device]
            codecs = self._chooser.choose([(group_of(job.table, chunk), chunk.num_bytes) for chunk in chunks])
            by_chunk = {chunk.index: codec for chunk, codec in zip(chunks, codecs, strict=True)}
            self._choice = _Choice(job.plan, figures, by_chunk)
        return self._choice.codecs

    def _look_at_store(self, job: SaveJob) -> None:
        # A frame that goes through host memory is no faster in the store than it crosses the bus.
        spans = job.timeline.spans()
        copy_s = 0.0 if job.writes_from_device else busy_s(spans, "copy")
        self._chooser.learn_store(job.written_bytes, max(busy_s(spans, "write"), copy_s))

    def _try_all(
        self, group: Group, chunk: Chunk, raw: torch.Tensor, encoder: DeviceEncoder, stream: torch.cuda.Stream
    ) -> dict[str, Trial]:
        """Encode a chunk with every candidate. The first go of all loads kernels, so the best of two counts then."""
        found: dict[str, Trial] = {}
        stream.synchronize()
        num_trials = 1 if self._chooser.knows(group) else _NUM_FIRST_TRIALS
        for codec in self.candidates:
            for _ in range(num_trials):
                ticket = encoder.start(raw, chunk.word, codec)
                try:
                    header, _ = ticket.finish()
                finally:
                    ticket.release()
                speed = raw.numel() / max(ticket.encode_s, 1e-9)
                if codec not in found or speed > found[codec].bytes_per_s:
                    found[codec] = Trial(speed, raw.numel() / header.padded_bytes)
        return found


def group_of(table: StateTable, chunk: Chunk) -> Group:
    """Return the group of a chunk."""
    extent = chunk.first_extent
    return str(table.extent_devices[extent]), chunk.word.name.lower(), table.extent_roles[extent]
