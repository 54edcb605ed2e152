"""Page-aligned memory."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from tidegate.storage.aligned import aligned_buffer, touch
from tidegate.storage.base import ALIGNMENT_BYTES


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, (2 << 20) + 5])
def test_it_is_aligned_zeroed_and_of_the_length_asked_for(num_bytes: int) -> None:
    view = aligned_buffer(num_bytes)
    assert (view.nbytes, view.format, view.ndim, view.readonly) == (num_bytes, "B", 1, False)
    array = np.frombuffer(view, np.uint8)
    assert array.ctypes.data % ALIGNMENT_BYTES == 0 or num_bytes == 0
    assert not array.any()


def test_it_lives_as_long_as_what_was_made_of_it() -> None:
    array = np.frombuffer(aligned_buffer(1 << 20), np.uint8)
    array[:] = 7
    gc.collect()
    others = [aligned_buffer(1 << 20) for _ in range(10)]
    for other in others:
        other[:] = bytes(1 << 20)
    assert (array == 7).all()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_touched_memory_is_there_and_zero() -> None:
    num_bytes = (64 << 20) + 4096 + 1
    before, view = resident_bytes(), aligned_buffer(num_bytes)
    assert resident_bytes() - before < num_bytes // 8
    touch(view)
    assert resident_bytes() - before > num_bytes * 7 // 8
    assert not np.frombuffer(view, np.uint8).any()
    touch(aligned_buffer(0))


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        aligned_buffer(-1)
