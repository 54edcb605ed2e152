"""The codecs of the CPU pass the contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.codec.rans_chunks import use_coder
from tests.contract.codec_contract import CONTENTS, CodecContract, small_chunk, tensor_of
from tidegate.codec.base import FrameHeader, frame_bound_bytes, unpack_header
from tidegate.codec.digest import digest
from tidegate.codec.errors import CodecUnavailableError
from tidegate.codec.frame import decode_frame, encode_frame
from tidegate.codec.registry import codec_named, codec_names, needs_gpu
from tidegate.codec.words import WordType

GPU_ONLY = [name for name in codec_names() if needs_gpu(name)]


class TestRaw(CodecContract):
    codec_name = "raw"


class TestZstd(CodecContract):
    codec_name = "zstd"

    @pytest.mark.parametrize(
        ("word", "content", "ratio"),
        [
            (WordType.BF16, "normal-floats", 1.4),
            (WordType.F32, "normal-floats", 1.18),
            (WordType.F16, "normal-floats", 1.15),
            (WordType.F32, "zero-runs", 1.5),
            (WordType.F64, "zeros", 500),
            (WordType.U64, "all-equal", 500),
        ],
    )
    def test_ratio(self, word: WordType, content: str, ratio: float) -> None:
        raw = tensor_of(CONTENTS[content](word, (1 << 20) // word.itemsize, np.random.default_rng(5)))
        assert raw.numel() / unpack_header(self.encode(raw, word).numpy()).frame_bytes > ratio


class TestDeflate(CodecContract):
    codec_name = "deflate"

    @pytest.mark.parametrize(
        ("word", "content", "ratio"),
        [
            (WordType.BF16, "normal-floats", 1.4),
            (WordType.F32, "normal-floats", 1.18),
            (WordType.F64, "zeros", 500),
            (WordType.U64, "all-equal", 500),
        ],
    )
    def test_ratio(self, word: WordType, content: str, ratio: float) -> None:
        raw = tensor_of(CONTENTS[content](word, (1 << 20) // word.itemsize, np.random.default_rng(5)))
        assert raw.numel() / unpack_header(self.encode(raw, word).numpy()).frame_bytes > ratio


class TestRansInNumpy(CodecContract):
    codec_name = "rans"

    @pytest.fixture(autouse=True)
    def coder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_coder("numpy", monkeypatch)

    @pytest.mark.parametrize(
        ("word", "content", "ratio"),
        [
            (WordType.BF16, "normal-floats", 1.55),
            (WordType.F32, "normal-floats", 1.21),
            (WordType.F16, "normal-floats", 1.2),
            (WordType.F32, "zero-runs", 1.2),
            (WordType.F64, "zeros", 500),
            (WordType.U64, "all-equal", 500),
        ],
    )
    def test_ratio(self, word: WordType, content: str, ratio: float) -> None:
        raw = tensor_of(CONTENTS[content](word, (1 << 20) // word.itemsize, np.random.default_rng(5)))
        assert raw.numel() / unpack_header(self.encode(raw, word).numpy()).frame_bytes > ratio


class TestPlanes(CodecContract):
    codec_name = "planes"

    @pytest.mark.parametrize(
        ("word", "content", "ratio"),
        [
            (WordType.BF16, "normal-floats", 1.5),
            (WordType.F32, "normal-floats", 1.19),
            (WordType.F16, "normal-floats", 1.19),
            (WordType.F32, "zero-runs", 1.19),
            (WordType.F64, "normal-floats", 1.1),
        ],
    )
    def test_ratio(self, word: WordType, content: str, ratio: float) -> None:
        raw = tensor_of(CONTENTS[content](word, (1 << 20) // word.itemsize, np.random.default_rng(5)))
        assert raw.numel() / unpack_header(self.encode(raw, word).numpy()).frame_bytes > ratio


class TestPlanesByZstd(CodecContract):
    codec_name = "planes:sign=zstd,exponent=zstd,mantissa=zstd"


class TestPlanesByRans(CodecContract):
    codec_name = "planes:mantissa=rans"


class TestRansInNumba(TestRansInNumpy):
    @pytest.fixture(autouse=True)
    def coder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_coder("numba", monkeypatch)


@pytest.mark.parametrize("name", GPU_ONLY)
def test_a_gpu_codec_says_what_it_needs(name: str) -> None:
    raw, word = small_chunk()
    out = torch.empty(frame_bound_bytes(raw.numel()), dtype=torch.uint8)
    message = rf"codec '{name}' .*NVIDIA GPU with nvCOMP.*tidegate\[cu1[23]\].*codec='zstd'"
    with pytest.raises(CodecUnavailableError, match=message):
        encode_frame(codec_named(name), raw, word, out)


@pytest.mark.parametrize("name", GPU_ONLY)
def test_its_frame_says_where_it_can_be_read(name: str) -> None:
    body = np.zeros(512, dtype=np.uint8)
    header = FrameHeader(codec_named(name).number, 1, WordType.F32, 1024, body.size, 0, digest(body), parameter=6)
    frame = torch.from_numpy(np.concatenate([np.frombuffer(header.pack(), dtype=np.uint8), body]))
    message = rf"codec '{name}' of nvCOMP 6.*tidegate\[cu1[23]\].*save it again with codec='zstd'"
    with pytest.raises(CodecUnavailableError, match=message):
        decode_frame(frame, torch.empty(1024, dtype=torch.uint8))
