"""nvCOMP's batched C API through ctypes: it works in buffers of ours and allocates nothing.

The library comes from the wheel nvidia-libnvcomp-cu12 or -cu13 and is loaded on first use. The functions bound here are
the same for every codec (nvcomp_codecs.py lists them) but for their names and for what their option structs mean.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from .base import FrameHeader
from .errors import CodecError, CodecUnavailableError
from .extras import install_hint
from .nvcomp_codecs import OPTION_BYTES, NvcompCodec, nvcomp_codec_numbered
from .words import WordType

SUPPORTED_MAJOR = 6
"""The signatures below are those of this major version."""

STATUS_BYTES = 4
"""nvcompStatus_t is a C enum."""

_SUCCESS = 0
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t

_Call: TypeAlias = Callable[..., None]


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


class _Options(ctypes.Structure):
    """Any of the option structs. Some hold 64-bit fields, so all are aligned like these."""

    _fields_: ClassVar = [("words", ctypes.c_uint64 * (OPTION_BYTES // 8))]


class _Properties(ctypes.Structure):
    _fields_: ClassVar = [("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32)]


_TEMP_TYPES = (_SIZE, _SIZE, _Options, _ADDRESS, _SIZE, _ADDRESS)
_LAST_TYPES = (_Options, _ADDRESS, _ADDRESS)  # options, statuses, stream
_COMPRESS_TYPES = (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, *_LAST_TYPES)
_DECOMPRESS_TYPES = (_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _ADDRESS, *_LAST_TYPES)


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
    """One codec with its options. The CUDA context of the calling thread must be that of the streams.

    Args:
        library: nvCOMP.
        codec: Which codec.
        word: What one value of the blocks is, to compress; blocks of any type are decompressed.
    """

    def __init__(self, library: Nvcomp, codec: NvcompCodec, word: WordType) -> None:
        prefix = f"nvcompBatched{codec.prefix}"
        self._to_compress = _Options.from_buffer_copy(codec.options_to_compress(word))
        self._to_decompress = _Options.from_buffer_copy(codec.options_to_decompress())
        self._compress_temp = library.function(f"{prefix}CompressGetTempSize", *_TEMP_TYPES)
        self._decompress_temp = library.function(f"{prefix}DecompressGetTempSize", *_TEMP_TYPES)
        self._max_output = library.function(f"{prefix}CompressGetMaxOutputChunkSize", _SIZE, _Options, _ADDRESS)
        self._first_compress = library.function(f"{prefix}CompressAsync", *_COMPRESS_TYPES)
        self._next_compress = library.function(f"{prefix}CompressAsync", *_COMPRESS_TYPES, keeps_gil=True)
        self._decompress = library.function(f"{prefix}DecompressAsync", *_DECOMPRESS_TYPES)
        self._was_called = False

    def max_output_bytes(self, max_block_bytes: int) -> int:
        """Return the output buffer that compressing a block of up to `max_block_bytes` needs."""
        size = ctypes.c_size_t()
        self._max_output(max_block_bytes, self._to_compress, ctypes.addressof(size))
        return size.value

    def compress_temp_bytes(self, num_blocks: int, max_block_bytes: int) -> int:
        """Return the scratch that `compress` needs for up to that many blocks of up to that many bytes."""
        return _temp_bytes(self._compress_temp, self._to_compress, num_blocks, max_block_bytes)

    def decompress_temp_bytes(self, num_blocks: int, max_block_bytes: int) -> int:
        """Return the scratch that `decompress` needs for up to that many blocks of up to that many raw bytes."""
        return _temp_bytes(self._decompress_temp, self._to_decompress, num_blocks, max_block_bytes)

    def compress(self, batch: NvcompBatch, stream: int) -> None:
        """Enqueue the compression of a batch on a CUDA stream (its address).

        Keeps the GIL, but for the first call, which may load the codec's kernels: a call takes some 10 µs, and beside a
        busy Python thread it can take 5 ms to get the GIL back (see cuda_driver.py).

        Raises:
            NvcompError: If nothing was enqueued. What fails later shows in the statuses.
        """
        call = self._next_compress if self._was_called else self._first_compress
        call(
            batch.inputs,
            batch.input_bytes,
            batch.max_block_bytes,
            batch.num_blocks,
            batch.temp,
            batch.temp_bytes,
            batch.outputs,
            batch.output_bytes,
            self._to_compress,
            batch.statuses,
            stream,
        )
        self._was_called = True

    def decompress(self, batch: NvcompBatch, stream: int) -> None:
        """Enqueue the decompression of a batch on a CUDA stream (its address). Drops the GIL meanwhile.

        nvCOMP trusts what it decodes: check a digest of the input first.

        Raises:
            NvcompError: If nothing was enqueued. What fails later shows in statuses and output_bytes.
        """
        self._decompress(
            batch.inputs,
            batch.input_bytes,
            batch.capacities,
            batch.output_bytes,
            batch.num_blocks,
            batch.temp,
            batch.temp_bytes,
            batch.outputs,
            self._to_decompress,
            batch.statuses,
            stream,
        )


class Nvcomp:
    """The loaded library.

    Attributes:
        version: Major, minor, patch.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._with_gil = ctypes.PyDLL(library._name, handle=library._handle)
        self._describe = library["nvcompGetStatusString"]
        self._describe.restype = ctypes.c_char_p
        properties = _Properties()
        self.function("nvcompGetProperties", _ADDRESS)(ctypes.addressof(properties))
        number = properties.version  # major × 1000 + minor × 100 + patch
        self.version = (number // 1000, number % 1000 // 100, number % 100)

    def function(self, name: str, *types: Any, keeps_gil: bool = False) -> _Call:
        """Return a C function that returns a status, as a callable that raises NvcompError unless it is success."""
        function = (self._with_gil if keeps_gil else self._library)[name]
        function.argtypes = types
        function.restype = ctypes.c_int

        def call(*arguments: object) -> None:
            status = function(*arguments)
            if status != _SUCCESS:
                raise NvcompError(name, status, self._describe(status).decode())

        return call

    def coder(self, codec: NvcompCodec, word: WordType) -> BatchedCodec:
        """Return a codec with its options for a word type."""
        return BatchedCodec(self, codec, word)


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


def decoder_of(header: FrameHeader) -> BatchedCodec:
    """Return what decompresses the coded blocks of a frame.

    Raises:
        UnknownCodecError: If nvCOMP has no such codec.
        CodecUnavailableError: If nvCOMP is missing, or of another version than the one that alone reads the frame.
    """
    nvcomp, codec = load_nvcomp(), nvcomp_codec_numbered(header.codec)
    if codec.needs_same_major and header.parameter != nvcomp.version[0]:
        raise CodecUnavailableError(
            f"the frame was written with nvCOMP {header.parameter} and only that major version reads it; nvCOMP "
            f"{'.'.join(map(str, nvcomp.version))} is installed: {install_hint()} with nvCOMP {header.parameter}"
        )
    return _decoder(codec.number)


@functools.cache
def _decoder(number: int) -> BatchedCodec:
    return load_nvcomp().coder(nvcomp_codec_numbered(number), WordType.U8)


def _temp_bytes(function: _Call, options: _Options, num_blocks: int, max_block_bytes: int) -> int:
    size = ctypes.c_size_t()
    function(num_blocks, max_block_bytes, options, ctypes.addressof(size), num_blocks * max_block_bytes, 0)
    return size.value
