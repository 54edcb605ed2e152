"""What the GPU found out about a frame, on its way to the host: is its body, is its chunk what was written?"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .base import RAW_CODEC, FrameHeader
from .device_report import FAILED_WORD, STATE_WORDS, digest_words, read_digest
from .errors import CorruptionError
from .host_rooms import HostRooms
from .kernels import indexed, kernels_of

PADDING_WORD = 0
"""Of a decode's report: how many bytes between its body's blocks, or fields of values, are not zero and must be."""


class _Report:
    """A report that is copied to the host.

    Args:
        report: int64[words], on a device.
        rooms: Memory for it, of the stream that writes it, inside of whose `Kernels.on` this is.
        keep: Tensors that the stream uses until it has written it.
    """

    def __init__(self, report: torch.Tensor, rooms: HostRooms, keep: tuple[torch.Tensor, ...]) -> None:
        self._keep: tuple[torch.Tensor, ...] = (report, *keep)
        self._rooms: HostRooms | None = rooms
        self._num_bytes = report.nbytes
        self._room = rooms.fetch(report.data_ptr(), self._num_bytes)
        self._words: NDArray[np.uint64] | None = None

    def wait(self) -> NDArray[np.uint64]:
        if self._words is None:
            self._room.done.synchronize()
            self._words = self._room.octets[: self._num_bytes].view(np.uint64).copy()
            if self._rooms is not None:
                self._rooms.give_back(self._room)
            self._rooms, self._keep = None, ()
        return self._words


class BodyCheck:
    """Whether a body is the one that was written. Made by `check_body`."""

    def __init__(self, header: FrameHeader, report: _Report) -> None:
        self._header = header
        self._report = report

    def wait(self) -> None:
        """Wait for the digest, without the GIL. May be called again.

        Raises:
            CorruptionError: If it is another one than the header says: the body's, or of a raw frame also the chunk's.
        """
        header = self._header
        found = read_digest(self._report.wait(), header.body_bytes)
        _check_digest("body", header.body_bytes, found, header.body_digest)
        if header.codec == RAW_CODEC:
            _check_digest("chunk", header.raw_bytes, found, header.raw_digest)


def check_body(
    header: FrameHeader, body: torch.Tensor, stream: torch.cuda.Stream, rooms: HostRooms
) -> BodyCheck:
    """Enqueue the digest of a frame's body. Does not wait for the device.

    Args:
        header: The frame's header.
        body: uint8[body_bytes] on the stream's device, contiguous, its address a multiple of 16.
        stream: Where it runs; it must already wait for whoever wrote the body.
        rooms: Those of that stream.

    Returns:
        The check to wait for before the body is decoded. It keeps `body` alive until then.

    Raises:
        CodecUnavailableError: If CuPy is missing.
    """
    kernels = kernels_of(indexed(body.device))
    with torch.cuda.stream(stream), kernels.on(stream):
        words = torch.zeros(digest_words(header.body_bytes), dtype=torch.int64, device=body.device)
        kernels.piece_digests(body.data_ptr(), header.body_bytes, words.data_ptr())
        return BodyCheck(header, _Report(words, rooms, (body,)))


class Check:
    """The outcome of one decode. Made by DeviceDecoder.decode, with its stream current in PyTorch.

    Args:
        header: The frame's header.
        report: int64[report_words(raw_bytes, num_digests=1)], on the device.
        rooms: Those of the stream that decodes.
        keep: Tensors that must stay alive until the decoding is over.
    """

    def __init__(
        self,
        header: FrameHeader,
        report: torch.Tensor,
        rooms: HostRooms,
        keep: tuple[torch.Tensor, ...],
    ) -> None:
        self._header = header
        self._report = _Report(report, rooms, keep)

    def wait(self) -> None:
        """Wait for the decoding, without the GIL. May be called again.

        Raises:
            CorruptionError: If a block did not decode, or the chunk is not the one that was encoded.
        """
        header, words = self._header, self._report.wait()
        if words[FAILED_WORD]:
            raise CorruptionError(
                f"{words[FAILED_WORD]} blocks of the frame did not decode to their length; load an earlier checkpoint"
            )
        if words[PADDING_WORD]:
            raise CorruptionError("the padding behind a block, or of a field, is not zero; load an earlier checkpoint")
        _check_digest("chunk", header.raw_bytes, read_digest(words[STATE_WORDS:], header.raw_bytes), header.raw_digest)


def _check_digest(what: str, num_bytes: int, found: int, promised: int) -> None:
    if found != promised:
        raise CorruptionError(
            f"the {what} of {num_bytes} bytes has digest {found:016x} and its header says {promised:016x}; it was "
            "damaged after it was written: load an earlier checkpoint"
        )
