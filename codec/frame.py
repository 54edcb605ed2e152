"""Chunk in, frame out, and back, in host memory. FRAME.md gives the bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .base import HEADER_BYTES, RAW_CODEC, Codec, FrameHeader, frame_bound_bytes, unpack_header
from .digest import digest
from .errors import CorruptionError, TruncatedError
from .raw import RawCodec
from .registry import codec_numbered
from .words import WordType

_RAW = RawCodec()


def encode_frame(codec: Codec, raw: torch.Tensor, word: WordType, out: torch.Tensor) -> FrameHeader:
    """Encode one chunk: header, body, and zero bytes up to the frame's padded length. Thread-safe.

    Blocks; the heavy part runs without the GIL.

    Args:
        codec: Who writes the body; where it would not save bytes the chunk is stored as it is.
        raw: uint8[raw_bytes], 1-D, contiguous, on the CPU; it must not change meanwhile.
        word: What one value of the chunk is.
        out: uint8[at least frame_bound_bytes(raw_bytes)], 1-D, contiguous, on the CPU, not overlapping `raw`.
            What lies behind the frame's padded length afterwards is undefined.

    Returns:
        The header that was written; its padded_bytes is how much of `out` the frame takes.

    Raises:
        ValueError: If a tensor is not of the form above, or raw_bytes is no multiple of the word's itemsize.
        CodecUnavailableError: If the codec cannot run on this machine.
    """
    chunk, room = _array("raw", raw), _array("out", out)
    if chunk.size % word.itemsize:
        raise ValueError(f"raw has {chunk.size} bytes, which is no whole number of {word.name} values")
    bound = frame_bound_bytes(chunk.size)
    if room.size < bound:
        raise ValueError(f"out has {room.size} bytes and a frame of {chunk.size} raw bytes may need {bound}")
    body = room[HEADER_BYTES : HEADER_BYTES + chunk.size]
    raw_digest = digest(chunk)
    body_bytes = codec.encode_body(chunk, word, body) if chunk.size else None
    if body_bytes is None:
        np.copyto(body, chunk)
        header = FrameHeader(_RAW.number, _RAW.version, word, chunk.size, chunk.size, raw_digest, raw_digest)
    else:
        body_digest = digest(body[:body_bytes])
        header = FrameHeader(codec.number, codec.version, word, chunk.size, body_bytes, raw_digest, body_digest)
    room[:HEADER_BYTES] = np.frombuffer(header.pack(), dtype=np.uint8)
    room[header.frame_bytes : header.padded_bytes] = 0
    return header


def decode_frame(frame: torch.Tensor, out: torch.Tensor) -> FrameHeader:
    """Decode one frame and check all that FRAME.md asks a reader to check. Thread-safe.

    Blocks; the heavy part runs without the GIL.

    Args:
        frame: uint8[at least the frame's length], 1-D, contiguous, on the CPU; bytes behind the frame are ignored.
        out: uint8[raw_bytes], 1-D, contiguous, on the CPU, not overlapping `frame`; undefined after an error.

    Returns:
        The frame's header.

    Raises:
        ValueError: If a tensor is not of the form above.
        TruncatedError: If `frame` ends before the frame does.
        CorruptionError: If anything is not what was written, or the chunk is not as long as `out`.
        UnknownCodecError: If the frame was written by a codec or a version that this build does not know.
        CodecUnavailableError: If its codec cannot run on this machine.
    """
    octets, room = _array("frame", frame), _array("out", out)
    header = unpack_header(octets)
    if header.raw_bytes != room.size:
        raise CorruptionError(
            f"the frame holds {header.raw_bytes} raw bytes where {room.size} are expected; load an earlier checkpoint"
        )
    if octets.size < header.frame_bytes:
        raise TruncatedError(
            f"the frame ends after {octets.size} of {header.frame_bytes} bytes; load an earlier checkpoint"
        )
    body = octets[HEADER_BYTES : header.frame_bytes]
    _check_digest("body", header.body_digest, digest(body))
    codec_numbered(header.codec, header.codec_version).decode_body(header, body, room)
    # A raw body has just been hashed; what it decodes to is the same bytes.
    _check_digest("chunk", header.raw_digest, header.body_digest if header.codec == RAW_CODEC else digest(room))
    return header


def _array(name: str, tensor: torch.Tensor) -> NDArray[np.uint8]:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a 1-D contiguous uint8 tensor on the CPU, not {tensor.dtype} "
            f"of shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}"
        )
    array: NDArray[np.uint8] = tensor.numpy()
    return array


def _check_digest(name: str, promised: int, actual: int) -> None:
    if actual != promised:
        raise CorruptionError(
            f"the {name} has digest {actual:016x} and the frame header promises {promised:016x}: "
            "the bytes have changed since they were written; load an earlier checkpoint"
        )
