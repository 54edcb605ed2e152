"""nvCOMP's batched C API for ANS and Zstandard, through ctypes: it drops the GIL and allocates nothing.

The library comes from the wheel nvidia-libnvcomp-cu12 or -cu13 and is loaded on first use. What is bound here is
declared in its headers nvcomp.h, nvcomp/ans.h, nvcomp/zstd.h and nvcomp/shared_types.h, version 6.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from dataclasses import dataclass
from typing import ClassVar

from .errors import CodecError, CodecUnavailableError
from .extras import install_hint
from .words import WordType

SUPPORTED_MAJOR = 6
"""The signatures below are those of this major version."""

STATUS_BYTES = 4
"""nvcompStatus_t is a C enum."""

_SUCCESS = 0
_TYPE_UCHAR, _TYPE_FLOAT8_E4M3, _TYPE_FLOAT16, _TYPE_FLOAT32, _TYPE_FROM_STREAM = 1, 9, 10, 11, 0xFF
_ANS_TYPES = {
    WordType.F8: _TYPE_FLOAT8_E4M3,
    WordType.F16: _TYPE_FLOAT16,
    WordType.BF16: _TYPE_FLOAT16,
    WordType.F32: _TYPE_FLOAT32,
}


class NvcompError(CodecError):
    """A call of nvCOMP failed.

    Args:
        function: The C function.
        status: Its nvcompStatus_t.
        meaning: nvCOMP's own words for the status.
    """

    def __init__(self, function: str, status: int, meaning: str) -> None:
        super().__init__(function, status, meaning)
        self.function = function
        self.status = status
        self.meaning = meaning

    def __str__(self) -> str:
        return (
            f"{self.function} failed with status {self.status} ({self.meaning}); 1000 is a CUDA error, often one of "
            "earlier work on the same device"
        )


class _AnsCompressOptions(ctypes.Structure):
    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("data_type", ctypes.c_int),
        ("max_sub_chunk_count", ctypes.c_uint8),
        ("states_per_lane", ctypes.c_uint8),
        ("histogram_reduction_log2", ctypes.c_uint8),
        ("reserved", ctypes.c_char * 53),
    ]


class _AnsDecompressOptions(ctypes.Structure):
    _fields_: ClassVar = [
        ("backend", ctypes.c_int),
        ("data_type", ctypes.c_int),
        ("max_sub_chunk_count", ctypes.c_uint8),
        ("states_per_lane", ctypes.c_uint8),
        ("skip_validate", ctypes.c_uint8),
        ("reserved", ctypes.c_char * 53),
    ]


class _ZstdCompressOptions(ctypes.Structure):
    _fields_: ClassVar = [("reserved", ctypes.c_char * 64)]


class _ZstdDecompressOptions(ctypes.Structure):
    _fields_: ClassVar = [("backend", ctypes.c_int), ("reserved", ctypes.c_char * 60)]


class _Properties(ctypes.Structure):
    _fields_: ClassVar = [("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32)]


@dataclass(frozen=True, slots=True)
class AnsTuning:
    """How nvCOMP's ANS codes a block; 0 is its default. Every setting decodes alike.

    Attributes:
        max_sub_chunk_count: A power of two from 4 to 64.
        states_per_lane: 1 or 2.
        histogram_reduction_log2: The histogram is taken from 1 / 2^n of the block; up to 8.
    """

    max_sub_chunk_count: int = 0
    states_per_lane: int = 0
    histogram_reduction_log2: int = 0


@dataclass(frozen=True, slots=True)
class NvcompBatch:
    """Device addresses of one batch's arrays, each of `num_blocks` items.

    Attributes:
        num_blocks: Blocks in the batch.
        max_block_bytes: Raw bytes of the longest block.
        inputs: uint64: addresses of the input blocks, multiples of 16.
        input_bytes: uint64: their lengths.
        outputs: uint64: addresses of the output buffers, multiples of 16.
        output_bytes: uint64, written: lengths of the outputs.
        statuses: int32, written: 0 is success.
        temp: Scratch, a multiple of 16.
        temp_bytes: Its length.
        capacities: uint64: lengths of the output buffers; to decompress only.
    """

    num_blocks: int
    max_block_bytes: int
    inputs: int
    input_bytes: int
    outputs: int
    output_bytes: int
    statuses: int
    temp: int
    temp_bytes: int
    capacities: int = 0


class BatchedCodec:
    """One algorithm of nvCOMP with its options. The CUDA device of the calling thread must be the streams' device."""

    def __init__(
        self, library: Nvcomp, algorithm: str, compress: ctypes.Structure, decompress: ctypes.Structure
    ) -> None:
        self._library = library
        self._prefix = f"nvcompBatched{algorithm}"
        self._compress_options = compress
        self._decompress_options = decompress

    def max_output_bytes(self, max_block_bytes: int) -> int:
        """Return the output buffer that compressing a block of up to `max_block_bytes` needs."""
        size = ctypes.c_size_t()
        self._call("CompressGetMaxOutputChunkSize", _size(max_block_bytes), self._compress_options, ctypes.byref(size))
        return size.value

    def compress_temp_bytes(self, num_blocks: int, max_block_bytes: int) -> int:
        """Return the scratch that `compress` needs for up to that many blocks of up to that many bytes."""
        return self._temp_bytes("CompressGetTempSize", self._compress_options, num_blocks, max_block_bytes)

    def decompress_temp_bytes(self, num_blocks: int, max_block_bytes: int) -> int:
        """Return the scratch that `decompress` needs for up to that many blocks of up to that many raw bytes."""
        return self._temp_bytes("DecompressGetTempSize", self._decompress_options, num_blocks, max_block_bytes)

    def compress(self, batch: NvcompBatch, stream: int) -> None:
        """Enqueue the compression of a batch on a CUDA stream (its address).

        Raises:
            NvcompError: If nothing was enqueued. What fails later shows in the statuses.
        """
        self._call(
            "CompressAsync",
            _address(batch.inputs),
            _address(batch.input_bytes),
            _size(batch.max_block_bytes),
            _size(batch.num_blocks),
            _address(batch.temp),
            _size(batch.temp_bytes),
            _address(batch.outputs),
            _address(batch.output_bytes),
            self._compress_options,
            _address(batch.statuses),
            _address(stream),
        )

    def decompress(self, batch: NvcompBatch, stream: int) -> None:
        """Enqueue the decompression of a batch on a CUDA stream (its address).

        nvCOMP trusts what it decodes: check a digest of the input first.

        Raises:
            NvcompError: If nothing was enqueued. What fails later shows in statuses and output_bytes.
        """
        self._call(
            "DecompressAsync",
            _address(batch.inputs),
            _address(batch.input_bytes),
            _address(batch.capacities),
            _address(batch.output_bytes),
            _size(batch.num_blocks),
            _address(batch.temp),
            _size(batch.temp_bytes),
            _address(batch.outputs),
            self._decompress_options,
            _address(batch.statuses),
            _address(stream),
        )

    def _temp_bytes(self, name: str, options: ctypes.Structure, num_blocks: int, max_block_bytes: int) -> int:
        size = ctypes.c_size_t()
        self._call(
            name,
            _size(num_blocks),
            _size(max_block_bytes),
            options,
            ctypes.byref(size),
            _size(num_blocks * max_block_bytes),
            _address(0),
        )
        return size.value

    def _call(self, name: str, *arguments: object) -> None:
        self._library.call(self._prefix + name, *arguments)


class Nvcomp:
    """The loaded library.

    Attributes:
        version: Major, minor, patch.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvcompGetStatusString.restype = ctypes.c_char_p
        properties = _Properties()
        self.call("nvcompGetProperties", ctypes.byref(properties))
        number = properties.version  # major × 1000 + minor × 100 + patch
        self.version = (number // 1000, number % 1000 // 100, number % 100)

    def ans(self, word: WordType, tuning: AnsTuning) -> BatchedCodec:
        """Return ANS, typed for a word type when it compresses; it decompresses any type."""
        compress = _AnsCompressOptions(
            data_type=_ANS_TYPES.get(word, _TYPE_UCHAR),
            max_sub_chunk_count=tuning.max_sub_chunk_count,
            states_per_lane=tuning.states_per_lane,
            histogram_reduction_log2=tuning.histogram_reduction_log2,
        )
        return BatchedCodec(self, "ANS", compress, _AnsDecompressOptions(data_type=_TYPE_FROM_STREAM))

    def zstd(self) -> BatchedCodec:
        """Return Zstandard: one standard frame a block."""
        return BatchedCodec(self, "Zstd", _ZstdCompressOptions(), _ZstdDecompressOptions())

    def call(self, function: str, *arguments: object) -> None:
        """Call a C function that returns a status.

        Raises:
            NvcompError: If the status is not success.
        """
        status = getattr(self._library, function)(*arguments)
        if status != _SUCCESS:
            raise NvcompError(function, status, self._library.nvcompGetStatusString(status).decode())


@functools.cache
def load_nvcomp() -> Nvcomp:
    """Load nvCOMP from the installed wheel. A failure is not remembered.

    Raises:
        CodecUnavailableError: If no nvCOMP of the supported major version is installed.
    """
    try:
        library = importlib.import_module("nvidia.libnvcomp").load_library()
    except ImportError as exc:
        raise CodecUnavailableError(f"this codec needs nvCOMP on the GPU ({exc}); {install_hint()}") from exc
    if library is None:
        raise CodecUnavailableError(f"nvCOMP's shared library cannot be loaded; reinstall it: {install_hint()}")
    nvcomp = Nvcomp(library)
    if nvcomp.version[0] != SUPPORTED_MAJOR:
        raise CodecUnavailableError(
            f"nvCOMP {'.'.join(map(str, nvcomp.version))} is installed and this build binds version {SUPPORTED_MAJOR}; "
            f"{install_hint()}"
        )
    return nvcomp


def _address(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)
