"""Chunk in, frame out, and back. Knows dtypes and devices; no files, no ranks. FRAME.md gives the bytes."""

from .base import Codec, FrameHeader, frame_bound_bytes, unpack_header
from .errors import (
    CodecError,
    CodecUnavailableError,
    CorruptionError,
    TruncatedError,
    UnknownCodecError,
    UnsupportedDtypeError,
)
from .frame import decode_frame, encode_frame
from .registry import codec_named, codec_names, codec_numbered
from .words import WordType, word_of

__all__ = [
    "Codec",
    "CodecError",
    "CodecUnavailableError",
    "CorruptionError",
    "FrameHeader",
    "TruncatedError",
    "UnknownCodecError",
    "UnsupportedDtypeError",
    "WordType",
    "codec_named",
    "codec_names",
    "codec_numbered",
    "decode_frame",
    "encode_frame",
    "frame_bound_bytes",
    "unpack_header",
    "word_of",
]
