"""Which codecs a device encodes with, and how much of its memory that takes: the largest shape that fits is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tidegate.codec.errors import CodecUnavailableError
from tidegate.codec.registry import needs_gpu

from .chunk_sizes import HOST_CHUNK_BYTES
from .delta_save import RESIDUALS_BY_RANS

PORTABLE_CODEC = "zstd"
"""What `auto` is where a checkpoint is encoded on the CPU, or stands alone: it decodes on every machine, and fast."""
AUTO_CODECS = ("rans", "zstd", "ans", "raw")
"""What `auto` chooses from on a GPU, as far as it works there. The first is for chunks of which nothing is known."""
SMALL_CHUNK_BYTES = 64 << 10
"""Below it rans gains nothing on the CPU: a chunk costs it 0.7 ms whatever its length, and a table 100 bytes."""

CHUNKS_TO_VERIFY = 7
"""Decoding takes a chunk of output, one of planes and, of nvCOMP's Zstd, 3.1 for scratch; comparing takes one more."""

_DIGEST_BYTES = 1 << 18
"""More than a slot has for sums and digest of the longest chunk."""

_LANES_AND_SLOTS = ((2, 2), (1, 3), (1, 2), (1, 1))
_FIRST_TO_GO = ("zstd", "ans")
# Zstd's scratch is by far the largest; without nvCOMP's codecs rans and raw share what rans needs.


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """One way to lay out a SideStreamEncoder.

    Attributes:
        codecs: The codecs that it has.
        num_lanes: Streams that encode at the same time.
        num_slots: Chunks in flight on each.
        num_bytes: Device memory that it takes.
    """

    codecs: tuple[str, ...]
    num_lanes: int
    num_slots: int
    num_bytes: int


def host_codec_name(codec: str) -> str:
    """Return the codec for chunks that are encoded on the CPU where the user asked for `codec`."""
    return PORTABLE_CODEC if codec == "auto" or needs_gpu(codec) else codec


def small_host_codec_name(codec: str) -> str:
    """Return that for chunks of less than SMALL_CHUNK_BYTES, such as step counters and RNG states."""
    return PORTABLE_CODEC if codec == "rans" else host_codec_name(codec)


def with_residual_codecs(codecs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the codecs of an encoder whose chunks have some of `codecs`, or are residuals."""
    return (*codecs, RESIDUALS_BY_RANS) if "rans" in codecs and RESIDUALS_BY_RANS not in codecs else codecs


def device_codecs_of(
    codec: str, chunk_bytes: int, device: torch.device, room_bytes: int, *, portable: bool = False
) -> tuple[tuple[str, ...], str]:
    """Find the codecs that a device can use for what the user asked for.

    The first call compiles kernels and tries each codec: about a second, and as much memory as the codec takes. So a
    codec for which there is no room is not tried.

    Returns:
        Their names, and, where there are none, why.
    """
    from tidegate.codec.availability import unavailable_reason
    from tidegate.codec.device import DEVICE_CODEC_NUMBERS, device_encoder_bytes

    names = _names_of(codec)
    if portable:  # what may be the base of a difference is decoded on the CPU
        names = tuple(name for name in names if not needs_gpu(name))
    found, reasons = [], []
    for name in names:
        if name not in DEVICE_CODEC_NUMBERS:
            reasons.append(f"codec {name} has no encoder on GPUs")
            continue
        try:
            fits = device_encoder_bytes((name,), chunk_bytes, 1, device=device) + chunk_bytes <= room_bytes
        except CodecUnavailableError as exc:
            reasons.append(str(exc))
            continue
        reason = unavailable_reason(name, device) if fits else f"{device} has no room for the {name} encoder"
        if reason is None:
            found.append(name)
        else:
            reasons.append(reason)
    return tuple(found), "" if found else reasons[0]


def may_have_encoder(codec: str, device: torch.device) -> bool:
    """Say whether a device is likely to encode what the user asked for. Tries nothing, so it can still turn out not to.

    Loads what a snapshot or an encoder of such chunks needs in any case: kernels, and nvCOMP for codecs of its own.
    """
    from tidegate.codec.device import DEVICE_CODEC_NUMBERS, device_encoder_bytes
    from tidegate.codec.kernels import indexed, kernels_of

    name = _names_of(codec)[0]
    if name not in DEVICE_CODEC_NUMBERS:
        return False
    try:
        kernels_of(indexed(device))
        device_encoder_bytes((name,), HOST_CHUNK_BYTES, 1, device=device)
    except CodecUnavailableError:
        return False
    return True


def _names_of(codec: str) -> tuple[str, ...]:
    return AUTO_CODECS if codec == "auto" else (codec,)


def device_shapes(
    codecs: tuple[str, ...], chunk_bytes: int, device: torch.device, *, verify: bool, deltas: bool = False
) -> Iterator[DeviceShape]:
    """Yield the shapes for a device, largest first: fewer lanes and slots first, then fewer codecs.

    Args:
        codecs: Those of `device_codecs_of`.
        chunk_bytes: The longest chunk.
        device: A CUDA device.
        verify: Whether frames are decoded again there.
        deltas: Whether chunks may become differences; what is kept for these is not counted.
    """
    from tidegate.codec.device import device_encoder_bytes

    while codecs:
        for num_lanes, num_slots in _LANES_AND_SLOTS:
            names = with_residual_codecs(codecs) if deltas else codecs
            lane_bytes = device_encoder_bytes(names, chunk_bytes, num_slots, device=device)
            slot_bytes = (1 + deltas) * chunk_bytes + deltas * _DIGEST_BYTES
            num_bytes = num_lanes * (lane_bytes + num_slots * slot_bytes) + verify * CHUNKS_TO_VERIFY * chunk_bytes
            yield DeviceShape(codecs, num_lanes, num_slots, num_bytes)
        going = next((name for name in _FIRST_TO_GO if name in codecs and len(codecs) > 1), None)
        codecs = tuple(name for name in codecs if name != going) if going else ()
