"""Views of a device snapshot are made once, by whichever thread asks first; small chunks are copied with care."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tidegate.chunk_sizes import ChunkSizes
from tidegate.device_layout import DeviceLayout, copy_chunk, copy_live_chunk
from tidegate.errors import TornSnapshotError
from tidegate.plan import Chunk
from tidegate.planned import plan_table
from tidegate.state import describe

TIMEOUT_S = 30
MIB = 1 << 20


class Snapshot:
    """A tensor whose first slice is cut while another thread asks for one."""

    def __init__(self, octets: torch.Tensor, ask: threading.Event, answered: threading.Event) -> None:
        self._octets, self._ask, self._answered = octets, ask, answered

    def __getitem__(self, index: slice) -> torch.Tensor:
        if not self._ask.is_set():
            self._ask.set()
            assert self._answered.wait(TIMEOUT_S)
        return self._octets[index]


def test_threads_that_ask_at_once_get_their_chunks() -> None:
    """For they do, where a GPU has no room for an encoder and a snapshot is encoded by several threads of the CPU."""
    tensors = [torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)]
    table = describe(tensors)
    chunks = [Chunk(i, table.extent_words[i], i, i + 1, 0, 64) for i in range(2)]
    layout = DeviceLayout(table, chunks, torch.device("cuda", 0))
    ask, answered = threading.Event(), threading.Event()
    snapshots = [Snapshot(torch.full((layout.num_bytes,), i), ask, answered) for i in range(2)]
    layout.view(torch.full((layout.num_bytes,), 9), chunks[0])  # those of an earlier snapshot
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(layout.view, snapshots[0], chunks[0])
        assert ask.wait(TIMEOUT_S)
        try:
            second = layout.view(snapshots[0], chunks[1])  # type: ignore[arg-type]
        finally:
            answered.set()
        assert first.result(TIMEOUT_S).tolist() == second.tolist() == [0] * 64
    assert layout.view(snapshots[1], chunks[1]).tolist() == [1] * 64  # type: ignore[arg-type]


@pytest.mark.parametrize("num_bytes", [4, 5056, 32 << 10, (32 << 10) + 4])
def test_a_chunk_of_one_small_tensor_is_copied_and_a_lost_storage_seen(num_bytes: int) -> None:
    x = torch.arange(num_bytes // 4, dtype=torch.int32)
    table = describe([x])
    (chunk,) = plan_table(table, ChunkSizes(1 << 20, 1 << 20)).plan.chunks
    out = torch.zeros(num_bytes, dtype=torch.uint8)
    copy_chunk(table, chunk, out)
    assert torch.equal(out.view(torch.int32), x)
    x.untyped_storage().resize_(0)
    with pytest.raises(TornSnapshotError, match="made smaller"):
        copy_chunk(table, chunk, out)


def test_small_runs_are_read_where_they_lie() -> None:
    """Into any room, empty ones among them; a chunk with gaps, or of one extent, is not for this."""
    tensors = [torch.randn(i % 7) for i in range(500)]
    table = describe(tensors)
    (chunk,) = plan_table(table, ChunkSizes(MIB, MIB)).plan.chunks
    out = torch.zeros(chunk.num_bytes + 3, dtype=torch.uint8)[3:]
    assert copy_live_chunk(table, chunk, out)
    assert torch.equal(out, torch.cat(tensors).view(torch.uint8))
    gaps = describe([torch.randn(9)[::2], torch.randn(3)])
    (chunk,) = plan_table(gaps, ChunkSizes(MIB, MIB)).plan.chunks
    assert not copy_live_chunk(gaps, chunk, out)


def test_small_runs_that_have_gone_are_not_read() -> None:
    tensors = [torch.randn(5) for _ in range(9)]
    table = describe(tensors)
    (chunk,) = plan_table(table, ChunkSizes(MIB, MIB)).plan.chunks
    tensors[4].untyped_storage().resize_(0)
    with pytest.raises(TornSnapshotError, match="made smaller"):
        copy_live_chunk(table, chunk, torch.zeros(chunk.num_bytes, dtype=torch.uint8))
