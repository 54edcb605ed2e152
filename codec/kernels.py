"""Compile the CUDA kernels beside this file and launch them on PyTorch's streams. CuPy is imported on first use."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeAlias, cast

import numpy as np
import torch

from .device_plan import Batch, BlockLayout
from .device_report import TAIL_WORDS
from .digest import PIECE_BYTES
from .errors import CodecUnavailableError
from .extras import install_hint

_THREADS = 256
_APPEND_THREADS = 1024
_UNITS_PER_THREAD = 4
_TILE_BYTES = 16384
# As in the .cu files.

_FUNCTIONS = {
    "digest": ("piece_digests",),
    "planes": tuple(f"{verb}_planes_{size}" for verb in ("split", "join") for size in (2, 4, 8)),
    "blocks": (
        "find_constant_blocks",
        "lay_out_candidates",
        "append_blocks",
        "gather_blocks",
        "place_blocks",
        "count_failures",
    ),
}
_OPTIONS = ("--std=c++17",)


_Args: TypeAlias = tuple[np.uint32 | np.uint64, ...]


class _Launch(Protocol):
    def __call__(self, grid: tuple[int], block: tuple[int], args: _Args) -> None: ...


class _StreamHandle:
    """A stream of another library, as the CUDA stream protocol wants it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)


class Kernels:
    """The kernels, loaded on one device. Each call enqueues one launch on the stream of the enclosing `on`.

    Addresses are those of device memory and multiples of 16; whoever calls keeps the memory alive until the stream has
    passed. Nothing here waits for the device.

    Args:
        device: A CUDA device with an index.

    Raises:
        CodecUnavailableError: If CuPy is not installed, or cannot compile for this device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cupy = _import_cupy()
        self._device = device
        with torch.cuda.device(device), self._cupy.cuda.Device(device.index):
            self._launches = {
                name: launch for file, names in _FUNCTIONS.items() for name, launch in self._load(file, names).items()
            }

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Send the launches inside the block to `stream`."""
        with torch.cuda.device(self._device), self._cupy.cuda.Device(self._device.index), self._current(stream):
            yield

    def piece_digests(self, source: int, num_bytes: int, words: int, *, length_at: int = 0) -> None:
        """Hash each 64 KiB piece.

        Args:
            source: What to hash.
            num_bytes: Its length; with `length_at`, the most that it can be.
            words: uint64[digest_words(num_bytes)], for `read_digest` to read once on the host.
            length_at: uint64[1] that holds the length by the time the kernel runs; 0 for none.
        """
        num_pieces = -(-num_bytes // PIECE_BYTES)
        if num_pieces:
            hashes = words + TAIL_WORDS * 8
            args = (_u64(source), _u64(length_at), _u64(num_bytes), _u64(hashes), _u64(words))
            self._launch("piece_digests", num_pieces, args)

    def split_planes(self, raw: int, planes: int, layout: BlockLayout, *, rotate: bool) -> None:
        """Split raw[raw_bytes] into planes[num_planes × plane_stride]. For 2, 4 and 8 planes."""
        args = (_u64(raw), _u64(planes), _u64(layout.plane_stride), _u64(layout.raw_bytes), _u32(rotate))
        self._launch(f"split_planes_{layout.num_planes}", _plane_grid(layout.raw_bytes, layout.num_planes), args)

    def join_planes(
        self, planes: int, plane_stride: int, num_planes: int, raw: int, raw_bytes: int, *, rotate: bool
    ) -> None:
        """Undo `split_planes`."""
        args = (_u64(planes), _u64(plane_stride), _u64(raw), _u64(raw_bytes), _u32(rotate))
        self._launch(f"join_planes_{num_planes}", _plane_grid(raw_bytes, num_planes), args)

    def find_constant_blocks(self, planes: int, layout: BlockLayout, constant: int) -> None:
        """Set constant[i], uint8[num_blocks], to 1 where all bytes of block i are the same, else to 0."""
        args: _Args = (
            _u64(planes),
            _u64(layout.plane_stride),
            _u64(layout.plane_bytes),
            _u32(layout.block_bytes),
            _u32(layout.blocks_per_plane),
            _u64(constant),
        )
        self._launch("find_constant_blocks", layout.num_blocks, args)

    def lay_out_candidates(
        self, planes: int, layout: BlockLayout, batch: Batch, slots: int, slot_bytes: int, arrays: tuple[int, int, int]
    ) -> None:
        """Write nvCOMP's `arrays` for a batch: addresses of the inputs, their lengths, addresses of the outputs."""
        args: _Args = (
            _u64(planes),
            _u64(layout.plane_stride),
            _u64(layout.plane_bytes),
            _u32(layout.block_bytes),
            _u32(layout.coded_per_plane),
            _u32(batch.first),
            _u32(batch.count),
            _u64(slots),
            _u64(slot_bytes),
            *(_u64(array) for array in arrays),
        )
        self._launch("lay_out_candidates", -(-batch.count // _THREADS), args)

    def append_blocks(
        self,
        report: int,
        body: int,
        offsets: int,
        constant: int,
        coded_bytes: int,
        statuses: int,
        layout: BlockLayout,
        batch: Batch,
    ) -> None:
        """Decide the kinds of a batch's blocks; write table entries, offsets and the report's first three words."""
        args: _Args = (
            *(_u64(address) for address in (report, body, offsets, constant, coded_bytes, statuses)),
            _u32(batch.first),
            _u32(batch.low),
            _u32(batch.high),
            _u32(layout.num_blocks),
            _u32(layout.num_planes),
            _u32(layout.blocks_per_plane),
            _u64(layout.plane_bytes),
            _u32(layout.block_bytes),
            _u32(layout.coded_planes),
            _u32(layout.coded_per_plane),
            _u64(layout.raw_bytes),
        )
        self._launch("append_blocks", 1, args, threads=_APPEND_THREADS)

    def gather_blocks(
        self, body: int, offsets: int, planes: int, slots: int, slot_bytes: int, layout: BlockLayout, batch: Batch
    ) -> None:
        """Copy a batch's blocks to where `append_blocks` put them in the body."""
        tiles = -(-layout.max_block_bytes // _TILE_BYTES)
        args: _Args = (
            _u64(body),
            _u64(offsets),
            _u64(planes),
            _u64(layout.plane_stride),
            _u32(layout.block_bytes),
            _u32(layout.blocks_per_plane),
            _u64(slots),
            _u64(slot_bytes),
            _u32(batch.first),
            _u32(layout.coded_per_plane),
            _u32(batch.low),
            _u32(tiles),
            _u64(layout.raw_bytes),
        )
        self._launch("gather_blocks", (batch.high - batch.low) * tiles, args)

    def place_blocks(self, items: int, num_items: int, max_block_bytes: int) -> None:
        """Restore stored and constant blocks. items: uint64[num_items, 4]: source, target, raw bytes, BlockKind."""
        tiles = -(-max_block_bytes // _TILE_BYTES)
        self._launch("place_blocks", num_items * tiles, (_u64(items), _u32(tiles)))

    def count_failures(self, statuses: int, actual_bytes: int, expected_bytes: int, count: int, failures: int) -> None:
        """Add to failures[0] the number of blocks with a status or a length that is wrong."""
        args = (_u64(statuses), _u64(actual_bytes), _u64(expected_bytes), _u32(count), _u64(failures))
        self._launch("count_failures", -(-count // _THREADS), args)

    def _launch(self, name: str, grid: int, args: _Args, threads: int = _THREADS) -> None:
        self._launches[name]((grid,), (threads,), args)

    def _load(self, file: str, names: tuple[str, ...]) -> dict[str, _Launch]:
        source = Path(__file__).with_name(f"{file}.cu").read_text(encoding="utf-8")
        module = self._cupy.RawModule(code=source, options=_OPTIONS)
        try:
            return {name: module.get_function(name) for name in names}
        except (self._cupy.cuda.compiler.CompileException, RuntimeError, ImportError) as exc:
            raise CodecUnavailableError(
                f"the GPU kernels in {file}.cu do not compile for {torch.cuda.get_device_name(self._device)}: {exc}; "
                f"they need compute capability 7.0 or more and CuPy with NVRTC: {install_hint()}"
            ) from exc

    def _current(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        streams = self._cupy.cuda
        if hasattr(streams.Stream, "from_external"):  # CuPy 14 and later; it deprecates ExternalStream
            external = streams.Stream.from_external(_StreamHandle(stream.cuda_stream))
        else:
            external = streams.ExternalStream(stream.cuda_stream, self._device.index)
        return cast(AbstractContextManager[object], external)


@functools.cache
def kernels_of(device: torch.device) -> Kernels:
    """Return the kernels of a CUDA device with an index. The first call of a process compiles them: about a second.

    Raises:
        CodecUnavailableError: As `Kernels` does.
    """
    return Kernels(device)


def indexed(device: torch.device) -> torch.device:
    """Return the device with its index: "cuda" is the current one."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _import_cupy() -> ModuleType:
    try:
        return importlib.import_module("cupy")
    except ImportError as exc:
        raise CodecUnavailableError(f"encoding and decoding on a GPU needs CuPy ({exc}); {install_hint()}") from exc


def _plane_grid(raw_bytes: int, num_planes: int) -> int:
    return max(1, -(-raw_bytes // ((32 if num_planes == 8 else 16) * _THREADS * _UNITS_PER_THREAD)))


def _u32(value: int) -> np.uint32:
    return np.uint32(value)


def _u64(value: int) -> np.uint64:
    return np.uint64(value)
