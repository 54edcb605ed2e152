"""The planes codec: signs, exponents and mantissas apart, each by a codec of its own. FRAME.md gives the bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from .base import CODEC_VERSIONS, PLANES_CODEC, RAW_CODEC, Codec, FrameHeader
from .errors import CorruptionError, TruncatedError, UnknownCodecError
from .planes_fields import FIELDS, join_fields, split_fields
from .words import WordType

STREAMS = ("sign", "exponent", "mantissa")
DEFAULT_ROUTES: Mapping[str, str] = {"sign": "rans", "exponent": "rans", "mantissa": "raw"}
ROUTES = ("raw", "zstd", "deflate", "rans")
"""What a stream may go to: codecs that decode on every machine."""

_ENTRY = struct.Struct("<BBBBIQ")
_ALIGNMENT_BYTES = 16
_START_BYTES = _ENTRY.size * len(STREAMS)

_Octets = NDArray[np.uint8]


class PlanesCodec:
    """Signs, exponents and mantissas by codecs of their own. See `tidegate.codec.base.Codec` for the methods.

    Args:
        name: What the caller calls it.
        routes: The codec of each of STREAMS that is not to have its default.
        codec_of: Finds a codec by its name.
        codec_numbered: Finds one by number and version.
    """

    number = PLANES_CODEC
    version = CODEC_VERSIONS[PLANES_CODEC]

    def __init__(
        self,
        name: str,
        routes: Mapping[str, str],
        codec_of: Callable[[str], Codec],
        codec_numbered: Callable[[int, int], Codec],
    ) -> None:
        self.name = name
        self._routes = [DEFAULT_ROUTES[stream] if stream not in routes else routes[stream] for stream in STREAMS]
        self._codec_of = codec_of
        self._codec_numbered = codec_numbered

    def encode_body(self, raw: _Octets, word: WordType, out: _Octets) -> int | None:
        """Write a body, or return None where it would be as long as the chunk or longer."""
        if raw.size <= _START_BYTES:
            return None
        streams = _rooms(word, raw.size)
        split_fields(_aligned(raw, word), word, streams)
        room = np.empty(max(stream.size for stream in streams), dtype=np.uint8)
        end = _START_BYTES
        for i, (route, stream) in enumerate(zip(self._routes, streams, strict=True)):
            codec = self._codec_of(route)
            stream_word = _words(word)[i]
            coded_bytes = codec.encode_body(stream, stream_word, room[: stream.size]) if stream.size else None
            number, version = (RAW_CODEC, 1) if coded_bytes is None else (codec.number, codec.version)
            stored = stream if coded_bytes is None else room[:coded_bytes]
            padded_end = end + _padded(stored.size)
            if padded_end >= raw.size:
                return None
            _ENTRY.pack_into(out.data, i * _ENTRY.size, number, version, stream_word, 0, 0, stored.size)
            out[end : end + stored.size] = stored
            out[end + stored.size : padded_end] = 0
            end = padded_end
        return end

    def decode_body(self, header: FrameHeader, body: _Octets, out: _Octets) -> None:
        """Check all entries and the padding, then decode."""
        streams = _rooms(header.word, header.raw_bytes)
        entries = _entries(header, body, [stream.size for stream in streams])
        at = _START_BYTES
        for (inner, codec_version), stream in zip(entries, streams, strict=True):
            stored = body[at : at + inner.body_bytes]
            if inner.codec == RAW_CODEC:
                np.copyto(stream, stored)
            else:
                self._codec_numbered(inner.codec, codec_version).decode_body(inner, stored, stream)
            at += _padded(inner.body_bytes)
        chunk = _aligned(out, header.word)
        if not join_fields(streams, header.word, chunk):
            raise CorruptionError("a field of a value has more bits than it can have, which no writer makes")
        if chunk is not out:
            np.copyto(out, chunk)


def parse_routes(name: str) -> dict[str, str]:
    """Read the routes in a name such as "planes:exponent=rans,mantissa=raw".

    Raises:
        UnknownCodecError: A stream or a codec is none that the planes codec has.
    """
    routes: dict[str, str] = {}
    for item in name.partition(":")[2].split(","):
        stream, _, codec = item.partition("=")
        if stream not in STREAMS or codec not in ROUTES or stream in routes:
            raise UnknownCodecError(
                f"codec {name!r} cannot be: {item!r} is not one of {', '.join(STREAMS)}, then '=', then one of "
                f"{', '.join(ROUTES)}, and each of them once"
            )
        routes[stream] = codec
    return routes


def _words(word: WordType) -> tuple[WordType, WordType, WordType]:
    return WordType.U8, WordType.U16 if FIELDS[word].exponent_bytes == 2 else WordType.U8, WordType.U8


def _rooms(word: WordType, raw_bytes: int) -> tuple[_Octets, _Octets, _Octets]:
    sizes = FIELDS[word].stream_bytes(raw_bytes // word.itemsize)
    signs, exponents, mantissas = (np.empty(size, dtype=np.uint8) for size in sizes)
    return signs, exponents, mantissas


def _entries(header: FrameHeader, body: _Octets, sizes: list[int]) -> list[tuple[FrameHeader, int]]:
    """Read and check the start of a body: a header for each stream's own body."""
    if body.size < _START_BYTES:
        raise TruncatedError(f"the body ends after {body.size} bytes, inside its {_START_BYTES}-byte start")
    found, end = [], _START_BYTES
    for i, raw_bytes in enumerate(sizes):
        codec, version, word, zero, parameter, stored_bytes = _ENTRY.unpack_from(body.data, i * _ENTRY.size)
        is_raw = codec == RAW_CODEC
        if zero or parameter or word != _words(header.word)[i]:
            raise CorruptionError(f"the {STREAMS[i]} stream has bits set where this version has others")
        if (stored_bytes != raw_bytes) if is_raw else (stored_bytes >= raw_bytes):
            raise CorruptionError(
                f"the {STREAMS[i]} stream has {stored_bytes} stored bytes for {raw_bytes}, which no writer makes"
            )
        if codec == PLANES_CODEC or CODEC_VERSIONS.get(codec) != version:
            raise UnknownCodecError(f"the {STREAMS[i]} stream is of codec {codec} version {version}; upgrade tidegate")
        padded_end = end + _padded(stored_bytes)
        if body[end + stored_bytes : padded_end].any():
            raise CorruptionError(f"the padding behind the {STREAMS[i]} stream is not zero")
        found.append((FrameHeader(codec, version, WordType(word), raw_bytes, stored_bytes, 0, 0), version))
        end = padded_end
    if end != header.body_bytes:
        raise CorruptionError(f"the streams fill {end} bytes and the header promises {header.body_bytes}")
    return found


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _aligned(octets: _Octets, word: WordType) -> _Octets:
    return octets if octets.ctypes.data % word.itemsize == 0 else octets.copy()
