"""Which GPU decodes a frame."""

from __future__ import annotations

import torch

from tidegate.codec.base import FrameHeader
from tidegate.codec.registry import codec_numbered, needs_gpu


def gpu_for(header: FrameHeader, device: torch.device) -> torch.device | None:
    """Choose the GPU that decodes a frame: the one that it goes to, or any for what no CPU decodes; else None.

    Does not touch CUDA where neither is the case.
    """
    is_gpu_only = needs_gpu(codec_numbered(header.codec, header.codec_version).name)
    if device.type != "cuda":
        return torch.device("cuda", torch.cuda.current_device()) if is_gpu_only and torch.cuda.is_available() else None
    if is_gpu_only:
        return device  # whose error says what is missing, if anything is
    from tidegate.codec.device_decode import undecodable_reason

    return device if undecodable_reason(header, device) is None else None
