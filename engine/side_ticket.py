"""Frames on their way from a device encoder to where they are written from."""

from __future__ import annotations

import numpy as np
import torch

from tidegate.codec.base import HEADER_BYTES, RAW_CODEC, FrameHeader
from tidegate.codec.device import DeviceDecoder
from tidegate.codec.device import Ticket as DeviceTicket
from tidegate.codec.errors import CorruptionError
from tidegate.storage.base import DeviceBytes

from .buffers import HostBuffer
from .copy_stream import CopyStream
from .device_deltas import PendingChunk
from .encode import EncodedFrame, Room
from .errors import InternalError
from .job import SaveJob, StagedChunk
from .own_streams import own_streams
from .rooms import DeviceRoom, HostRoom, room_of


class FrameVerifier:
    """Decodes frames on their device and compares them with their chunks."""

    def __init__(self, chunk_bytes: int, device: torch.device) -> None:
        self._device = device
        self._stream = own_streams(self, device, 1)[0]
        self._decoder = DeviceDecoder(chunk_bytes, device, self._stream)
        with torch.cuda.stream(self._stream):
            self._out = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)

    @property
    def device_bytes(self) -> int:
        """Device memory that it holds."""
        return self._out.numel() + self._decoder.device_bytes

    def check(
        self, header: FrameHeader, body: torch.Tensor, content: memoryview | DeviceBytes | None, raw: torch.Tensor
    ) -> None:
        """Raise CorruptionError unless the frame decodes to its chunk. Waits for the device."""
        out = self._out[: header.raw_bytes]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if isinstance(content, memoryview):
                prefix = np.frombuffer(content[HEADER_BYTES : header.frame_bytes], dtype=np.uint8)
            else:
                prefix = body.cpu().numpy()
            self._decoder.decode(header, body, prefix, out, body_verified=True).wait()
            if not torch.equal(out, raw):
                raise CorruptionError(
                    "a frame does not decode to its chunk; this is a bug of the codec or a failing device"
                )


class SideStreamTicket:
    """One chunk on its way through an encoder, and its frame on the way to where it is written from.

    Attributes:
        copied: Recorded, on the copy stream, once the chunk and the encoder's slot have been read for the last time;
            it is valid when `finish` has returned, or `advance` has begun the copy.
    """

    def __init__(
        self,
        job: SaveJob,
        staged: StagedChunk,
        room: Room,
        ticket: DeviceTicket,
        raw: torch.Tensor,
        copies: CopyStream,
        verifier: FrameVerifier | None,
        pending: PendingChunk | None = None,
    ) -> None:
        self.copied = copies.next_event()
        self._job = job
        self._staged = staged
        self._room = room_of(room)
        self._ticket = ticket
        self._raw = raw
        self._copies = copies
        self._verifier = verifier
        self._pending = pending
        self._start_s = job.timeline.now()
        self._header: FrameHeader | None = None
        self._body = 0
        self._content: memoryview | DeviceBytes | None = None
        self._copy_start_s = 0.0
        self._failure: BaseException | None = None
        self._has_let_go = False
        if isinstance(room, DeviceRoom):
            room.ticket = ticket

    @property
    def waits_for_room(self) -> bool:
        """Whether the frame has been encoded, and there was no room for it."""
        return self._header is not None and self._content is None

    def advance(self, *, may_take_room: bool) -> bool:
        """Queue the frame's copy if it has been encoded and there is room for it; see `Ticket.advance`."""
        if self._content is not None or self._failure is not None:
            return may_take_room
        try:
            if not self._ticket.is_done():
                return False
            self._end_encode()
            if not may_take_room or (isinstance(self._room, HostRoom) and not self._room.try_take()):
                return False
            self._queue_copy()
        except Exception as exc:  # noqa: BLE001 - raised by `finish`, in the order of the chunks
            self._failure = exc
        return may_take_room

    def await_read(self) -> None:
        """Block until the chunk is encoded; see `Ticket.await_read`."""
        try:
            self._end_encode()
        except Exception as exc:  # noqa: BLE001 - as above
            self._failure = self._failure or exc

    def finish(self) -> EncodedFrame:
        """Block until the frame is where it is written from."""
        try:
            if self._failure is not None:
                raise self._failure
            if self._content is None:
                self._queue_copy()
            if not self._copies.is_done(self.copied):
                self.copied.synchronize()
            self._job.timeline.add(self._staged.chunk.index, "copy", self._copy_start_s)
            if self._verifier is not None:
                header, body = self._ticket.finish()
                self._verifier.check(header, body, self._content, self._raw)
                if not isinstance(self._room, DeviceRoom):
                    self._ticket.release()
        except BaseException:
            if not isinstance(self._room, DeviceRoom):
                self._ticket.release()
            self._room.release()
            raise
        finally:
            self._let_go_of_chunk()
        if self._content is None:
            raise InternalError("a frame was copied nowhere")
        return EncodedFrame(self._staged.chunk, self._found_header(), self._content, self._room)

    def _end_encode(self) -> None:
        """Wait until the chunk is encoded."""
        if self._header is not None:
            return
        self._header, self._body = self._ticket.finish_at()
        if self._pending is not None:
            self._pending.settle()
        now_s = self._job.timeline.now()
        start_s = max(self._start_s, now_s - self._ticket.encode_s)
        self._job.timeline.add(self._staged.chunk.index, "encode", start_s, now_s)
        if self._header.codec != RAW_CODEC and self._verifier is None:
            self._let_go_of_chunk()

    def _let_go_of_chunk(self) -> None:
        """Say that the chunk itself is not needed any more. A second call does nothing."""
        if self._has_let_go:
            return
        self._has_let_go = True
        if self._staged.is_live:
            self._job.live_chunk_was_read()
        elif self._staged.buffer is not None:
            self._staged.buffer.release()

    def _queue_copy(self) -> None:
        """Wait until the chunk is encoded and there is room for its frame, and queue the copy."""
        self._end_encode()
        header, copies = self._found_header(), self._copies
        if isinstance(self._room, HostRoom):
            output = self._room.take(self._job)
            self._copy_start_s = self._job.timeline.now()
            self._content = self._copy_to_host(header, self._body, output)
        else:
            self._copy_start_s = self._job.timeline.now()
            _, address = self._ticket.frame_at(copies.handle)
            copies.record(self.copied)
            self._content = DeviceBytes(address, header.padded_bytes, copies.device_index, self._ticket)

    def _copy_to_host(self, header: FrameHeader, body: int, output: HostBuffer) -> memoryview:
        if header.body_bytes:
            self._copies.copy_to_host(output.address + HEADER_BYTES, body, header.body_bytes)
        self._copies.record(self.copied)
        output.view[:HEADER_BYTES] = header.pack()
        output.view[header.frame_bytes : header.padded_bytes] = bytes(header.padded_bytes - header.frame_bytes)
        if self._verifier is None:
            self._ticket.release(self.copied)
        return output.view[: header.padded_bytes]

    def _found_header(self) -> FrameHeader:
        if self._header is None:
            raise InternalError("a frame has no header yet")
        return self._header
