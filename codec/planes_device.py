"""The planes codec on a CUDA device: the kernels of fields.cu and streams.cu, and those of rans, from the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from .base import RANS_CODEC, RAW_CODEC, FrameHeader
from .device_check import PADDING_WORD
from .device_plan import BUFFER_ALIGNMENT_BYTES, round_up
from .device_report import WORD_BYTES
from .host_rooms import HostRooms
from .kernels import Kernels
from .planes_body import START_BYTES, StreamBody, read_entries, stream_words
from .planes_plan import TILE_BYTES, VALUES_PER_BLOCK, PlanesRoom
from .rans_device import RansEncoder, decode_rans
from .rans_format import start_bound_bytes
from .registry import codec_numbered
from .words import WordType

_MAX_ROOMS = 256
# Kept: a save has chunks of few lengths, and comes back to them.


class PlanesEncoder:
    """Makes the bodies of one of PLANES_ON_GPU. Allocates nothing.

    Args:
        codec: Its name.
        kernels: Those of the device.
        room: Address of `planes_encoder_memory(…).planes` bytes, which other codecs may use in between.
        rans: Encodes streams, of up to a chunk's length.

    Raises:
        CodecUnavailableError: If CuPy cannot compile the kernels for this device.
    """

    def __init__(self, codec: str, kernels: Kernels, room: int, rans: RansEncoder) -> None:
        kernels.load_planes()
        self._codec = codec
        self._kernels = kernels
        self._room = room
        self._rans = rans
        self._rooms: dict[tuple[WordType, int], PlanesRoom] = {}

    def enqueue(self, raw: int, raw_bytes: int, word: WordType, body: int, report: int, stream: int) -> bool:
        """Enqueue all that makes a body, inside `Kernels.on(stream)`. See RansEncoder.enqueue for the arguments.

        Returns:
            False where no body could be shorter than the chunk; nothing is enqueued then.
        """
        if raw_bytes <= START_BYTES:
            return False
        room, words = self._room_of(word, raw_bytes), stream_words(word)
        places = [part.place for part in room.streams]
        grid = _fields_grid(word, raw_bytes)
        self._kernels.launch(f"split_fields_{int(word)}", grid, raw, raw_bytes, *places)
        coded = 0
        for i, part in enumerate(room.streams):
            if part.coded and self._rans.enqueue(part.place, part.num_bytes, words[i], part.coded, part.report, stream):
                coded |= 1 << i
        self._kernels.launch(
            "append_streams",
            -(-raw_bytes // TILE_BYTES),
            report,
            body,
            raw_bytes,
            room.reports,
            *places,
            *(part.coded for part in room.streams),
            *(part.num_bytes for part in room.streams),
            coded,
            sum(int(of_stream) << 8 * i for i, of_stream in enumerate(words)),
        )
        return True

    def _room_of(self, word: WordType, raw_bytes: int) -> PlanesRoom:
        room = self._rooms.get((word, raw_bytes))
        if room is None:
            if len(self._rooms) == _MAX_ROOMS:
                self._rooms.clear()
            room = self._rooms[word, raw_bytes] = PlanesRoom.at(self._room, self._codec, word, raw_bytes)
        return room


def decode_fields(
    kernels: Kernels,
    rooms: HostRooms,
    header: FrameHeader,
    start: NDArray[np.uint8],
    body: torch.Tensor,
    out: torch.Tensor,
    report: int,
    take_room: Callable[[int], torch.Tensor],
) -> None:
    """Enqueue the decoding of a body, inside `Kernels.on`, with the same stream current in PyTorch.

    Waits for the stream where `start` lacks what the host must see of a stream's own body, and where a stream is of a
    codec that is decoded on the CPU here (zstd, deflate).

    Args:
        kernels: Those of the device.
        rooms: Those of the stream.
        header: The frame's header.
        start: uint8[START_BYTES or more], the host's copy of the start of the body.
        body: uint8[body_bytes] on the device, its address a multiple of 16, its digest checked.
        out: uint8[raw_bytes] on the device, its address a multiple of 16.
        report: Address of a report, whose words count what did not decode and what is not zero where it must be.
        take_room: Returns uint8[so many] on the device, at a multiple of 16, for this call.

    Raises:
        CodecUnavailableError: If CuPy cannot compile the kernels for this device.
        CorruptionError, UnknownCodecError: If the start of the body, or that of a stream's, does not hold.
    """
    parts = read_entries(header, start)
    kernels.load_planes()
    sizes = [0 if part.inner.codec == RAW_CODEC else part.inner.raw_bytes for part in parts]
    padded = [round_up(size, BUFFER_ALIGNMENT_BYTES) for size in sizes]
    room = take_room(sum(padded)) if any(sizes) else body
    places, at = [], 0
    for part, size, step in zip(parts, sizes, padded, strict=True):
        if part.inner.codec == RAW_CODEC:
            places.append(body.data_ptr() + part.start)
            continue
        stream = room[at : at + size]
        _decode_stream(kernels, rooms, part, start, body, stream, report)
        places.append(stream.data_ptr())
        at += step
    wrong = report + PADDING_WORD * WORD_BYTES
    kernels.launch("check_ends", 1, body.data_ptr(), *(part.end for part in parts), wrong)
    grid = _fields_grid(header.word, header.raw_bytes)
    kernels.launch(f"join_fields_{int(header.word)}", grid, *places, out.data_ptr(), header.raw_bytes, wrong)


def _decode_stream(
    kernels: Kernels,
    rooms: HostRooms,
    part: StreamBody,
    start: NDArray[np.uint8],
    body: torch.Tensor,
    stream: torch.Tensor,
    report: int,
) -> None:
    inner, own = part.inner, body[part.start : part.end]
    if inner.codec == RANS_CODEC:
        seen_bytes = min(inner.body_bytes, start_bound_bytes(inner.raw_bytes))
        seen = start[part.start : part.start + seen_bytes]
        if seen.size < seen_bytes:
            seen = own[:seen_bytes].cpu().numpy()
        decode_rans(kernels, rooms, inner, seen, own, stream, report)
        return
    raw = np.empty(inner.raw_bytes, dtype=np.uint8)
    codec_numbered(inner.codec, inner.codec_version).decode_body(inner, own.cpu().numpy(), raw)
    stream.copy_(torch.from_numpy(raw))


def _fields_grid(word: WordType, raw_bytes: int) -> int:
    return max(1, -(-(raw_bytes // word.itemsize) // VALUES_PER_BLOCK))
