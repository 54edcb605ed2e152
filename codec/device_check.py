"""What the GPU found out about a frame, on its way to the host: is its body, is its chunk what was written?"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .base import RAW_CODEC, FrameHeader
from .device_report import FAILED_WORD, STATE_WORDS, digest_words, read_digest
from .errors import CorruptionError
from .kernels import indexed, kernels_of

PADDING_WORD = 0
"""Of a decode's report: how many bytes between its body's blocks, or fields of values, are not zero and must be."""


class _Report:
    """A report that is copied to the host.

    Args:
        report: int64[words], on a device.
        stream: The stream that writes it, current in PyTorch.
        keep: Tensors that the stream uses until it has written it.
    """

    def __init__(self, report: torch.Tensor, stream: torch.cuda.Stream, keep: tuple[torch.Tensor, ...]) -> None:
        self._keep = keep
        self._words = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        self._words.copy_(report, non_blocking=True)
        self._done = torch.cuda.Event(blocking=True)
        self._done.record(stream)

    def wait(self) -> NDArray[np.uint64]:
        self._done.synchronize()
        self._keep = ()
        words: NDArray[np.uint64] = self._words.numpy().view(np.uint64)
        return words


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


def check_body(header: FrameHeader, body: torch.Tensor, stream: torch.cuda.Stream) -> BodyCheck:
    """Enqueue the digest of a frame's body. Any thread may call it; does not wait for the device.

    Args:
        header: The frame's header.
        body: uint8[body_bytes] on the stream's device, contiguous, its address a multiple of 16.
        stream: Where it runs; it must already wait for whoever wrote the body.

    Returns:
        The check to wait for before the body is decoded. It keeps `body` alive until then.

    Raises:
        CodecUnavailableError: If CuPy is missing.
    """
    kernels = kernels_of(indexed(body.device))
    with torch.cuda.stream(stream), kernels.on(stream):
        words = torch.zeros(digest_words(header.body_bytes), dtype=torch.int64, device=body.device)
        kernels.piece_digests(body.data_ptr(), header.body_bytes, words.data_ptr())
        return BodyCheck(header, _Report(words, stream, (body,)))


class Check:
    """The outcome of one decode. Made by DeviceDecoder.decode, with its stream current in PyTorch.

    Args:
        header: The frame's header.
        report: int64[report_words(raw_bytes, num_digests=1)], on the device.
        stream: The stream that decodes.
        keep: Tensors that must stay alive until the decoding is over.
    """

    def __init__(
        self,
        header: FrameHeader,
        report: torch.Tensor,
        stream: torch.cuda.Stream,
        keep: tuple[torch.Tensor, ...],
    ) -> None:
        self._header = header
        self._report = _Report(report, stream, keep)

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
