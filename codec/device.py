"""Frames on a CUDA device: the names that the engine uses. What runs without a GPU never imports this module."""

from __future__ import annotations

from .device_blocks import DEVICE_CODEC_NUMBERS
from .device_decode import Check, DeviceDecoder
from .device_encode import DeviceEncoder, Ticket, device_encoder_bytes

__all__ = [
    "DEVICE_CODEC_NUMBERS",
    "Check",
    "DeviceDecoder",
    "DeviceEncoder",
    "Ticket",
    "device_encoder_bytes",
]
