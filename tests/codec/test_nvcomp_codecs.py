"""The table of nvCOMP's codecs: option structs as its headers lay them out, blocks that fit the words."""

from __future__ import annotations

import pytest

from tidegate.codec.base import RAW_CODEC, SPLIT_CODECS
from tidegate.codec.blocked import MAX_BLOCK_BYTES, MIN_BLOCK_BYTES
from tidegate.codec.errors import UnknownCodecError
from tidegate.codec.nvcomp_codecs import NVCOMP_CODECS, OPTION_BYTES, nvcomp_codec, nvcomp_codec_numbered
from tidegate.codec.words import WordType

# What a C compiler makes of nvCOMP 6.0's structs with these fields set, for 16-bit words; zeros follow.
COMPRESS = {
    "zstd": "",
    "ans": "00000000 0a000000 000100",
    "gdeflate": "00000000",
    "deflate": "00000000",
    "lz4": "03000000 00000000",
    "bitcomp": "00000000 03000000 0000000000000000 00000000",
    "cascaded": "03000000 01000000 0100000000000000 0000000000000000 0700000000000000 03",
}
DECOMPRESS = dict.fromkeys(COMPRESS, "") | {"ans": "00000000 ff000000", "cascaded": "00000000 00000000 ff000000"}


@pytest.mark.parametrize("name", NVCOMP_CODECS)
def test_options(name: str) -> None:
    codec = nvcomp_codec(name)
    for options, expected in (
        (codec.options_to_compress(WordType.BF16), COMPRESS[name]),
        (codec.options_to_decompress(), DECOMPRESS[name]),
    ):
        assert options.hex() == bytes.fromhex(expected).ljust(OPTION_BYTES, b"\0").hex()


@pytest.mark.parametrize("name", NVCOMP_CODECS)
def test_blocks_are_ones_that_the_format_has(name: str) -> None:
    codec = nvcomp_codec(name)
    assert codec.block_bytes & (codec.block_bytes - 1) == 0
    assert MIN_BLOCK_BYTES <= codec.block_bytes <= codec.max_block_bytes <= MAX_BLOCK_BYTES
    assert codec.batch_bytes % codec.block_bytes == 0
    assert nvcomp_codec_numbered(codec.number) is codec
    assert codec.splits_planes == (name in ("zstd", "gdeflate", "deflate")) == (codec.number in SPLIT_CODECS)
    for word in WordType:
        width = {1: 1, 3: 2, 5: 4, 7: 8, 9: 1, 10: 2, 11: 4}[codec.types[word]]
        assert width == 1 or word.itemsize % width == 0


def test_others_are_refused() -> None:
    with pytest.raises(UnknownCodecError, match="no blocked codec 'raw'; it has zstd, ans"):
        nvcomp_codec("raw")
    with pytest.raises(UnknownCodecError, match="no blocked codec 0"):
        nvcomp_codec_numbered(RAW_CODEC)
