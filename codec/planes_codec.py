"""The planes codec: signs, exponents and mantissas apart, each by a codec of its own. FRAME.md gives the bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from .base import CODEC_VERSIONS, PLANES_CODEC, RAW_CODEC, Codec, FrameHeader
from .errors import CorruptionError, UnknownCodecError
from .planes_body import ENTRY, START_BYTES, STREAMS, padded, read_entries, stream_sizes, stream_words
from .planes_fields import join_fields, split_fields
from .words import WordType

DEFAULT_ROUTES: Mapping[str, str] = {"sign": "rans", "exponent": "rans", "mantissa": "raw"}
ROUTES = ("raw", "zstd", "deflate", "rans")
"""What a stream may go to: codecs that decode on every machine."""

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
        if raw.size <= START_BYTES:
            return None
        streams = _rooms(word, raw.size)
        split_fields(_aligned(raw, word), word, streams)
        room = np.empty(max(stream.size for stream in streams), dtype=np.uint8)
        end = START_BYTES
        for i, (route, stream) in enumerate(zip(self._routes, streams, strict=True)):
            codec = self._codec_of(route)
            stream_word = stream_words(word)[i]
            coded_bytes = codec.encode_body(stream, stream_word, room[: stream.size]) if stream.size else None
            number, version = (RAW_CODEC, 1) if coded_bytes is None else (codec.number, codec.version)
            stored = stream if coded_bytes is None else room[:coded_bytes]
            padded_end = end + padded(stored.size)
            if padded_end >= raw.size:
                return None
            ENTRY.pack_into(out.data, i * ENTRY.size, number, version, stream_word, 0, 0, stored.size)
            out[end : end + stored.size] = stored
            out[end + stored.size : padded_end] = 0
            end = padded_end
        return end

    def decode_body(self, header: FrameHeader, body: _Octets, out: _Octets) -> None:
        """Check all entries and the padding, then decode."""
        streams = _rooms(header.word, header.raw_bytes)
        stored = read_entries(header, body)
        for part, name in zip(stored, STREAMS, strict=True):
            if body[part.end : padded(part.end)].any():
                raise CorruptionError(f"the padding behind the {name} stream is not zero")
        for part, stream in zip(stored, streams, strict=True):
            inner, own = part.inner, body[part.start : part.end]
            if inner.codec == RAW_CODEC:
                np.copyto(stream, own)
            else:
                self._codec_numbered(inner.codec, inner.codec_version).decode_body(inner, own, stream)
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


def _rooms(word: WordType, raw_bytes: int) -> tuple[_Octets, _Octets, _Octets]:
    signs, exponents, mantissas = (np.empty(size, dtype=np.uint8) for size in stream_sizes(word, raw_bytes))
    return signs, exponents, mantissas


def _aligned(octets: _Octets, word: WordType) -> _Octets:
    return octets if octets.ctypes.data % word.itemsize == 0 else octets.copy()
