"""Frames made and read on a GPU, and what FRAME.md promises of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.codec.base import (
    DEFLATE_CODEC,
    PLANES_CODEC,
    RANS_CODEC,
    RAW_CODEC,
    ZSTD_CODEC,
    FrameHeader,
    frame_bound_bytes,
)
from tidegate.codec.device import DeviceDecoder, DeviceEncoder
from tidegate.codec.digest import digest
from tidegate.codec.errors import CorruptionError, UnknownCodecError
from tidegate.codec.frame import decode_frame, encode_frame
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType

CPU_READS = (RAW_CODEC, ZSTD_CODEC, DEFLATE_CODEC, RANS_CODEC, PLANES_CODEC)
"""Numbers of the codecs whose frames any machine reads."""
NO_BLOCK_TABLE = (RAW_CODEC, RANS_CODEC, PLANES_CODEC)
"""Numbers of the codecs whose bodies begin with no table of blocks; test_rans.py and test_planes.py look at those."""


def on_device(chunk: NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Copy to the device; done when it returns."""
    tensor = torch.from_numpy(chunk.copy()).to(device)
    torch.cuda.synchronize(device)
    return tensor


def encode(
    encoder: DeviceEncoder, chunk: NDArray[np.uint8], word: WordType, device: torch.device, codec: str | None = None
) -> tuple[FrameHeader, torch.Tensor]:
    """Encode, by the encoder's first codec or another, and copy the body out of the slot."""
    ticket = encoder.start(on_device(chunk, device), word, codec or encoder.codecs[0])
    header, body = ticket.finish()
    copy = body.clone()
    torch.cuda.synchronize(device)
    ticket.release()
    return header, copy


def decode(
    decoder: DeviceDecoder, header: FrameHeader, body: torch.Tensor, *, verified: bool = False
) -> NDArray[np.uint8]:
    """Decode into memory that is poisoned first."""
    out = torch.full((header.raw_bytes,), 0xA5, dtype=torch.uint8, device=body.device)
    torch.cuda.synchronize(body.device)
    decoder.decode(header, body, body.cpu().numpy(), out, body_verified=verified).wait()
    return out.cpu().numpy()


def count_refused(
    decoder: DeviceDecoder, header: FrameHeader, chunk: NDArray[np.uint8], bodies: Iterable[NDArray[np.uint8]]
) -> int:
    """Decode damaged bodies whose digest is taken for granted: each is refused, or gives the chunk. Counts refusals."""
    num_refused = 0
    for body in bodies:
        try:
            out = decode(decoder, header, torch.from_numpy(body).cuda(), verified=True)
        except (CorruptionError, UnknownCodecError):
            num_refused += 1
        else:
            assert out.tobytes() == chunk.tobytes()
    return num_refused


def frame_of(header: FrameHeader, body: torch.Tensor) -> torch.Tensor:
    """Put header and body together on the host."""
    return torch.cat([torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8), body.cpu()])


def read_on_cpu(frame: torch.Tensor, raw_bytes: int) -> NDArray[np.uint8]:
    """Decode by the CPU."""
    out = torch.full((raw_bytes,), 0xA5, dtype=torch.uint8)
    decode_frame(frame, out)
    return out.numpy()


def check_frame(
    encoder: DeviceEncoder, decoder: DeviceDecoder, chunk: NDArray[np.uint8], word: WordType, device: torch.device
) -> FrameHeader:
    """Encode and hold the frame against all that FRAME.md promises."""
    header, body = encode(encoder, chunk, word, device)
    stored = body.cpu().numpy()
    assert (header.raw_bytes, header.body_bytes, header.word) == (chunk.size, stored.size, word)
    assert header.raw_digest == digest(chunk)
    assert header.body_digest == digest(stored)
    if header.codec == RAW_CODEC:
        assert header.body_bytes == header.raw_bytes
        expected = torch.zeros(frame_bound_bytes(chunk.size), dtype=torch.uint8)
        encode_frame(codec_named("raw"), torch.from_numpy(chunk.copy()), word, expected)
        assert frame_of(header, body).numpy().tobytes() == expected.numpy()[: header.frame_bytes].tobytes()
    else:
        assert header.body_bytes < header.raw_bytes
    assert decode(decoder, header, body).tobytes() == chunk.tobytes()
    assert decode(decoder, header, body, verified=True).tobytes() == chunk.tobytes()
    if header.codec in CPU_READS:
        assert read_on_cpu(frame_of(header, body), chunk.size).tobytes() == chunk.tobytes()
    return header
