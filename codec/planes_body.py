"""The start of a body of planes: which streams it has, by which codecs, and where. FRAME.md gives the bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import CODEC_VERSIONS, PLANES_CODEC, RAW_CODEC, FrameHeader
from .errors import CorruptionError, TruncatedError, UnknownCodecError
from .planes_fields import FIELDS
from .words import WordType

STREAMS = ("sign", "exponent", "mantissa")
ENTRY = struct.Struct("<BBBBIQ")
START_BYTES = ENTRY.size * len(STREAMS)
STREAM_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class StreamBody:
    """Where in a body one stream's own body is.

    Attributes:
        inner: What a header of it would say; without digests.
        start: Its first byte.
    """

    inner: FrameHeader
    start: int

    @property
    def end(self) -> int:
        """Behind its last byte; zeros follow up to the next multiple of 16."""
        return self.start + self.inner.body_bytes


def stream_words(word: WordType) -> tuple[WordType, WordType, WordType]:
    """Return the word types of the three streams of a word."""
    return WordType.U8, WordType.U16 if FIELDS[word].exponent_bytes == 2 else WordType.U8, WordType.U8


def stream_sizes(word: WordType, raw_bytes: int) -> tuple[int, int, int]:
    """Return the bytes of the three streams of a chunk."""
    return FIELDS[word].stream_bytes(raw_bytes // word.itemsize)


def read_entries(header: FrameHeader, start: NDArray[np.uint8]) -> tuple[StreamBody, StreamBody, StreamBody]:
    """Read the entries and check that the streams fill the body. The padding behind each is still to be checked.

    Args:
        header: The frame's header; its raw_bytes must have been checked against what the caller expects.
        start: uint8[START_BYTES or more], the start of the body.

    Raises:
        CorruptionError: No writer makes such a body.
        UnknownCodecError: A stream is of a codec that this build does not know.
    """
    if start.size < START_BYTES:
        raise TruncatedError(f"the body ends after {start.size} bytes, inside its {START_BYTES}-byte start")
    found, at = [], START_BYTES
    words, sizes = stream_words(header.word), stream_sizes(header.word, header.raw_bytes)
    for i, (stream_word, raw_bytes) in enumerate(zip(words, sizes, strict=True)):
        codec, version, word, zero, parameter, stored_bytes = ENTRY.unpack_from(start.data, i * ENTRY.size)
        is_raw = codec == RAW_CODEC
        if zero or parameter or word != stream_word:
            raise CorruptionError(f"the {STREAMS[i]} stream has bits set where this version has others")
        if (stored_bytes != raw_bytes) if is_raw else (stored_bytes >= raw_bytes):
            raise CorruptionError(
                f"the {STREAMS[i]} stream has {stored_bytes} stored bytes for {raw_bytes}, which no writer makes"
            )
        if codec == PLANES_CODEC or CODEC_VERSIONS.get(codec) != version:
            raise UnknownCodecError(f"the {STREAMS[i]} stream is of codec {codec} version {version}; upgrade tidegate")
        inner = FrameHeader(codec, version, stream_word, raw_bytes, stored_bytes, 0, 0)
        found.append(StreamBody(inner, at))
        at += padded(stored_bytes)
    if at != header.body_bytes:
        raise CorruptionError(f"the streams fill {at} bytes and the header promises {header.body_bytes}")
    signs, exponents, mantissas = found
    return signs, exponents, mantissas


def padded(num_bytes: int) -> int:
    """Round up to whole STREAM_ALIGNMENT_BYTES."""
    return -(-num_bytes // STREAM_ALIGNMENT_BYTES) * STREAM_ALIGNMENT_BYTES
