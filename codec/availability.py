"""Which codecs really work on a CUDA device, found out by a small round trip. An import is no proof."""

from __future__ import annotations

import functools
import threading

import torch

from .device import DEVICE_CODEC_NUMBERS, DeviceDecoder, DeviceEncoder
from .errors import CodecError, CodecUnavailableError
from .kernels import indexed
from .words import WordType

_PROBE_BYTES = 64 << 10
_LOCK = threading.Lock()


def device_codecs(device: torch.device) -> frozenset[str]:
    """Return the names of the codecs that work on a device, of those in `DEVICE_CODEC_NUMBERS`.

    The first call for a device compiles kernels and encodes a little with each: about two seconds, and for a moment up
    to 600 MB of device memory (nvCOMP's Zstd). The answer is remembered, except for want of memory.

    Args:
        device: Any device; one without CUDA has none.
    """
    return frozenset(name for name in DEVICE_CODEC_NUMBERS if unavailable_reason(name, device) is None)


def unavailable_reason(codec: str, device: torch.device) -> str | None:
    """Return why a codec does not work on a device and what to do about it, or None if it works.

    Args:
        codec: A name; the GPU has those in `DEVICE_CODEC_NUMBERS`.
        device: Any device.
    """
    if codec not in DEVICE_CODEC_NUMBERS:
        return f"there is no codec {codec!r} on a GPU; there are {', '.join(DEVICE_CODEC_NUMBERS)}"
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device} is no NVIDIA GPU that this PyTorch can use; encode on the CPU"
    try:
        with _LOCK:
            return _probe(codec, indexed(device))
    except torch.OutOfMemoryError as exc:
        return f"{device} has too little free memory for {codec}: {exc}"


def require_device_codec(codec: str, device: torch.device) -> None:
    """Do nothing if the codec works on the device.

    Raises:
        CodecUnavailableError: If it does not; the text says what to install.
    """
    reason = unavailable_reason(codec, device)
    if reason is not None:
        raise CodecUnavailableError(f"codec {codec} cannot run on {device}: {reason}")


@functools.cache
def _probe(codec: str, device: torch.device) -> str | None:
    try:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            raw = (torch.arange(_PROBE_BYTES // 4, device=device) // 7).to(torch.float32).view(torch.uint8)
        encoder = DeviceEncoder([codec], _PROBE_BYTES, device, stream, num_slots=1)
        ticket = encoder.start(raw, WordType.F32, codec)
        header, body = ticket.finish()
        with torch.cuda.stream(stream):
            out = torch.empty_like(raw)
        decoder = DeviceDecoder(_PROBE_BYTES, device, stream)
        decoder.decode(header, body, body.cpu().numpy().data, out).wait()
    except CodecError as exc:
        return str(exc)
    if header.codec != DEVICE_CODEC_NUMBERS[codec]:
        return f"{codec} did not shrink a chunk that shrinks, on {torch.cuda.get_device_name(device)}"
    if not bool((out == raw).all()):
        return f"a small round trip through {codec} came back changed on {torch.cuda.get_device_name(device)}"
    return None
