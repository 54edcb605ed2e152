"""The frame header, and the protocol that every codec on the CPU follows. FRAME.md gives the bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from .digest import octets_of
from .errors import CorruptionError, TruncatedError, UnknownCodecError
from .words import WordType

HEADER_BYTES = 64
FRAME_ALIGNMENT_BYTES = 4096
"""A frame is padded with zero bytes to a multiple of this."""

RAW_CODEC = 0
ZSTD_CODEC = 1
ANS_CODEC = 2
GDEFLATE_CODEC = 3
DEFLATE_CODEC = 4
LZ4_CODEC = 5
BITCOMP_CODEC = 6
CASCADED_CODEC = 7
RANS_CODEC = 8
PLANES_CODEC = 9
CODEC_VERSIONS: Mapping[int, int] = MappingProxyType(dict.fromkeys(range(PLANES_CODEC + 1), 1))
"""The version that this build writes and reads, by codec number."""

SPLIT_CODECS = frozenset((ZSTD_CODEC, GDEFLATE_CODEC, DEFLATE_CODEC))
"""The codecs whose blocks are cut from byte planes; those of the other blocked codecs are cut from the chunk."""

_CODECS_WITH_PARAMETER = frozenset(range(ANS_CODEC, CASCADED_CODEC + 1))

_MAGIC = b"TGFR"
_FORMAT_VERSION = 1
_FIELDS = struct.Struct("<4sBBBBQQQQI12s")
_SEAL = struct.Struct("<Q")
_RESERVED = bytes(12)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What the first 64 bytes of a frame say.

    Attributes:
        codec: Number of the codec that wrote the body.
        codec_version: Version of that codec's body layout.
        word: What one value of the chunk is.
        raw_bytes: Length of the chunk.
        body_bytes: Length of the body; equal to raw_bytes for the raw codec, less for all others.
        raw_digest: Digest of the chunk.
        body_digest: Digest of the body.
        parameter: Major version of the nvCOMP that wrote the body; 0 for raw, zstd, rans, and deflate by zlib.
    """

    codec: int
    codec_version: int
    word: WordType
    raw_bytes: int
    body_bytes: int
    raw_digest: int
    body_digest: int
    parameter: int = 0

    @property
    def frame_bytes(self) -> int:
        """Length of header and body."""
        return HEADER_BYTES + self.body_bytes

    @property
    def padded_bytes(self) -> int:
        """Length of header, body and padding: what the frame takes in an object."""
        return _round_up(self.frame_bytes, FRAME_ALIGNMENT_BYTES)

    def pack(self) -> bytes:
        """Return the 64 bytes of the header, sealed with their own hash."""
        fields = _FIELDS.pack(
            _MAGIC,
            _FORMAT_VERSION,
            self.codec,
            self.codec_version,
            self.word,
            self.raw_bytes,
            self.body_bytes,
            self.raw_digest,
            self.body_digest,
            self.parameter,
            _RESERVED,
        )
        return fields + _SEAL.pack(xxhash.xxh3_64_intdigest(fields))


class Codec(Protocol):
    """Turns a chunk into a frame body and back, in host memory. One object serves all threads at once."""

    @property
    def name(self) -> str:
        """What the caller calls it."""
        ...

    @property
    def number(self) -> int:
        """What the frame header calls it."""
        ...

    @property
    def version(self) -> int:
        """Version of the body layout that it writes and reads."""
        ...

    def encode_body(self, raw: NDArray[np.uint8], word: WordType, out: NDArray[np.uint8]) -> int | None:
        """Write the body of a chunk. Blocks; the heavy part runs without the GIL.

        Args:
            raw: uint8[raw_bytes], contiguous, a whole number of values. It must not change meanwhile.
            word: What one value is.
            out: uint8[raw_bytes], contiguous, not overlapping `raw`. What lies behind the body afterwards is undefined.

        Returns:
            The body's length, less than raw_bytes; or None where it would not be, so that the caller stores the chunk.

        Raises:
            CodecUnavailableError: If the codec cannot run on this machine.
        """
        ...

    def decode_body(self, header: FrameHeader, body: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Restore a chunk from a body whose digest the caller has checked. Blocks; the heavy part runs without the GIL.

        Args:
            header: The frame's header.
            body: uint8[header.body_bytes], contiguous.
            out: uint8[header.raw_bytes], contiguous, not overlapping `body`; undefined after an error.

        Raises:
            CorruptionError: If the body does not hold exactly the chunk that the header describes.
            CodecUnavailableError: If the codec cannot run on this machine.
        """
        ...


def unpack_header(buffer: bytes | bytearray | memoryview | NDArray[np.uint8]) -> FrameHeader:
    """Read and check the header at the start of a frame.

    Args:
        buffer: Contiguous bytes; those behind the first 64 are not looked at.

    Raises:
        TruncatedError: If there are fewer than 64 bytes.
        CorruptionError: If the header's own hash or a field does not hold.
        UnknownCodecError: If format, codec, codec version or word type are of another build.
    """
    octets = octets_of(buffer)[:HEADER_BYTES]
    if len(octets) < HEADER_BYTES:
        raise TruncatedError(
            f"the frame ends after {len(octets)} bytes, inside its {HEADER_BYTES}-byte header; read the whole frame, "
            "or load an earlier checkpoint if this is all there is"
        )
    if octets[:4] != _MAGIC:
        raise CorruptionError(
            f"the frame starts with {bytes(octets[:4])!r} instead of {_MAGIC!r}, so it is none or is damaged; "
            "load an earlier checkpoint"
        )
    (seal,) = _SEAL.unpack_from(octets, _FIELDS.size)
    if xxhash.xxh3_64_intdigest(octets[: _FIELDS.size]) != seal:
        raise CorruptionError("the frame header does not match its own checksum; load an earlier checkpoint")
    _, format_version, codec, codec_version, word, *numbers, reserved = _FIELDS.unpack_from(octets)
    _check_known(format_version, codec, codec_version, word)
    header = FrameHeader(codec, codec_version, WordType(word), *numbers)
    _check_fields(header, reserved)
    return header


def frame_bound_bytes(raw_bytes: int) -> int:
    """Return the most bytes, padding included, that the frame of a chunk of `raw_bytes` can take."""
    return _round_up(HEADER_BYTES + raw_bytes, FRAME_ALIGNMENT_BYTES)


def _check_known(format_version: int, codec: int, codec_version: int, word: int) -> None:
    if format_version != _FORMAT_VERSION:
        raise UnknownCodecError(
            f"the frame has format version {format_version} and this build reads {_FORMAT_VERSION}; upgrade tidegate"
        )
    if CODEC_VERSIONS.get(codec) != codec_version:
        known = ", ".join(f"{number} version {version}" for number, version in CODEC_VERSIONS.items())
        raise UnknownCodecError(
            f"the frame was written by codec {codec} version {codec_version} and this build knows {known}; "
            "upgrade tidegate"
        )
    if word not in WordType.__members__.values():
        raise UnknownCodecError(f"the frame holds word type {word}, which this build does not know; upgrade tidegate")


def _check_fields(header: FrameHeader, reserved: bytes) -> None:
    word, raw_bytes, body_bytes = header.word, header.raw_bytes, header.body_bytes
    if raw_bytes % word.itemsize:
        raise CorruptionError(f"the frame header promises {raw_bytes} bytes, no whole number of {word.name} values")
    if (body_bytes != raw_bytes) if header.codec == RAW_CODEC else (body_bytes >= raw_bytes):
        raise CorruptionError(
            f"the frame header promises a body of {body_bytes} bytes for {raw_bytes} raw bytes, "
            f"which codec {header.codec} never writes"
        )
    if reserved != _RESERVED or (header.parameter and header.codec not in _CODECS_WITH_PARAMETER):
        raise CorruptionError("the frame header has bits set where this version has zeros")


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
