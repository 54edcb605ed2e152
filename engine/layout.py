"""Which extents a state has and where their bytes are, in numbers alone: it keeps no tensor and no memory alive."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.codec.words import WordType

from .sources import Packing
from .tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of a StateTable, where they are described, and what it takes to reach the live bytes. Never changed.

    Attributes:
        specs: The distinct kinds of tensors.
        tensor_spec: Index into `specs`, by tensor.
        tensor_extent: The extent that each tensor views.
        tensor_offset: Bytes from the start of its extent to its first element, by tensor.
        extent_bytes: Length, by extent.
        extent_words: Word type, by extent.
        extent_roles: Role, by extent.
        extent_devices: Device, by extent.
        extent_addresses: Address of the first byte, by extent; for a packed extent of its first element, 0 if empty.
        extent_starts: Bytes from the start of the storage to there, by extent.
        extent_packings: How to gather it without its gaps, by extent; None where it has none.
        extent_tensors: The tensors that view it, by extent, the first one first.
    """

    specs: list[TensorSpec]
    tensor_spec: list[int]
    tensor_extent: list[int]
    tensor_offset: list[int]
    extent_bytes: list[int]
    extent_words: list[WordType]
    extent_roles: list[str]
    extent_devices: list[torch.device]
    extent_addresses: list[int]
    extent_starts: list[int]
    extent_packings: list[Packing | None]
    extent_tensors: list[tuple[int, ...]]

    def has_extents_of(self, other: Layout) -> bool:
        """Tell whether the extents are the same, but for where in host memory those of the CPU are."""
        return (
            self.extent_bytes == other.extent_bytes
            and self.extent_words == other.extent_words
            and self.extent_roles == other.extent_roles
            and self.extent_devices == other.extent_devices
            and self.extent_packings == other.extent_packings
            and self._device_addresses() == other._device_addresses()
        )

    def _device_addresses(self) -> list[int]:
        rows = zip(self.extent_addresses, self.extent_devices, strict=True)
        return [address for address, device in rows if device.type != "cpu"]
