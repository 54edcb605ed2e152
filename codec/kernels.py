"""The CUDA kernels as methods: each call enqueues one launch, in a few microseconds of host time."""

from __future__ import annotations

import functools
import threading
from types import TracebackType

import torch

from .cuda_driver import cuda_driver
from .device_plan import Batch, BlockLayout
from .device_report import TAIL_WORDS
from .digest import PIECE_BYTES
from .kernel_files import THREADS, load_kernels
from .words import WordType

_UNITS_PER_THREAD = 4
_TILE_BYTES = 16384
# As in the .cu files.

_MAX_COPY_BLOCKS = 1 << 16
# Thread blocks of one copy, unless there are more pieces: enough to even out pieces of different lengths, few enough
# that those that find nothing to do cost little.


class Kernels:
    """The kernels, loaded on one device. Launches go to the stream of the enclosing `on`; any thread may make them.

    Addresses are those of device memory and, unless said otherwise, multiples of 16; whoever calls keeps the memory
    alive until the stream has passed. Nothing here waits for the device or drops the GIL.

    Args:
        device: A CUDA device with an index.

    Attributes:
        driver: The driver that launches them, for other work inside `on`.

    Raises:
        CodecUnavailableError: If CuPy or the driver is missing, or CuPy cannot compile for this device.
    """

    def __init__(self, device: torch.device) -> None:
        self.driver = cuda_driver()
        self._device = device
        self._kernels = load_kernels(device)
        self._loaded: set[str] = set()
        self._context = self.driver.primary_context(device.index)
        self._here = _Here()

    def on(self, stream: torch.cuda.Stream | int) -> _Scope:
        """Send the launches of this thread inside the `with` block to a stream of the device (or its handle).

        The device's context is current inside; PyTorch's current stream is left as it is.
        """
        handle: int = stream if isinstance(stream, int) else stream.cuda_stream
        return _Scope(self, handle)

    def load_rans(self) -> None:
        """Load the kernels of the rans codec, unless that is done: some seconds the first time on a machine.

        Raises:
            CodecUnavailableError: If CuPy cannot compile them for this device.
        """
        self._load("rans")

    def load_planes(self) -> None:
        """Load the kernels of the planes codec and of rans, likewise. Raises as `load_rans`."""
        self._load("rans")
        self._load("planes")

    def load_residual(self) -> None:
        """Load the kernels of residuals, likewise: about a second. Raises as `load_rans`."""
        self._load("residual")

    def launch(self, name: str, grid: int, *arguments: int) -> None:
        """Enqueue a kernel that has no method here: those of rans and planes, once they are loaded.

        Args:
            name: Its name in its .cu file.
            grid: Thread blocks, at least 1.
            arguments: One integer a parameter.
        """
        self._launch(name, grid, *arguments)

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
            self._launch("piece_digests", num_pieces, source, length_at, num_bytes, words + TAIL_WORDS * 8, words)

    def split_planes(self, raw: int, planes: int, layout: BlockLayout, *, rotate: bool) -> None:
        """Split raw[raw_bytes] into planes[num_planes × plane_stride]. For 2, 4 and 8 planes."""
        grid = _plane_grid(layout.raw_bytes, layout.num_planes)
        name = f"split_planes_{layout.num_planes}"
        self._launch(name, grid, raw, planes, layout.plane_stride, layout.raw_bytes, rotate)

    def join_planes(
        self, planes: int, plane_stride: int, num_planes: int, raw: int, raw_bytes: int, *, rotate: bool
    ) -> None:
        """Undo `split_planes`."""
        grid = _plane_grid(raw_bytes, num_planes)
        self._launch(f"join_planes_{num_planes}", grid, planes, plane_stride, raw, raw_bytes, rotate)

    def find_constant_blocks(self, planes: int, layout: BlockLayout, constant: int) -> None:
        """Set constant[i], uint8[num_blocks], to 1 where all bytes of block i are the same, else to 0."""
        self._launch(
            "find_constant_blocks",
            layout.num_blocks,
            planes,
            layout.plane_stride,
            layout.plane_bytes,
            layout.block_bytes,
            layout.blocks_per_plane,
            constant,
        )

    def lay_out_candidates(
        self, planes: int, layout: BlockLayout, batch: Batch, slots: int, slot_bytes: int, arrays: tuple[int, int, int]
    ) -> None:
        """Write nvCOMP's `arrays` for a batch: addresses of the inputs, their lengths, addresses of the outputs."""
        self._launch(
            "lay_out_candidates",
            -(-batch.count // THREADS),
            planes,
            layout.plane_stride,
            layout.plane_bytes,
            layout.block_bytes,
            layout.coded_per_plane,
            batch.first,
            batch.count,
            slots,
            slot_bytes,
            *arrays,
        )

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
        self._launch(
            "append_blocks",
            1,
            report,
            body,
            offsets,
            constant,
            coded_bytes,
            statuses,
            batch.first,
            batch.low,
            batch.high,
            layout.num_blocks,
            layout.num_planes,
            layout.blocks_per_plane,
            layout.plane_bytes,
            layout.block_bytes,
            layout.coded_planes,
            layout.coded_per_plane,
            layout.raw_bytes,
        )

    def gather_blocks(
        self, body: int, offsets: int, planes: int, slots: int, slot_bytes: int, layout: BlockLayout, batch: Batch
    ) -> None:
        """Copy a batch's blocks to where `append_blocks` put them in the body."""
        tiles = -(-layout.max_block_bytes // _TILE_BYTES)
        self._launch(
            "gather_blocks",
            (batch.high - batch.low) * tiles,
            body,
            offsets,
            planes,
            layout.plane_stride,
            layout.block_bytes,
            layout.blocks_per_plane,
            slots,
            slot_bytes,
            batch.first,
            layout.coded_per_plane,
            batch.low,
            tiles,
            layout.raw_bytes,
        )

    def place_blocks(self, items: int, num_items: int, max_block_bytes: int) -> None:
        """Restore stored and constant blocks. items: uint64[num_items, 4]: source, target, raw bytes, BlockKind."""
        tiles = -(-max_block_bytes // _TILE_BYTES)
        self._launch("place_blocks", num_items * tiles, items, tiles)

    def count_failures(self, statuses: int, actual_bytes: int, expected_bytes: int, count: int, failures: int) -> None:
        """Add to failures[0] the number of blocks with a status or a length that is wrong."""
        self._launch("count_failures", -(-count // THREADS), statuses, actual_bytes, expected_bytes, count, failures)

    def copy_pieces(
        self,
        items: int,
        num_items: int,
        max_piece_bytes: int,
        stream: torch.cuda.Stream | int,
        *,
        target_base: int = 0,
    ) -> None:
        """Copy pieces of device memory, all in one launch. Needs no enclosing `on`.

        Args:
            items: uint64[num_items, 3] in device memory: source, target and bytes of each piece. The addresses may have
                any alignment; a piece goes fastest where the two are equal modulo 16. Targets do not overlap anything.
            num_items: How many pieces.
            max_piece_bytes: Bytes of the longest piece.
            stream: A stream of the device, or its handle.
            target_base: Added to every target, so that items of offsets serve for any buffer; it may be negative.
        """
        if not num_items or not max_piece_bytes:
            return
        tiles = -(-max_piece_bytes // _TILE_BYTES)
        parts = max(1, min(tiles, _MAX_COPY_BLOCKS // num_items))
        with self.on(stream):
            self._launch("copy_pieces", num_items * parts, items, target_base % (1 << 64), parts)

    def copy_to_host(self, target: int, source: int, num_bytes: int) -> None:
        """Copy a few bytes of device memory to page-locked memory of the host, by a kernel.

        As a plain copy a report comes behind the frame that is leaving, whatever its stream: 4 ms for 256 MiB, and so
        long its chunk counts as not encoded.

        Args:
            target: Where to, in page-locked memory of PyTorch's, which the device reaches by the same address; any
                alignment.
            source: Where from; any alignment.
            num_bytes: How many.
        """
        if num_bytes:
            self._launch("copy_bytes", -(-num_bytes // _TILE_BYTES), source, target, num_bytes)

    def compare_pieces(
        self, items: int, num_items: int, max_piece_bytes: int, flags: int, stream: torch.cuda.Stream | int
    ) -> None:
        """Compare pieces of device memory with what rules make of others. Needs no enclosing `on`.

        Args:
            items: uint64[num_items, 5] in device memory: source, target, bytes of the target, rule and number of the
                flag of each piece. Addresses are multiples of the words that the rule speaks of.
            num_items: How many pieces.
            max_piece_bytes: Bytes of the longest target.
            flags: uint32[…] in device memory; what is 0 becomes 1 where a piece differs.
            stream: A stream of the device, or its handle.
        """
        if not num_items or not max_piece_bytes:
            return
        tiles = -(-max_piece_bytes // _TILE_BYTES)
        parts = max(1, min(tiles, _MAX_COPY_BLOCKS // num_items))
        with self.on(stream):
            self._launch("compare_pieces", num_items * parts, items, parts, flags)

    def take_residual(
        self, kind: int, word: WordType, raw: int, base: int, out: int, num_bytes: int, *, sums: int = 0
    ) -> None:
        """Make what is left of a chunk. After `load_residual`.

        Args:
            kind: What to do, a number of residual.cu.
            word: Word type of the chunk.
            raw: The chunk.
            base: The chunk before.
            out: For what is left; it may be `raw`, or `base` where there are no `sums`.
            num_bytes: Bytes of each.
            sums: uint64[2] in device memory, zeros: take the sums of base and chunk, and write the chunk over the base;
                0: leave the base as it is.
        """
        if num_bytes:
            name = f"take_residual_{word.itemsize}"
            self._launch(name, _residual_grid(num_bytes), raw, base, out, num_bytes, kind, sums != 0, sums)

    def take_and_digest(
        self, kind: int, word: WordType, raw: int, base: int, out: int, num_bytes: int, *, sums: int, words: int
    ) -> None:
        """Make what is left of a chunk, keep the chunk, and hash it, from one reading. After `load_residual`.

        Args:
            kind: As there, but for that which only keeps.
            word: Word type of the chunk.
            raw: The chunk.
            base: The chunk before, which the chunk takes the place of.
            out: For what is left; neither of them.
            num_bytes: Bytes of each.
            sums: uint64[2] in device memory, zeros: the sums of base and chunk.
            words: As for `piece_digests`.
        """
        num_pieces = -(-num_bytes // PIECE_BYTES)
        if num_pieces:
            name = f"take_and_digest_{word.itemsize}"
            digests = words + TAIL_WORDS * 8
            self._launch(name, num_pieces, raw, base, out, num_bytes, kind, sums, digests, words)

    def undo_residual(self, kind: int, word: WordType, residual: int, chunk: int, num_bytes: int) -> None:
        """Make a chunk of the chunk before and what is left, in place. After `load_residual`; kinds as there."""
        if num_bytes:
            name = f"undo_residual_{word.itemsize}"
            self._launch(name, _residual_grid(num_bytes), residual, chunk, num_bytes, kind)

    def _load(self, use: str) -> None:
        if use not in self._loaded:
            self._kernels |= load_kernels(self._device, use)
            self._loaded.add(use)

    def _launch(self, name: str, grid: int, *arguments: int) -> None:
        self.driver.launch(self._kernels[name], grid, self._here.stream, *arguments)


class _Here(threading.local):
    """Where the launches of one thread go."""

    stream: int


class _Scope:
    """One `with Kernels.on(…)`."""

    __slots__ = ("_kernels", "_outer", "_stream")

    def __init__(self, kernels: Kernels, stream: int) -> None:
        self._kernels = kernels
        self._stream = stream
        self._outer: int | None = None

    def __enter__(self) -> None:
        kernels = self._kernels
        kernels.driver.push(kernels._context)
        here = kernels._here
        self._outer = getattr(here, "stream", None)
        here.stream = self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kernels = self._kernels
        if self._outer is None:
            del kernels._here.stream
        else:
            kernels._here.stream = self._outer
        kernels.driver.pop()


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


def _residual_grid(num_bytes: int) -> int:
    return -(-num_bytes // (16 * THREADS * _UNITS_PER_THREAD))


def _plane_grid(raw_bytes: int, num_planes: int) -> int:
    return max(1, -(-raw_bytes // ((32 if num_planes == 8 else 16) * THREADS * _UNITS_PER_THREAD)))
