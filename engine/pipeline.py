"""The stages of a save: chunk i is encoded while chunk i − 1 is written.

    staged chunks ──▶ encoder (threads, or side streams and a copy to the host) ──▶ appender (the store's threads)
                         at most `depth` at once                    as many as there is room for frames

One thread, the driver, runs `Pipeline.run`. It starts chunks in the order in which they come and appends their frames
in that same order, so a file's bytes do not depend on which thread was faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from .container import FrameAppender
from .encode import ChunkEncoder, EncodedFrame, Room, Ticket
from .job import SaveJob, StagedChunk
from .report import CodecTotals


class Pipeline:
    """Move the staged chunks of one save through encoder and appender.

    Args:
        encoder_for: Chooses the encoder of a chunk. The room that it has for frames bounds those in flight.
        appender: The object that takes the frames.
    """

    def __init__(self, encoder_for: Callable[[StagedChunk], ChunkEncoder], appender: FrameAppender) -> None:
        self._encoder_for = encoder_for
        self._appender = appender
        self._started: deque[Ticket] = deque()
        self._took_room_late = False
        self._totals: dict[int, CodecTotals] = {}

    def run(self, job: SaveJob) -> dict[int, CodecTotals]:
        """Encode and append every chunk of the job. Blocks until the last is queued; appends may still be under way.

        Returns:
            Frames and bytes by codec number.

        Raises:
            BaseException: The first failure of any stage. Every ticket is finished and every staged buffer is back.
        """
        chunks = job.chunks()
        try:
            for staged in chunks:
                if staged is None:
                    self._drain(job, 0)  # nothing to start: use the time to hand on what is encoded
                    continue
                try:
                    if job.derived.start(staged.chunk.index):
                        job.drop(staged)
                    else:
                        self._start(job, staged)
                except BaseException:
                    job.drop(staged)
                    raise
            self._drain(job, 0)
        except BaseException as exc:
            job.fail(exc)
            self._abandon(job)
            raise
        return self._totals

    def _start(self, job: SaveJob, staged: StagedChunk) -> None:
        if job.failure is not None:
            raise job.failure
        encoder = self._encoder_for(staged)
        # Frames that take room before they start must not have all of it when one before them, of a GPU, wants some.
        must_wait = self._took_room_late and not encoder.takes_room_late
        self._drain(job, 0 if must_wait else encoder.depth - 1)
        self._took_room_late = encoder.takes_room_late
        room = self._room(job, encoder, staged.chunk.num_bytes)
        try:
            self._started.append(encoder.start(job, staged, room))
        except BaseException:
            room.release()
            raise
        self._advance()

    def _room(self, job: SaveJob, encoder: ChunkEncoder, num_bytes: int) -> Room:
        # Frames that are encoded but not appended take room too: append them before waiting for some.
        while self._started:
            room = encoder.try_reserve(job, num_bytes)
            if room is not None:
                return room
            self._drain(job, len(self._started) - 1)
        room = encoder.reserve(job, num_bytes)
        if room is None:
            raise job.failure or RuntimeError("a buffer pool gave up without being asked to")
        return room

    def _drain(self, job: SaveJob, num_left: int) -> None:
        while len(self._started) > num_left:
            self._advance()  # so that the frames behind are copied while the oldest is waited for
            if not num_left and job.is_reading_in_place and self._started[0].waits_for_room:
                for ticket in self._started:
                    ticket.await_read()  # or the fence would stay shut until there is room
            frame = self._started.popleft().finish()
            if frame is None:
                job.let_go()
            else:
                self._append(job, frame)

    def _advance(self) -> None:
        # In order: if later frames took the room that there is, the oldest would wait for ever.
        may_take_room = True
        for ticket in self._started:
            may_take_room = ticket.advance(may_take_room=may_take_room)

    def _append(self, job: SaveJob, frame: EncodedFrame) -> None:
        job.let_go()
        start_s = job.timeline.now()
        chunk = frame.chunk
        before = self._totals.get(frame.header.codec, CodecTotals(0, 0, 0))
        self._totals[frame.header.codec] = CodecTotals(
            before.num_frames + 1,
            before.raw_bytes + frame.header.raw_bytes,
            before.stored_bytes + frame.header.padded_bytes,
        )

        def written(future: Future[None]) -> None:
            frame.room.release()
            if future.cancelled() or (error := future.exception()) is not None:
                job.fail(RuntimeError("the write was cancelled") if future.cancelled() else error)  # type: ignore[arg-type]
            else:
                job.was_written(chunk.index, frame.header.padded_bytes, start_s)

        try:
            future = self._appender.append(chunk.index, frame.header, frame.content)
        except BaseException:
            frame.room.release()
            raise
        future.add_done_callback(written)

    def _abandon(self, job: SaveJob) -> None:
        """Give back what the save holds: let started tickets end, and take in what is still being staged."""
        for ticket in self._started:
            try:
                frame = ticket.finish()
                if frame is not None:
                    frame.room.release()
            except Exception as exc:  # noqa: BLE001 - the first failure is the one that is raised
                job.fail(exc)
        self._started.clear()
        job.take_back()
