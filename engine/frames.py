"""Read one frame and decode it to where its bytes belong, on the CPU or on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tidegate.codec.base import HEADER_BYTES
from tidegate.codec.digest import digest
from tidegate.codec.errors import CorruptionError
from tidegate.codec.frame import decode_frame
from tidegate.codec.registry import codec_numbered
from tidegate.storage.base import Store

from .buffers import BufferPool, HostBuffer
from .container import FrameEntry
from .sources import bytes_at


class FrameDecoder:
    """Decodes frames for several threads at once.

    Args:
        pool: Host buffers, for frames and for what is decoded on the CPU on its way elsewhere.
        chunk_bytes: The longest chunk.
    """

    def __init__(self, pool: BufferPool, chunk_bytes: int) -> None:
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._gpu = threading.Lock()  # one frame at a time on a GPU: its buffers are large
        self._gpu_decoders: dict[torch.device, _GpuDecoder] = {}

    def decode_into(self, store: Store, key: str, entry: FrameEntry, out: torch.Tensor) -> None:
        """Read a frame and decode it into `out`: shape (raw_bytes,), uint8, on any device. Blocks.

        Raises:
            CodecError, StorageError: The frame is damaged, or cannot be read or decoded here.
        """
        with self._frame(store, key, entry) as frame:
            gpu = self._gpu_for(entry, out.device)
            if gpu is not None:
                with self._gpu:
                    self._gpu_decoder(gpu).decode(entry, frame, out)
            elif out.device.type == "cpu":
                decode_frame(frame, bytes_at(out.data_ptr(), out.numel(), out))  # `out` may be the caller's
            else:
                with self._buffer(entry.header.raw_bytes) as host:
                    decode_frame(frame, host)
                    out.copy_(host)

    @contextmanager
    def decoded(self, store: Store, key: str, entry: FrameEntry, device: torch.device) -> Iterator[torch.Tensor]:
        """Read a frame and lend its decoded bytes: shape (raw_bytes,), uint8, on the CPU or on `device`. Blocks."""
        if device.type != "cpu":
            out = torch.empty(entry.header.raw_bytes, dtype=torch.uint8, device=device)
            self.decode_into(store, key, entry, out)
            yield out
        else:
            with self._buffer(entry.header.raw_bytes) as host:
                self.decode_into(store, key, entry, host)
                yield host

    @contextmanager
    def _frame(self, store: Store, key: str, entry: FrameEntry) -> Iterator[torch.Tensor]:
        with self._buffer(entry.header.frame_bytes) as frame:
            store.read_into(key, entry.offset, frame.numpy().data)
            if bytes(frame[:HEADER_BYTES].numpy()) != entry.header.pack():
                raise CorruptionError("its header differs from the one in the index")
            yield frame

    @contextmanager
    def _buffer(self, num_bytes: int) -> Iterator[torch.Tensor]:
        buffer: HostBuffer | None = self._pool.acquire(num_bytes)
        if buffer is None:
            raise RuntimeError("a buffer pool gave up without being asked to")
        try:
            yield buffer.tensor[:num_bytes]
        finally:
            buffer.release()

    def _gpu_for(self, entry: FrameEntry, device: torch.device) -> torch.device | None:
        """The GPU to decode on: the destination if it can, any that can for what no CPU decodes, else None."""
        codec = codec_numbered(entry.header.codec, entry.header.codec_version).name
        needs_gpu = codec == "ans"
        if device.type != "cuda" and not (needs_gpu and torch.cuda.is_available()):
            return None
        from tidegate.codec.availability import device_codecs

        found = device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
        return found if codec in device_codecs(found) else None

    def _gpu_decoder(self, device: torch.device) -> _GpuDecoder:
        if device not in self._gpu_decoders:
            self._gpu_decoders[device] = _GpuDecoder(self._chunk_bytes, device)
        return self._gpu_decoders[device]


class _GpuDecoder:
    """Copies a frame's body to a GPU and decodes it there. One frame at a time."""

    def __init__(self, chunk_bytes: int, device: torch.device) -> None:
        from tidegate.codec.device import DeviceDecoder

        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._decoder = DeviceDecoder(chunk_bytes, device, self._stream)
            self._body = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
            self._out = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)

    def decode(self, entry: FrameEntry, frame: torch.Tensor, out: torch.Tensor) -> None:
        header = entry.header
        host_body = frame[HEADER_BYTES : header.frame_bytes]
        if digest(host_body.numpy()) != header.body_digest:
            raise CorruptionError("the checksum of its body does not hold")
        is_direct = out.device == self._device and out.data_ptr() % 16 == 0
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            body = self._body[: header.body_bytes]
            body.copy_(host_body, non_blocking=True)
            target = out if is_direct else self._out[: header.raw_bytes]
            self._decoder.decode(header, body, host_body.numpy(), target, body_verified=True).wait()
            if not is_direct:
                out.copy_(target)
            self._stream.synchronize()
