"""One save as a difference to an earlier checkpoint: chunk by chunk what is smaller, by what a sample says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.base import RANS_CODEC, Codec
from tidegate.codec.digest import digest
from tidegate.codec.errors import CodecError
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType
from tidegate.storage.errors import StorageError

from .buffers import BufferPool
from .commit import CommitRecord
from .delta import DeltaChunk, DeltaPart
from .frames import HostDecoder
from .kept import KeptChunks
from .load_plan import ReadItem
from .plan import Chunk
from .residual import KINDS, Kind, residual_word, take_residual

_NUM_SAMPLES = 16
_SAMPLE_PART = 16
_LEAST_SAMPLE_BYTES = 16 << 10
RESIDUALS_BY_RANS = "planes:mantissa=rans"
WORTH = 0.98
"""A difference costs a load more than the chunk itself does, so it must be smaller by some hundredths."""


@dataclass(frozen=True, slots=True)
class Coded:
    """What is to be encoded for a chunk: its own bytes, or what is left of it."""

    octets: torch.Tensor
    word: WordType
    codec: Codec


@dataclass(slots=True)
class DeltaSave:
    """The chunks of one save. Several threads encode them.

    Attributes:
        attempt: The attempt that is being written.
        kept: The last checkpoint's chunks, and then those of this one.
        pool: Room for residuals and for what is read again: at most three chunks at a time a thread.
        base: The checkpoint that this one may be a difference to; None: it is full.
        items: Its frames, by chunk, as far as they may have to be read again.
        decoder: Reads them.
        notes: What could not be read.
        chosen: The chunks whose frames hold residuals.
    """

    attempt: str
    kept: KeptChunks
    pool: BufferPool
    base: CommitRecord | None = None
    items: Mapping[int, ReadItem] = field(default_factory=dict)
    decoder: HostDecoder | None = None
    notes: list[str] = field(default_factory=list)
    chosen: dict[int, DeltaChunk] = field(default_factory=dict)

    @property
    def part(self) -> DeltaPart | None:
        """What the manifest says of it; None for a checkpoint that turned out full."""
        return DeltaPart(self.base, self.chosen) if self.base is not None and self.chosen else None

    @property
    def bases(self) -> tuple[tuple[int, str], ...]:
        """What the COMMIT record says of it."""
        if self.base is None or not self.chosen:
            return ()
        return ((self.base.step, self.base.attempt), *self.base.bases)

    @contextmanager
    def coded(self, chunk: Chunk, raw: torch.Tensor, codec: Codec) -> Iterator[Coded]:
        """Lend what is to be encoded for a chunk; afterwards, keep the chunk. Blocks.

        Args:
            chunk: The chunk.
            raw: Its bytes, uint8[num_bytes] on the CPU.
            codec: What will encode it.
        """
        raw_digest = digest(raw.numpy())
        with self._base_of(chunk) as base:
            kind = None if base is None else _choose(chunk.word, raw.numpy(), base.numpy(), codec)
            if base is None or kind is None:
                yield Coded(raw, chunk.word, codec)
            else:
                with self.pool.lent(chunk.num_bytes) as room:
                    take_residual(kind, chunk.word, raw.numpy(), base.numpy(), room.numpy())
                    yield Coded(room, residual_word(kind, chunk.word), residual_codec(codec))
                self.chosen[chunk.index] = DeltaChunk(kind, raw_digest)
        self.kept.put(self.attempt, chunk.index, raw, raw_digest)

    @contextmanager
    def _base_of(self, chunk: Chunk) -> Iterator[torch.Tensor | None]:
        """Lend the chunk of the base; None where there is none, or it cannot be read."""
        if self.base is None:
            yield None
            return
        copy = self.kept.get(self.base.attempt, chunk.index)
        item = self.items.get(chunk.index)
        if copy is not None or item is None or self.decoder is None:
            yield copy
            return
        with self.pool.lent(chunk.num_bytes) as room:
            yield room if self._was_read(self.decoder, item, room) else None

    def _was_read(self, decoder: HostDecoder, item: ReadItem, out: torch.Tensor) -> bool:
        try:
            decoder.decode_into(item, out)
        except (CodecError, StorageError) as exc:
            self.notes.append(f"chunk {item.chunk.index} is stored in full: that of the base cannot be read ({exc})")
            return False
        return True


def residual_codec(codec: Codec) -> Codec:
    """Return the codec for residuals where chunks have `codec`.

    rans codes exponents and leaves mantissas alone. What is left of a chunk has zeros at the top of its mantissas too,
    so there its planes go to rans one by one.
    """
    return codec_named(RESIDUALS_BY_RANS) if codec.number == RANS_CODEC else codec


def _choose(word: WordType, raw: NDArray[np.uint8], base: NDArray[np.uint8], codec: Codec) -> Kind | None:
    """Choose the kind of residual whose sample is the smallest; None where the chunk's own is not much larger."""
    picks = _sample(raw.size)
    new, old = (np.concatenate([array[pick] for pick in picks]) for array in (raw, base))
    least, chosen = WORTH * _coded_bytes(new, word, codec), None
    left = np.empty_like(new)
    for kind in KINDS:
        if kind == "difference" and word.itemsize == 1:
            continue
        take_residual(kind, word, new, old, left)
        size = _coded_bytes(left, residual_word(kind, word), residual_codec(codec))
        if size < least:
            least, chosen = size, kind
    return chosen


def _sample(num_bytes: int) -> list[slice]:
    """Return pieces, evenly spread, of a sixteenth of the bytes; all where they are few. Whole 8-byte words."""
    size = num_bytes // (_NUM_SAMPLES * _SAMPLE_PART) // 4096 * 4096
    if size * _NUM_SAMPLES < _LEAST_SAMPLE_BYTES * 4:
        return [slice(0, num_bytes)]
    step = num_bytes // _NUM_SAMPLES // 8 * 8
    return [slice(i * step, i * step + size) for i in range(_NUM_SAMPLES)]


def _coded_bytes(octets: NDArray[np.uint8], word: WordType, codec: Codec) -> float:
    out = np.empty_like(octets)
    found = codec.encode_body(octets, word, out)
    return octets.size if found is None else found
