"""The codecs by name and by number."""

from __future__ import annotations

from .base import ANS_CODEC, BITCOMP_CODEC, CASCADED_CODEC, GDEFLATE_CODEC, LZ4_CODEC, Codec
from .deflate import DeflateCodec
from .errors import UnknownCodecError
from .gpu_only import GpuOnlyCodec
from .planes_codec import PlanesCodec, parse_routes
from .rans import RansCodec
from .raw import RawCodec
from .zstd import ZstdCodec

_CODECS: tuple[Codec, ...] = (
    RawCodec(),
    ZstdCodec(),
    GpuOnlyCodec("ans", ANS_CODEC),
    GpuOnlyCodec("gdeflate", GDEFLATE_CODEC),
    DeflateCodec(),
    GpuOnlyCodec("lz4", LZ4_CODEC),
    GpuOnlyCodec("bitcomp", BITCOMP_CODEC),
    GpuOnlyCodec("cascaded", CASCADED_CODEC),
    RansCodec(),
    PlanesCodec("planes", {}, lambda name: codec_named(name), lambda number, version: codec_numbered(number, version)),
)


def codec_names() -> tuple[str, ...]:
    """Return the names that `codec_named` knows."""
    return tuple(codec.name for codec in _CODECS)


def codec_named(name: str) -> Codec:
    """Return the codec that the caller calls `name`: one of `codec_names`, or "planes:" and routes (planes_codec.py).

    Raises:
        UnknownCodecError: If there is none.
    """
    for codec in _CODECS:
        if codec.name == name:
            return codec
    if name.startswith("planes:"):
        return PlanesCodec(name, parse_routes(name), codec_named, codec_numbered)
    raise UnknownCodecError(f"there is no codec {name!r}; choose one of {', '.join(map(repr, codec_names()))}")


def codec_numbered(number: int, version: int) -> Codec:
    """Return the codec that a frame header calls `number`, if it reads that version.

    Raises:
        UnknownCodecError: If there is none.
    """
    for codec in _CODECS:
        if (codec.number, codec.version) == (number, version):
            return codec
    raise UnknownCodecError(f"this build has no codec {number} of version {version}; upgrade tidegate")


def needs_gpu(name: str) -> bool:
    """Return whether a codec encodes and decodes on an NVIDIA GPU only.

    Raises:
        UnknownCodecError: If there is no such codec.
    """
    return isinstance(codec_named(name), GpuOnlyCodec)
