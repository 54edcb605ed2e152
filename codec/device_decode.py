"""Decode frames whose body lies on a CUDA device, on one stream."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .base import PLANES_CODEC, RANS_CODEC, RAW_CODEC, FrameHeader
from .blocked import (
    BLOCK_ALIGNMENT_BYTES,
    MIN_BLOCK_BYTES,
    BlockKind,
    BlockTable,
    blocks_start,
    check_padding,
    count_blocks,
    num_planes_of,
    parse_body,
)
from .device_blocks import ADDRESS_ALIGNMENT_BYTES
from .device_check import PADDING_WORD, Check, check_body
from .device_plan import BUFFER_ALIGNMENT_BYTES, round_up
from .device_report import FAILED_WORD, STATE_WORDS, WORD_BYTES, report_words
from .errors import CodecError
from .host_rooms import HostRooms
from .kernels import indexed, kernels_of
from .nvcomp import STATUS_BYTES, NvcompBatch, decoder_of
from .planes_body import START_BYTES
from .planes_device import decode_fields
from .rans_device import decode_rans
from .rans_format import start_bound_bytes
from .words import WordType

DECODE_BATCH_BYTES = 64 << 20
"""nvCOMP decodes at most this many raw bytes at a time, or one block: its Zstd takes 3.1 times that as scratch."""


def prefix_bytes(header: FrameHeader) -> int:
    """Return how much of the start of a body `DeviceDecoder.decode` wants on the host: its table, however long."""
    if header.codec == RAW_CODEC:
        return 0
    if header.codec == RANS_CODEC:
        return min(header.body_bytes, start_bound_bytes(header.raw_bytes))
    if header.codec == PLANES_CODEC:
        return min(header.body_bytes, START_BYTES)  # where the rest begins is only known from these
    num_blocks = count_blocks(header.raw_bytes, num_planes_of(header), MIN_BLOCK_BYTES)
    return min(header.body_bytes, blocks_start(num_blocks))


def undecodable_reason(header: FrameHeader, device: torch.device) -> str | None:
    """Return why a frame like this cannot be decoded on a CUDA device and what to do about it; None if it can.

    The first call for a device compiles kernels: about a second.
    """
    try:
        kernels = kernels_of(indexed(device))
        if header.codec == RANS_CODEC:
            kernels.load_rans()
        elif header.codec == PLANES_CODEC:
            kernels.load_planes()
        elif header.codec != RAW_CODEC:
            decoder_of(header)
    except CodecError as exc:
        return str(exc)
    return None


class DeviceDecoder:
    """Decodes frames of at most `chunk_bytes` raw bytes on one CUDA device. Used by one thread at a time.

    Holds one buffer of chunk_bytes for the planes, taken at the first frame that needs it (half of that more for codec
    planes), and nvCOMP's scratch, which grows to what was needed most; beyond these a call takes a few bytes a block
    from PyTorch's allocator.

    Args:
        chunk_bytes: The most raw bytes of a frame.
        device: A CUDA device.
        stream: The stream of that device on which all work runs.

    Raises:
        CodecUnavailableError: If CuPy is missing.
    """

    def __init__(self, chunk_bytes: int, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._chunk_bytes = chunk_bytes
        self._device = device = indexed(device)
        self._stream = stream
        self._kernels = kernels_of(device)
        self._rooms = HostRooms(self._kernels, stream)
        self._planes: torch.Tensor | None = None
        self._temp: torch.Tensor | None = None

    @property
    def device_bytes(self) -> int:
        """Device memory that it holds between calls."""
        return sum(buffer.numel() for buffer in (self._planes, self._temp) if buffer is not None)

    def decode(
        self,
        header: FrameHeader,
        body: torch.Tensor,
        body_prefix: memoryview | NDArray[np.uint8],
        out: torch.Tensor,
        *,
        body_verified: bool = False,
    ) -> Check:
        """Enqueue the decoding of a frame. Waits for the device only to check the body's digest, and of codec planes to
        see the starts of the streams, where `body_prefix` lacks them.

        Args:
            header: The frame's header, its raw_bytes checked against what the caller expects.
            body: uint8[body_bytes] on the decoder's device, contiguous, its address a multiple of 16. The stream must
                already wait for whoever wrote it.
            body_prefix: The host's copy of the body, or at least of its start: `prefix_bytes` of it.
            out: uint8[raw_bytes] on the same device, contiguous, any alignment; undefined until the check has passed.
            body_verified: The caller has checked the body's digest. Else it is checked here before nvCOMP, which trusts
                its input, sees the body.

        Returns:
            The check to wait for before `out` is used. It keeps `body` and `out` alive.

        Raises:
            CorruptionError: If the block table, the start of a body of rans or planes, or the body's digest, does not
                hold.
            UnknownCodecError: If a stream of planes is of a codec of another build.
            CodecUnavailableError: If nvCOMP is missing, or of another version than the one that wrote the frame.
            CodecError: If a tensor is not as described.
        """
        self._check(header, body, out)
        with torch.cuda.stream(self._stream), self._kernels.on(self._stream):
            report = torch.zeros(report_words(header.raw_bytes, num_digests=1), dtype=torch.int64, device=self._device)
            if header.codec == RAW_CODEC:
                out.copy_(body, non_blocking=True)
                decoded = body
            else:
                if not body_verified:
                    check_body(header, body, self._stream, self._rooms).wait()
                decoded = self._decode_body(header, body, body_prefix, out, report)
            self._kernels.piece_digests(decoded.data_ptr(), header.raw_bytes, _digest_at(report))
            return Check(header, report, self._rooms, (body, out))

    def _decode_body(
        self,
        header: FrameHeader,
        body: torch.Tensor,
        body_prefix: memoryview | NDArray[np.uint8],
        out: torch.Tensor,
        report: torch.Tensor,
    ) -> torch.Tensor:
        """Return where the decoded chunk lies with an aligned address: `out`, or a copy of it."""
        start = np.frombuffer(body_prefix, dtype=np.uint8)
        target = out if out.data_ptr() % ADDRESS_ALIGNMENT_BYTES == 0 else torch.empty_like(out)
        if header.codec == RANS_CODEC:
            decode_rans(self._kernels, self._rooms, header, start, body, target, report.data_ptr())
        elif header.codec == PLANES_CODEC:
            decode_fields(
                self._kernels, self._rooms, header, start, body, target, report.data_ptr(), self._plane_room
            )
        else:
            self._decode_blocks(header, start, body, target, report)
        if target is not out:
            out.copy_(target, non_blocking=True)
        return target

    def _decode_blocks(
        self,
        header: FrameHeader,
        start: NDArray[np.uint8],
        body: torch.Tensor,
        target: torch.Tensor,
        report: torch.Tensor,
    ) -> None:
        table = parse_body(header, start)
        if start.size == header.body_bytes:
            check_padding(table, start)
        else:
            self._check_padding(table, body, report)
        if table.num_planes == 1:
            self._restore(header, table, body, target.data_ptr(), 0, report)
        else:
            planes, stride = self._plane_buffer().data_ptr(), _plane_stride(header, table)
            self._restore(header, table, body, planes, stride, report)
            rotate = header.word.is_float
            self._kernels.join_planes(
                planes, stride, table.num_planes, target.data_ptr(), header.raw_bytes, rotate=rotate
            )

    def _restore(
        self, header: FrameHeader, table: BlockTable, body: torch.Tensor, planes: int, stride: int, report: torch.Tensor
    ) -> None:
        """Enqueue the restoring of all blocks to planes + plane × stride."""
        per_plane = table.kinds.size // table.num_planes
        plane, index = np.divmod(np.arange(table.kinds.size, dtype=np.int64), per_plane)
        sources = body.data_ptr() + table.offsets
        targets = planes + plane * stride + index * table.block_bytes
        plain = np.flatnonzero(table.kinds != BlockKind.CODED)
        coded = np.flatnonzero(table.kinds == BlockKind.CODED)
        items = np.stack([sources, targets, table.raw_sizes, table.kinds], axis=1)[plain]
        arrays = np.stack([sources, table.stored_bytes, targets, table.raw_sizes])[:, coded]
        on_device = self._rooms.send(np.concatenate([items.reshape(-1), arrays.reshape(-1)])).view(torch.int64)
        if plain.size:
            self._kernels.place_blocks(on_device.data_ptr(), plain.size, int(items[:, 2].max()))
        if coded.size:
            self._decompress(header, arrays, on_device[items.size :], report)

    def _decompress(
        self, header: FrameHeader, arrays: NDArray[np.int64], on_device: torch.Tensor, report: torch.Tensor
    ) -> None:
        """Enqueue nvCOMP on the coded blocks. arrays: int64[4, coded]: sources, stored bytes, targets, raw bytes."""
        coder = decoder_of(header)
        count = arrays.shape[1]
        actual = torch.empty(count, dtype=torch.int64, device=self._device)
        statuses = torch.empty(count, dtype=torch.int32, device=self._device)
        sources, stored, targets, capacities = (on_device.data_ptr() + row * count * WORD_BYTES for row in range(4))
        for first, end in _batches(arrays[3]):
            max_block_bytes = int(arrays[3, first:end].max())
            temp = self._scratch(coder.decompress_temp_bytes(end - first, max_block_bytes))
            at = first * WORD_BYTES
            coder.decompress(
                NvcompBatch(
                    num_blocks=end - first,
                    max_block_bytes=max_block_bytes,
                    inputs=sources + at,
                    input_bytes=stored + at,
                    outputs=targets + at,
                    output_bytes=actual.data_ptr() + at,
                    statuses=statuses.data_ptr() + first * STATUS_BYTES,
                    temp=temp.data_ptr(),
                    temp_bytes=temp.numel(),
                    capacities=capacities + at,
                ),
                self._stream.cuda_stream,
            )
        failures = report.data_ptr() + FAILED_WORD * WORD_BYTES
        self._kernels.count_failures(statuses.data_ptr(), actual.data_ptr(), capacities, count, failures)

    def _check_padding(self, table: BlockTable, body: torch.Tensor, report: torch.Tensor) -> None:
        """Enqueue counting the bytes that are not zero behind the blocks, each of which ends inside its last 16."""
        kept = table.stored_bytes % BLOCK_ALIGNMENT_BYTES
        padded = np.flatnonzero(kept)
        if not padded.size:
            return
        rows = (table.offsets + table.stored_bytes)[padded] // BLOCK_ALIGNMENT_BYTES
        on_device = self._rooms.send(np.stack([rows, kept[padded]])).view(torch.int64).view(2, -1)
        columns = torch.arange(BLOCK_ALIGNMENT_BYTES, device=self._device)
        ends = body.view(-1, BLOCK_ALIGNMENT_BYTES).index_select(0, on_device[0])
        report[PADDING_WORD] = ((ends != 0) & (columns >= on_device[1].unsqueeze(1))).sum()

    def _check(self, header: FrameHeader, body: torch.Tensor, out: torch.Tensor) -> None:
        for name, tensor, num_bytes in (("body", body, header.body_bytes), ("out", out, header.raw_bytes)):
            if tensor.device != self._device or tensor.dtype is not torch.uint8 or tensor.shape != (num_bytes,):
                raise CodecError(
                    f"{name} must be uint8[{num_bytes}] on {self._device}; this is {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)} on {tensor.device}"
                )
            if not tensor.is_contiguous():
                raise CodecError(f"{name} must be contiguous")
        if body.data_ptr() % ADDRESS_ALIGNMENT_BYTES:
            raise CodecError(
                f"the body starts at address {body.data_ptr():#x}, no multiple of {ADDRESS_ALIGNMENT_BYTES}; "
                "copy it into an aligned buffer first"
            )
        if header.raw_bytes > self._chunk_bytes:
            raise CodecError(f"the frame has {header.raw_bytes} raw bytes; this decoder takes {self._chunk_bytes}")

    def _plane_buffer(self) -> torch.Tensor:
        return self._plane_room(self._chunk_bytes + WordType.F64.itemsize * BUFFER_ALIGNMENT_BYTES)

    def _plane_room(self, num_bytes: int) -> torch.Tensor:
        if self._planes is None or self._planes.numel() < num_bytes:
            self._planes = None  # first let go: both at once may not fit
            self._planes = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._planes

    def _scratch(self, num_bytes: int) -> torch.Tensor:
        if self._temp is None or self._temp.numel() < num_bytes:
            self._temp = None  # first let go: both at once may not fit
            self._temp = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._temp


def _digest_at(report: torch.Tensor) -> int:
    return report.data_ptr() + STATE_WORDS * WORD_BYTES


def _plane_stride(header: FrameHeader, table: BlockTable) -> int:
    return round_up(header.raw_bytes // table.num_planes, BUFFER_ALIGNMENT_BYTES)


def _batches(raw_sizes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut blocks into runs of at most DECODE_BATCH_BYTES, scratch included where blocks differ in length."""
    per_batch = max(1, DECODE_BATCH_BYTES // int(raw_sizes.max()))
    return [(first, min(first + per_batch, raw_sizes.size)) for first in range(0, raw_sizes.size, per_batch)]
