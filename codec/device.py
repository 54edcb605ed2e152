"""Frames on a CUDA device: the names that the engine uses. What runs without a GPU never imports this module."""

from __future__ import annotations

from .device_blocks import DEVICE_CODEC_NUMBERS
from .device_check import Check
from .device_decode import DeviceDecoder
from .device_encode import DeviceEncoder, device_encoder_bytes
from .device_ticket import Ticket

__all__ = [
    "DEVICE_CODEC_NUMBERS",
    "Check",
    "DeviceDecoder",
    "DeviceEncoder",
    "Ticket",
    "device_encoder_bytes",
]
