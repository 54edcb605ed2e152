"""Codecs are found by name and by number."""

from __future__ import annotations

import pytest

from tidegate.codec.base import CODEC_VERSIONS
from tidegate.codec.device_blocks import DEVICE_CODEC_NUMBERS
from tidegate.codec.errors import UnknownCodecError
from tidegate.codec.registry import codec_named, codec_names, codec_numbered, needs_gpu

NUMBERS = {
    "raw": 0,
    "zstd": 1,
    "ans": 2,
    "gdeflate": 3,
    "deflate": 4,
    "lz4": 5,
    "bitcomp": 6,
    "cascaded": 7,
    "rans": 8,
    "planes": 9,
}


def test_names_and_numbers_are_those_of_the_format() -> None:
    assert {name: codec_named(name).number for name in codec_names()} == NUMBERS
    assert {codec_named(name).number: codec_named(name).version for name in codec_names()} == dict(CODEC_VERSIONS)


def test_the_gpu_has_the_same_numbers() -> None:
    assert {name: codec_named(name).number for name in DEVICE_CODEC_NUMBERS} == dict(DEVICE_CODEC_NUMBERS)
    assert NUMBERS.keys() <= DEVICE_CODEC_NUMBERS.keys()


@pytest.mark.parametrize("name", NUMBERS)
def test_which_need_a_gpu(name: str) -> None:
    assert needs_gpu(name) == (name not in ("raw", "zstd", "deflate", "rans", "planes"))


@pytest.mark.parametrize("name", NUMBERS)
def test_one_object_each(name: str) -> None:
    codec = codec_named(name)
    assert codec.name == name
    assert codec_numbered(codec.number, codec.version) is codec


@pytest.mark.parametrize("name", ["", "auto", "ZSTD", "snappy"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(UnknownCodecError, match="'raw', 'zstd', 'ans'"):
        codec_named(name)


@pytest.mark.parametrize(("number", "version"), [(10, 1), (255, 1), (-1, 1), (1, 0), (1, 2)])
def test_unknown_number_or_version(number: int, version: int) -> None:
    with pytest.raises(UnknownCodecError, match=f"no codec {number} of version {version}; upgrade"):
        codec_numbered(number, version)
