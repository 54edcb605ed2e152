"""How a GPU encodes a chunk by planes: what goes where between its kernels. Plain numbers: needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .device_plan import BUFFER_ALIGNMENT_BYTES, EncoderMemory, round_up
from .device_report import STATE_WORDS, WORD_BYTES
from .planes_body import STREAMS, stream_sizes
from .planes_codec import DEFAULT_ROUTES, parse_routes
from .rans_plan import MIN_RAW_BYTES, rans_encoder_memory
from .words import WordType

PLANES_ON_GPU = ("planes", "planes:mantissa=rans")
"""The routes that a GPU encodes: rans or nothing for each stream. Others are encoded on the CPU."""

VALUES_PER_BLOCK = 4096
"""Values of a thread block of the kernels that split and join; as in fields.cu."""

TILE_BYTES = 16384
"""Bytes of a body that a thread block puts together; as in streams.cu."""

_REPORT_BYTES = STATE_WORDS * WORD_BYTES


@dataclass(frozen=True, slots=True)
class StreamRoom:
    """One stream of a chunk on its way into a body.

    Attributes:
        num_bytes: Its length.
        place: Where it is, packed.
        report: Where rans reports on it.
        coded: Where rans puts its body; 0 where it is not given to rans.
    """

    num_bytes: int
    place: int
    report: int
    coded: int


@dataclass(frozen=True, slots=True)
class PlanesRoom:
    """The streams of one chunk in one buffer: addresses, or bytes where that begins at 0.

    Attributes:
        reports: Where the reports are, one behind the other.
        streams: By stream.
        end: Behind them.
    """

    reports: int
    streams: tuple[StreamRoom, StreamRoom, StreamRoom]
    end: int

    @classmethod
    def at(cls, begin: int, codec: str, word: WordType, raw_bytes: int) -> PlanesRoom:
        """Lay them out from a multiple of BUFFER_ALIGNMENT_BYTES on, for a chunk of a word type and length."""
        coded_streams = [_is_coded(codec, stream) for stream in STREAMS]
        end = begin + round_up(len(STREAMS) * _REPORT_BYTES, BUFFER_ALIGNMENT_BYTES)
        rooms = []
        for i, num_bytes in enumerate(stream_sizes(word, raw_bytes)):
            place, end = end, end + round_up(num_bytes, BUFFER_ALIGNMENT_BYTES)
            coded = 0
            if coded_streams[i] and num_bytes >= MIN_RAW_BYTES:
                coded, end = end, end + round_up(num_bytes, BUFFER_ALIGNMENT_BYTES)
            rooms.append(StreamRoom(num_bytes, place, begin + i * _REPORT_BYTES, coded))
        signs, exponents, mantissas = rooms
        return cls(begin, (signs, exponents, mantissas), end)


def planes_encoder_memory(codec: str, chunk_bytes: int) -> EncoderMemory:
    """Return what an encoder of one of PLANES_ON_GPU needs for chunks of up to `chunk_bytes`, of any word type."""
    most = max(PlanesRoom.at(0, codec, word, chunk_bytes).end for word in WordType)
    return replace(rans_encoder_memory(chunk_bytes), planes=most)


def _is_coded(codec: str, stream: str) -> bool:
    routes = parse_routes(codec) if ":" in codec else {}
    return routes.get(stream, DEFAULT_ROUTES[stream]) == "rans"
