"""How long chunks of CUDA tensors are where the user has not said: as long as their devices have room for."""

from __future__ import annotations

from collections import Counter

import torch

from .chunk_sizes import ENCODER_CHUNKS, HOST_CHUNK_BYTES, device_chunk_bytes, useful_chunk_bytes
from .device_shapes import CHUNKS_TO_VERIFY, may_have_encoder
from .options import Options
from .snapshot import headroom_bytes
from .table import StateTable


def choose_device_bytes(options: Options, table: StateTable | None = None) -> int:
    """Choose the longest chunk of CUDA tensors by the smallest of the devices that this process sees.

    All of them count, so that states on some of them have the same chunks as states on others. Needs CUDA.

    Args:
        options: The engine's options. A device budget counts as the device's memory: snapshot and encoder share it, so
            a larger encoder would leave less to the snapshot.
        table: The first state with tensors there; what its snapshot will take is no room, and an encoder is no larger
            than it needs. None: it is not known yet.

    Returns:
        Bytes; those of chunks in host memory where such tensors are encoded on the CPU.
    """
    extents = zip(table.extent_devices, table.extent_bytes, strict=True) if table is not None else ()
    state_bytes: Counter[torch.device] = Counter()
    for device, num_bytes in extents:
        if device.type == "cuda":
            state_bytes[device] += num_bytes
    devices = list(state_bytes) or [torch.device("cuda")]
    if not all(may_have_encoder(options.codec, device) for device in devices):
        return HOST_CHUNK_BYTES
    total_bytes = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    if options.device_budget_bytes is not None:
        total_bytes = min(total_bytes, options.device_budget_bytes)
    room_bytes = min(_room_bytes(options, device, state_bytes[device]) for device in devices)
    encoder_chunks = ENCODER_CHUNKS + CHUNKS_TO_VERIFY * (options.verify == "decode")
    size = device_chunk_bytes(total_bytes, room_bytes, encoder_chunks=encoder_chunks)
    return size if table is None else useful_chunk_bytes(size, sum(table.extent_bytes))


def _room_bytes(options: Options, device: torch.device, state_bytes: int) -> int:
    """What a device has free for an encoder, once it has its snapshot."""
    free_bytes = torch.cuda.mem_get_info(device)[0]
    if options.device_budget_bytes is not None:
        return min(free_bytes, options.device_budget_bytes)
    free_bytes -= headroom_bytes(device)
    is_copied = options.snapshot != "host" and state_bytes <= free_bytes
    return free_bytes - state_bytes if is_copied else free_bytes
