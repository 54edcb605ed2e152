"""What an encoder knows of nvCOMP's output slots, tried on host memory."""

from __future__ import annotations

import ctypes

import torch

from tidegate.codec.cuda_driver import CudaDriver
from tidegate.codec.device_buffers import OutputSlots

SLOTS_BYTES = 4096


class HostDriver(CudaDriver):
    """Fills host memory, at once."""

    def __init__(self) -> None:
        self.num_filled_bytes = 0

    def fill(self, target: int, value: int, num_bytes: int, stream: int) -> None:
        ctypes.memset(target, value, num_bytes)
        self.num_filled_bytes += num_bytes


def test_slots_are_filled_once_while_the_gather_clears_them() -> None:
    driver, slots = HostDriver(), OutputSlots(torch.full((SLOTS_BYTES,), 0xA5, dtype=torch.uint8))
    for num_bytes in (100, SLOTS_BYTES, 200):
        slots.clear(driver, 0)
        assert not slots.memory.any()
        slots.mark_written(num_bytes)
        slots.memory[:num_bytes] = 7
        slots.memory[:num_bytes] = 0  # the gather
        slots.mark_clear()
    assert driver.num_filled_bytes == SLOTS_BYTES


def test_what_others_wrote_is_cleared() -> None:
    driver, slots = HostDriver(), OutputSlots(torch.zeros(SLOTS_BYTES, dtype=torch.uint8))
    slots.clear(driver, 0)
    for num_bytes in (300, 1000, 100):
        slots.mark_written(num_bytes)
        slots.memory[:num_bytes] = 7
    slots.clear(driver, 0)
    assert not slots.memory.any()
    assert driver.num_filled_bytes == SLOTS_BYTES + 1000
