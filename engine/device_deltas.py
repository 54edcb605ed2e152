"""Residuals of chunks of CUDA tensors, made on their device, on the lane that encodes them.

One kernel reads a chunk and its base, writes what is left, and puts the chunk in the place of the base: the copy for
the next save costs no pass of its own. Sums and the digest of the chunk, which it takes on the way, come to the host
with the encoder's report. Nothing waits for the device, but to try the kinds of residual on one chunk of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.device import DeviceEncoder
from tidegate.codec.device_report import WORD_BYTES, digest_words, read_digest
from tidegate.codec.errors import CorruptionError
from tidegate.codec.kernels import indexed, kernels_of
from tidegate.codec.words import WordType

from .auto import group_of
from .choice import Group
from .delta import DeltaChunk
from .delta_save import RESIDUALS_BY_RANS, WORTH, DeltaSave
from .device_kept import DeviceKept
from .job import SaveJob
from .plan import Chunk
from .residual import KINDS, ONLY_KEEP, Kind, device_kind, residual_word

_SAVES_BETWEEN_TRIALS = 16
_NUM_SUMS = 2
_SUMS_BYTES = _NUM_SUMS * WORD_BYTES


@dataclass(frozen=True, slots=True)
class DeviceCoded:
    """What is to be encoded for a chunk: its own bytes or what is left of it, on the device, and by which codec."""

    octets: torch.Tensor
    word: WordType
    codec: str


@dataclass(slots=True)
class _Choice:
    """What was found to be smallest for a group, when, and on which chunk."""

    kind: Kind | None
    chunk: int
    age: int = 0


class DeltaSlot:
    """What one chunk on its way has for itself: room for what is left of it, and for sums and digest.

    Args:
        chunk_bytes: The longest chunk.
        device: A CUDA device, with the stream of the lane current in PyTorch.

    Attributes:
        last_use: Recorded once what was in `octets` has been read for the last time.
    """

    def __init__(self, chunk_bytes: int, device: torch.device) -> None:
        num_words = _NUM_SUMS + digest_words(chunk_bytes)
        self.octets = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
        self.last_use: torch.cuda.Event | None = None
        self._words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._host_words = torch.zeros(num_words, dtype=torch.int64, pin_memory=True)
        self.sums_at = self._words.data_ptr()
        self.digest_at = self.sums_at + _SUMS_BYTES
        self.host_at = self._host_words.data_ptr()
        self.host_words: NDArray[np.uint64] = self._host_words.numpy().view(np.uint64)
        self.num_bytes = num_words * WORD_BYTES

    @property
    def device_bytes(self) -> int:
        """Device memory that it holds."""
        return self.octets.numel() + self.num_bytes


@dataclass(slots=True)
class PendingChunk:
    """A chunk that is kept, and perhaps made a residual, once the device gets there."""

    kept: DeviceKept
    delta: DeltaSave
    chunk: Chunk
    slot: DeltaSlot
    kind: Kind | None
    base_sum: int

    def settle(self) -> None:
        """Note what the device found. Call it once, when the chunk has been encoded, before the slot is used again.

        Raises:
            CorruptionError: The base was no longer what it had been.
        """
        words, index = self.slot.host_words, self.chunk.index
        if self.kind is not None:
            if int(words[0]) != self.base_sum:
                self.kept.distrust()
                raise CorruptionError(
                    f"the copy of chunk {index} that was kept on {self.slot.octets.device} for differences has been "
                    "written to by something else; save again, and look for code that writes out of bounds"
                )
            raw_digest = read_digest(words[_NUM_SUMS:], self.chunk.num_bytes)
            self.delta.chosen[index] = DeltaChunk(self.kind, raw_digest)
        self.kept.give(self.delta.attempt, index, int(words[1]))


class DeviceDeltas:
    """Makes residuals on one CUDA device, for a SideStreamEncoder. Used by the background thread.

    Args:
        kept: The bases.
        device: The device.

    Raises:
        CodecUnavailableError: If CuPy cannot compile the kernels for this device.
    """

    def __init__(self, kept: DeviceKept, device: torch.device) -> None:
        self.kept = kept
        self._kernels = kernels_of(indexed(device))
        self._kernels.load_residual()
        self._choices: dict[tuple[Group, str], _Choice] = {}

    def may_take(self, job: SaveJob, base: str, chunk: Chunk) -> bool:
        """Whether a chunk of a save is better encoded here: there is a base or room for one, or no base is wanted.

        A chunk that has room and no base yet, as after a start, is stored in full once.
        """
        if self.kept.has(base, chunk.index) or self.kept.may_hold(chunk.index, chunk.num_bytes):
            return True
        group = group_of(job.table, chunk)
        found = [choice for (of_group, _), choice in self._choices.items() if of_group == group]
        return bool(found) and all(choice.kind is None for choice in found)

    def queue(
        self,
        job: SaveJob,
        delta: DeltaSave,
        chunk: Chunk,
        coded: DeviceCoded,
        slot: DeltaSlot,
        encoder: DeviceEncoder,
        stream: torch.cuda.Stream,
    ) -> tuple[DeviceCoded, PendingChunk | None]:
        """Queue what makes a residual of a chunk and keeps it. Waits for the device only to try the kinds on a group.

        Args:
            job: The save.
            delta: What it is a difference to, if anything.
            chunk: The chunk.
            coded: What would be encoded without a base: the chunk, at a multiple of 16, valid on `stream`.
            slot: Whose last use is over as far as `stream` sees.
            encoder: The lane's.
            stream: The lane's.

        Returns:
            What to encode, valid on `stream`; and what to settle when that is done, None where nothing is kept.
        """
        key = (group_of(job.table, chunk), coded.codec)
        has_base = delta.base is not None and self.kept.has(delta.base.attempt, chunk.index)
        if not self._is_wanted(key, chunk.index):
            self.kept.drop(chunk.index)
            return coded, None
        taken = self.kept.take(chunk.index, chunk.num_bytes)
        if taken is None:
            return coded, None
        copy, base_sum = taken
        kind = self._choose(key, chunk, coded, copy, slot, encoder, stream) if has_base else None
        raw, num_bytes, kernels, handle = coded.octets.data_ptr(), chunk.num_bytes, self._kernels, stream.cuda_stream
        addresses = (raw, copy.data_ptr(), slot.octets.data_ptr())
        with kernels.on(handle):
            kernels.driver.fill(slot.sums_at, 0, _SUMS_BYTES, handle)
            if kind is None:
                kernels.take_residual(ONLY_KEEP, chunk.word, *addresses, num_bytes, sums=slot.sums_at)
            else:
                number = device_kind(kind, chunk.word)
                kernels.take_and_digest(
                    number, chunk.word, *addresses, num_bytes, sums=slot.sums_at, words=slot.digest_at
                )
            kernels.copy_to_host(slot.host_at, slot.sums_at, slot.num_bytes)
        pending = PendingChunk(self.kept, delta, chunk, slot, kind, base_sum)
        if kind is None:
            return coded, pending
        return _left(kind, chunk, coded, slot), pending

    def end_save(self) -> None:
        """Count one more save since the last trials."""
        for choice in self._choices.values():
            choice.age += 1

    def _is_wanted(self, key: tuple[Group, str], chunk: int) -> bool:
        """Whether a chunk is worth keeping: of groups that gain nothing, only the one that is tried again."""
        choice = self._choices.get(key)
        return choice is None or choice.kind is not None or choice.chunk == chunk

    def _choose(
        self,
        key: tuple[Group, str],
        chunk: Chunk,
        coded: DeviceCoded,
        base: torch.Tensor,
        slot: DeltaSlot,
        encoder: DeviceEncoder,
        stream: torch.cuda.Stream,
    ) -> Kind | None:
        choice = self._choices.get(key)
        is_old = choice is not None and choice.age >= _SAVES_BETWEEN_TRIALS
        if choice is None or (is_old and choice.chunk == chunk.index):
            kind = smallest(self._sizes(chunk, coded, base, slot, encoder, stream))
            choice = self._choices[key] = _Choice(kind, chunk.index)
        return choice.kind

    def _sizes(
        self,
        chunk: Chunk,
        coded: DeviceCoded,
        base: torch.Tensor,
        slot: DeltaSlot,
        encoder: DeviceEncoder,
        stream: torch.cuda.Stream,
    ) -> dict[Kind | None, int]:
        """Encode a chunk as it is and as each kind of residual. Waits for the device."""
        sizes: dict[Kind | None, int] = {None: _coded_bytes(coded, encoder)}
        for kind in KINDS:
            if residual_codec_name(coded.codec) not in encoder.codecs or (kind == "difference" and is_octets(chunk)):
                continue
            with self._kernels.on(stream):
                self._kernels.take_residual(
                    device_kind(kind, chunk.word), chunk.word, coded.octets.data_ptr(), base.data_ptr(),
                    slot.octets.data_ptr(), chunk.num_bytes,
                )  # fmt: skip
            sizes[kind] = _coded_bytes(_left(kind, chunk, coded, slot), encoder)
        return sizes


def residual_codec_name(codec: str) -> str:
    """Return the codec for residuals where chunks have `codec`; see delta_save.residual_codec.

    Where `auto` stores chunks as they are, for the store is fast, differences are wanted all the same: they are coded.
    """
    return RESIDUALS_BY_RANS if codec in ("rans", "raw") else codec


def smallest(sizes: Mapping[Kind | None, int]) -> Kind | None:
    """Choose the kind of residual that is smallest; None, which has a size too, where that is not much larger."""
    best = min(sizes, key=lambda kind: sizes[kind])
    return best if sizes[best] < WORTH * sizes[None] else None


def is_octets(chunk: Chunk) -> bool:
    """Whether values of a chunk are single bytes, for which the host makes no difference of order."""
    return chunk.word.itemsize == 1


def _left(kind: Kind, chunk: Chunk, coded: DeviceCoded, slot: DeltaSlot) -> DeviceCoded:
    word = residual_word(kind, chunk.word)
    return DeviceCoded(slot.octets[: chunk.num_bytes], word, residual_codec_name(coded.codec))


def _coded_bytes(coded: DeviceCoded, encoder: DeviceEncoder) -> int:
    ticket = encoder.start(coded.octets, coded.word, coded.codec)
    try:
        header, _ = ticket.finish()
    finally:
        ticket.release()
    return header.body_bytes
