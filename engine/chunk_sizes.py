"""How long chunks are: by where their tensors lie, and by how much memory there is. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

HOST_CHUNK_BYTES = 64 << 20
"""The longest chunk of tensors in host memory, and the least that chunks of CUDA tensors are cut by."""
MAX_DEVICE_CHUNK_BYTES = 256 << 20
"""What a chunk costs the interpreter does not depend on its length, so longer ones leave more to the training."""

ENCODER_CHUNKS = 16
"""Device memory of an encoder at its largest (device_shapes), in chunks, where these are longer than 64 MiB."""

_SMALL_CHUNK_BYTES = 4 << 20
_MIN_NUM_CHUNKS = 16
_MIN_NUM_LONG_CHUNKS = 32
"""So many at least, where chunks of CUDA tensors are longer than those in host memory: a save lasts one more chunk than
its slower stage."""

_PARTS_OF_DEVICE = 512
_ENCODER_PARTS_OF_DEVICE = 32


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """The longest chunks.

    Attributes:
        host_bytes: Of tensors in host memory; a multiple of 4,096.
        device_bytes: Of tensors on CUDA devices; a multiple of 4,096, at least `host_bytes`.
    """

    host_bytes: int
    device_bytes: int

    def on(self, device: str) -> int:
        """Return the longest chunk on a device, such as "cpu" or "cuda:0"."""
        return self.device_bytes if device.startswith("cuda") else self.host_bytes

    def for_state(self, raw_bytes: int) -> ChunkSizes:
        """Return the sizes that a state of so many bytes is cut by, so that stages overlap in a small one too."""
        host_bytes = min(self.host_bytes, max(_SMALL_CHUNK_BYTES, raw_bytes // _MIN_NUM_CHUNKS // 4096 * 4096))
        return ChunkSizes(host_bytes, max(host_bytes, min(self.device_bytes, _long_chunk_bytes(raw_bytes))))


def device_chunk_bytes(total_bytes: int, room_bytes: int | None = None, *, encoder_chunks: int = ENCODER_CHUNKS) -> int:
    """Choose the longest chunk of CUDA tensors: a power of two from 64 to 256 MiB, at most 1/512 of a device.

    Where an encoder of such chunks would take more than 1/32 of the device, or than there is room for, they are
    shorter, down to 64 MiB.

    Args:
        total_bytes: Memory of the device, or what the user allows of it.
        room_bytes: What of it an encoder may take; None: all.
        encoder_chunks: What it takes, in chunks.
    """
    most_bytes = total_bytes // _ENCODER_PARTS_OF_DEVICE
    if room_bytes is not None:
        most_bytes = min(most_bytes, room_bytes)
    size = MAX_DEVICE_CHUNK_BYTES
    while size > HOST_CHUNK_BYTES and (size > total_bytes // _PARTS_OF_DEVICE or encoder_chunks * size > most_bytes):
        size //= 2
    return size


def useful_chunk_bytes(size: int, raw_bytes: int) -> int:
    """Shorten a size of `device_chunk_bytes` to the longest chunk of a state of so many bytes, but not below 64 MiB."""
    return max(HOST_CHUNK_BYTES, min(size, _long_chunk_bytes(raw_bytes)))


def _long_chunk_bytes(raw_bytes: int) -> int:
    return raw_bytes // _MIN_NUM_LONG_CHUNKS // 4096 * 4096
