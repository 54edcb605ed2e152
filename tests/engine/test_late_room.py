"""Encoders that take host memory for a frame when it is encoded, as a GPU's does, beside one that takes it first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import tidegate
from tests.faults.rig import CHUNK, assert_nothing_lent
from tests.kit.bits import assert_same_bits
from tests.kit.stores import SlowStore
from tidegate.buffers import BufferPool
from tidegate.codec.base import FrameHeader
from tidegate.codec.frame import encode_frame
from tidegate.codec.registry import codec_named
from tidegate.encode import ChunkEncoder, EncodedFrame, Room, copied_bytes, output_bytes, read_chunk
from tidegate.job import SaveJob, StagedChunk
from tidegate.rooms import HostRoom
from tidegate.snapshot import SnapshotMode
from tidegate.storage import MemoryStore

NUM_CHUNKS = 24


class LateEncoder:
    """Encodes into memory of its own, and says so at once for some chunks, for others only when it must."""

    takes_room_late = True

    def __init__(self, outputs: BufferPool, depth: int) -> None:
        self.depth = depth
        self._outputs = outputs

    def try_reserve(self, job: SaveJob, num_bytes: int) -> HostRoom:
        return HostRoom(self._outputs, output_bytes(num_bytes))

    reserve = try_reserve

    def start(self, job: SaveJob, staged: StagedChunk, room: Room) -> LateTicket:
        assert isinstance(room, HostRoom)
        if staged.buffer is not None:
            raw = copied_bytes(staged.buffer, staged.chunk.num_bytes).clone()
            staged.buffer.release()
        else:
            raw = torch.empty(staged.chunk.num_bytes, dtype=torch.uint8)
            read_chunk(staged, raw)
            job.live_chunk_was_read()
        frame = torch.empty(output_bytes(raw.numel()), dtype=torch.uint8)
        return LateTicket(job, staged, room, frame, encode_frame(codec_named("zstd"), raw, staged.chunk.word, frame))


@dataclass
class LateTicket:
    job: SaveJob
    staged: StagedChunk
    room: HostRoom
    frame: torch.Tensor
    header: FrameHeader

    waits_for_room = False

    def advance(self, *, may_take_room: bool) -> bool:
        return may_take_room and self.staged.chunk.index % 3 > 0 and self.room.try_take()

    def await_read(self) -> None:
        """It has been."""

    def finish(self) -> EncodedFrame:
        buffer = self.room.take(self.job)
        buffer.tensor[: self.header.padded_bytes] = self.frame[: self.header.padded_bytes]
        return EncodedFrame(self.staged.chunk, self.header, buffer.view[: self.header.padded_bytes], self.room)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_buffers", [1, 2, 3, 5])
@pytest.mark.parametrize("run", [1, 2, 5], ids=lambda run: f"turns of {run}")
@pytest.mark.parametrize("snapshot", ["host", "lazy"])
def test_frames_never_wait_for_frames_behind_them(snapshot: SnapshotMode, run: int, num_buffers: int) -> None:
    """Chunks go by turns to both kinds, which have one pool; however small it is, each save ends and is whole."""
    store = SlowStore(MemoryStore(), bytes_per_s=50e6)
    state = {str(i): torch.randn(CHUNK // 4) for i in range(NUM_CHUNKS)}
    with tidegate.CheckpointEngine(store, codec="zstd", snapshot=snapshot, chunk_bytes=CHUNK) as engine:
        resources = engine._resources
        resources.outputs.budget.resize(int(num_buffers * output_bytes(CHUNK) / resources.options.watermarks[0]) + 1)
        used: set[ChunkEncoder] = set()
        kinds: list[ChunkEncoder] = [LateEncoder(resources.outputs, depth=4), resources._host_encoder]

        def by_turns(job: SaveJob, staged: StagedChunk) -> ChunkEncoder:
            used.add(kind := kinds[staged.chunk.index // run % 2])
            return kind

        resources.encoder_for = by_turns  # type: ignore[method-assign]
        for step in range(2):
            engine.save_async(state, step=step)
            engine.wait()
            assert len(used) == 2
            assert_same_bits(engine.load(step), state)
        assert_nothing_lent(engine)
    store.close()
