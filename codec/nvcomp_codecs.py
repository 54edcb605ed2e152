"""The codecs that nvCOMP codes on a GPU, in one table: names, options, data types, block sizes. Needs no GPU.

The option structs are those of nvCOMP 6 (its headers nvcomp/ans.h, zstd.h, gdeflate.h, deflate.h, lz4.h, bitcomp.h and
cascaded.h): 64 bytes each, passed by value, zero where nothing is said here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .base import (
    ANS_CODEC,
    BITCOMP_CODEC,
    CASCADED_CODEC,
    DEFLATE_CODEC,
    GDEFLATE_CODEC,
    LZ4_CODEC,
    SPLIT_CODECS,
    ZSTD_CODEC,
)
from .blocked import MAX_BLOCK_BYTES
from .errors import UnknownCodecError
from .words import WordType

OPTION_BYTES = 64

# nvcompType_t
_UCHAR, _USHORT, _UINT, _ULONGLONG, _FLOAT8_E4M3, _FLOAT16, _FLOAT32, _FROM_STREAM = 1, 3, 5, 7, 9, 10, 11, 0xFF

_UNSIGNED = {word: {1: _UCHAR, 2: _USHORT, 4: _UINT, 8: _ULONGLONG}[word.itemsize] for word in WordType}
_UP_TO_4_BYTES = {word: min(kind, _UINT) for word, kind in _UNSIGNED.items()}
_OCTETS = dict.fromkeys(WordType, _UCHAR)
_ANS_TYPES = _OCTETS | {
    WordType.F8: _FLOAT8_E4M3,
    WordType.F16: _FLOAT16,
    WordType.BF16: _FLOAT16,
    WordType.F32: _FLOAT32,
}


@dataclass(frozen=True, slots=True)
class NvcompCodec:
    """One codec of nvCOMP.

    Attributes:
        name: What the caller calls it.
        number: What the frame header calls it.
        prefix: Its C functions are named nvcompBatched + prefix + ….
        types: nvcompType_t by word type; `compress_options` has a place for it or does not look at it.
        compress_options: `struct` format of the compression options, and their values; "type" stands for the word's.
        decompress_options: The same to decompress, for all types.
        block_bytes: Raw bytes of a block that suit it.
        max_block_bytes: The longest block that nvCOMP compresses.
        min_candidate_bytes: The last block of a plane is stored below this: there is nothing to gain, and nvCOMP has
            read past the end of inputs of a few bytes.
        batch_bytes: nvCOMP is given at most this many raw bytes at a time: bounds output slots and scratch.
        clears_outputs: nvCOMP leaves bytes of its output unwritten, or is not known not to: its slots are zeroed first.
        needs_same_major: Only the major version of nvCOMP that wrote a frame reads it.
    """

    name: str
    number: int
    prefix: str
    types: Mapping[WordType, int]
    compress_options: tuple[str, tuple[int | float | str, ...]]
    decompress_options: tuple[str, tuple[int, ...]]
    block_bytes: int
    max_block_bytes: int
    min_candidate_bytes: int
    batch_bytes: int
    clears_outputs: bool = True
    needs_same_major: bool = True

    @property
    def splits_planes(self) -> bool:
        """Whether its blocks are cut from byte planes."""
        return self.number in SPLIT_CODECS

    def options_to_compress(self, word: WordType) -> bytes:
        """Return the OPTION_BYTES of the option struct for blocks of a word type."""
        layout, values = self.compress_options
        filled = [self.types[word] if value == "type" else value for value in values]
        return struct.pack(layout, *filled).ljust(OPTION_BYTES, b"\0")

    def options_to_decompress(self) -> bytes:
        """Return the OPTION_BYTES of the option struct, for blocks of any type."""
        layout, values = self.decompress_options
        return struct.pack(layout, *values).ljust(OPTION_BYTES, b"\0")


_KIB, _MIB = 1 << 10, 1 << 20
_NONE: tuple[str, tuple[int, ...]] = ("<", ())

# Block sizes of zstd and ans were measured on an H200 with chunks of 64 MiB of bf16: a block is one unit of nvCOMP's
# parallelism, so larger blocks are slower (Zstd 64 KiB 3.6 GB/s, 16 KiB 10.9, 4 KiB 16; ANS 1 MiB 182, 256 KiB 266,
# 64 KiB 303) and hardly smaller (Zstd 1.432, 1.432, 1.423; ANS 1.512, 1.508, 1.485). The others have what nvCOMP's
# headers recommend. Zstd's batches bound its scratch to 700 MiB.
_CODECS = (
    NvcompCodec(
        name="zstd",
        number=ZSTD_CODEC,
        prefix="Zstd",
        types=_OCTETS,
        compress_options=_NONE,
        decompress_options=_NONE,
        block_bytes=16 * _KIB,
        max_block_bytes=MAX_BLOCK_BYTES,
        min_candidate_bytes=256,
        batch_bytes=32 * _MIB,
        clears_outputs=False,
        needs_same_major=False,
    ),
    NvcompCodec(
        name="ans",
        number=ANS_CODEC,
        prefix="ANS",
        types=_ANS_TYPES,
        # type (rANS), data_type, max_sub_chunk_count, states_per_lane, histogram_reduction_log2
        # One rANS state a lane costs 7 % of the speed and saves 128 bytes a sub-chunk: 0.4 % of a block of 256 KiB.
        compress_options=("<iiBBB", (0, "type", 0, 1, 0)),
        decompress_options=("<ii", (0, _FROM_STREAM)),  # backend, data_type
        block_bytes=256 * _KIB,
        max_block_bytes=MAX_BLOCK_BYTES,
        min_candidate_bytes=4096,
        batch_bytes=128 * _MIB,
    ),
    NvcompCodec(
        name="gdeflate",
        number=GDEFLATE_CODEC,
        prefix="Gdeflate",
        types=_OCTETS,
        compress_options=("<i", (0,)),  # algorithm: entropy coding only, which is what planes gain from
        decompress_options=_NONE,
        block_bytes=64 * _KIB,
        max_block_bytes=64 * _KIB,
        min_candidate_bytes=256,
        batch_bytes=64 * _MIB,
    ),
    NvcompCodec(
        name="deflate",
        number=DEFLATE_CODEC,
        prefix="Deflate",
        types=_OCTETS,
        compress_options=("<i", (0,)),  # as above
        decompress_options=_NONE,
        block_bytes=64 * _KIB,
        max_block_bytes=64 * _KIB,
        min_candidate_bytes=256,
        batch_bytes=64 * _MIB,
        needs_same_major=False,
    ),
    NvcompCodec(
        name="lz4",
        number=LZ4_CODEC,
        prefix="LZ4",
        types=_UP_TO_4_BYTES,
        compress_options=("<ii", ("type", 0)),  # data_type, bitshuffle_mode (none)
        decompress_options=_NONE,
        block_bytes=64 * _KIB,
        max_block_bytes=MAX_BLOCK_BYTES,
        min_candidate_bytes=256,
        batch_bytes=128 * _MIB,
    ),
    NvcompCodec(
        name="bitcomp",
        number=BITCOMP_CODEC,
        prefix="Bitcomp",
        types=_UNSIGNED,
        compress_options=("<iidi", (0, "type", 0.0, 0)),  # algorithm, data_type, delta, mode (lossless)
        decompress_options=_NONE,
        block_bytes=64 * _KIB,
        max_block_bytes=MAX_BLOCK_BYTES,
        min_candidate_bytes=4096,
        batch_bytes=128 * _MIB,
    ),
    NvcompCodec(
        name="cascaded",
        number=CASCADED_CODEC,
        prefix="Cascaded",
        types=_UNSIGNED,
        # data_type, mode (asymmetric), terminal codec (bit packing), coarse (none), fine (delta, RLE, FOR), level
        compress_options=("<iiQQQB", ("type", 1, 1, 0, 7, 3)),
        decompress_options=("<iiii", (0, 0, _FROM_STREAM, 0)),  # backend, padding, data_type, mode (unspecified)
        block_bytes=64 * _KIB,
        max_block_bytes=MAX_BLOCK_BYTES,
        min_candidate_bytes=4096,
        batch_bytes=128 * _MIB,
    ),
)

NVCOMP_CODECS: Mapping[str, NvcompCodec] = MappingProxyType({codec.name: codec for codec in _CODECS})
"""The codecs of nvCOMP by name. Each makes a blocked body."""

_BY_NUMBER = {codec.number: codec for codec in _CODECS}


def nvcomp_codec(codec: str) -> NvcompCodec:
    """Return a codec by name.

    Raises:
        UnknownCodecError: If it has no blocks or is none of the GPU's.
    """
    found = NVCOMP_CODECS.get(codec)
    if found is None:
        raise UnknownCodecError(f"the GPU has no blocked codec {codec!r}; it has {', '.join(NVCOMP_CODECS)}")
    return found


def nvcomp_codec_numbered(number: int) -> NvcompCodec:
    """Return a codec by its number in the frame header.

    Raises:
        UnknownCodecError: If nvCOMP has no such codec.
    """
    found = _BY_NUMBER.get(number)
    if found is None:
        raise UnknownCodecError(f"the GPU has no blocked codec {number}; it has {sorted(_BY_NUMBER)}")
    return found
