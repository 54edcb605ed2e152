"""Put chunks of delta chains together on the GPU that they go to: frames are decoded there, and residuals undone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch

from tidegate.codec.base import HEADER_BYTES
from tidegate.codec.device_decode import DeviceDecoder, undecodable_reason
from tidegate.codec.device_report import digest_words, read_digest
from tidegate.codec.errors import CodecError
from tidegate.codec.kernels import indexed, kernels_of

from .buffers import BufferPool
from .delta import DeltaChunk
from .frames import chain_of, check_rebuilt, check_start, rebuild_chain
from .load_plan import ReadItem
from .open_objects import OpenObjects
from .own_streams import own_streams
from .residual import device_kind

_NUM_WORKERS = 2
_ALIGNMENT_BYTES = 16


class DeviceChains:
    """Puts chains together on one GPU, for several threads at once.

    Device memory beside the destination: for each of two workers a body, a chunk and the decoder's planes.

    Args:
        device: The GPU.
        items: All chains that it will get; `decodes_chain` has said yes to each.
        objects: Where the frames are.
        pool: Page-locked host buffers: one at a time a thread.
        home: The stream that the destinations belong to.

    Raises:
        CodecUnavailableError: If CuPy cannot compile the kernels.
        torch.OutOfMemoryError: If there is no room for one worker.
    """

    def __init__(
        self,
        device: torch.device,
        items: Sequence[ReadItem],
        objects: OpenObjects,
        pool: BufferPool,
        home: torch.cuda.Stream,
    ) -> None:
        frames = [frame for item in items for frame in chain_of(item)]
        body_bytes = max(frame.entry.header.body_bytes for frame in frames)
        chunk_bytes = max(item.chunk.num_bytes for item in items)
        self._home = home
        self._workers: SimpleQueue[_Worker] = SimpleQueue()
        for i in range(min(_NUM_WORKERS, len(items))):
            try:
                self._workers.put(_Worker(device, body_bytes, chunk_bytes, objects, pool))
            except torch.OutOfMemoryError:
                if i == 0:
                    raise
                break

    def rebuild(self, item: ReadItem, out: torch.Tensor) -> None:
        """Read the frames of a chain and make its chunk. Blocks.

        Args:
            item: The newest frame, which has a `delta`.
            out: uint8[num_bytes] on the GPU, contiguous, of the home stream; undefined after an error.

        Raises:
            CodecError, StorageError: A frame is damaged, or cannot be read; or the chunk is not what was saved.
        """
        worker = self._workers.get()
        try:
            worker.rebuild(item, out, self._home)
        finally:
            self._workers.put(worker)


def decodes_chain(item: ReadItem, device: torch.device, known: dict[tuple[int, int, torch.device], bool]) -> bool:
    """Whether a GPU decodes all frames of a chain. The first call for a device compiles kernels.

    Args:
        item: The newest frame.
        device: The GPU.
        known: What is known already of codec, its parameter and device; what is found out is added.
    """
    for frame in chain_of(item):
        header = frame.entry.header
        key = (header.codec, header.parameter, device)
        if key not in known:
            known[key] = undecodable_reason(header, device) is None
        if not known[key]:
            return False
    return True


class _Worker:
    """A stream, a decoder, and memory for one chain at a time."""

    def __init__(
        self, device: torch.device, body_bytes: int, chunk_bytes: int, objects: OpenObjects, pool: BufferPool
    ) -> None:
        self._device = device
        self._objects = objects
        self._pool = pool
        self._kernels = kernels_of(indexed(device))
        self._kernels.load_residual()
        self._stream = own_streams(self, device, 1)[0]
        self._decoder = DeviceDecoder(chunk_bytes, device, self._stream)
        with torch.cuda.stream(self._stream):
            self._body = torch.empty(body_bytes, dtype=torch.uint8, device=device)
            self._residual = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
            self._words = torch.zeros(digest_words(chunk_bytes), dtype=torch.int64, device=device)

    def rebuild(self, item: ReadItem, out: torch.Tensor, home: torch.cuda.Stream) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(home)
            chunk = out if out.data_ptr() % _ALIGNMENT_BYTES == 0 else torch.empty_like(out)
            try:
                rebuild_chain(item, lambda full: self._decode(full, chunk), partial(self._put_on, chunk=chunk))
            finally:
                if chunk is not out:
                    out.copy_(chunk)
                self._stream.synchronize()

    def _put_on(self, item: ReadItem, delta: DeltaChunk, before: ReadItem, chunk: torch.Tensor) -> None:
        num_bytes = chunk.numel()
        residual = self._residual[:num_bytes]
        self._decode(replace(item, delta=None, base=None), residual)
        with self._kernels.on(self._stream):
            kind, word = device_kind(delta.kind, item.chunk.word), item.chunk.word
            self._kernels.undo_residual(kind, word, residual.data_ptr(), chunk.data_ptr(), num_bytes)
            self._kernels.piece_digests(chunk.data_ptr(), num_bytes, self._words.data_ptr())
        words = self._words[: digest_words(num_bytes)].cpu().numpy().view(np.uint64)
        check_rebuilt(item, before, delta, read_digest(words, num_bytes))

    def _decode(self, item: ReadItem, out: torch.Tensor) -> None:
        """Read one frame and decode it; done when it returns."""
        header = item.entry.header
        buffer = self._pool.borrow(header.frame_bytes)
        try:
            frame = buffer.view[: header.frame_bytes]
            self._objects.read_into(item.key, item.entry.offset, frame)
            check_start(header, frame)
            body = self._body[: header.body_bytes]
            body.copy_(buffer.tensor[HEADER_BYTES : header.frame_bytes], non_blocking=True)
            self._decoder.decode(header, body, frame[HEADER_BYTES:], out).wait()
        finally:
            self._stream.synchronize()  # the copy reads the buffer, whatever happened
            buffer.release()


def chains_of(
    items: Iterable[tuple[ReadItem, torch.device]],
    objects: OpenObjects,
    pool: BufferPool,
    homes: dict[torch.device, torch.cuda.Stream],
) -> dict[torch.device, DeviceChains]:
    """Make what puts chains together on each GPU that can; a GPU without room for it has none.

    Args:
        items: The chains, and where each goes. None is left out that a GPU can decode.
        objects: As for DeviceChains.
        pool: There.
        homes: The home stream of each GPU.
    """
    by_device: dict[torch.device, list[ReadItem]] = {}
    for item, device in items:
        by_device.setdefault(device, []).append(item)
    made: dict[torch.device, DeviceChains] = {}
    for device, chains in by_device.items():
        try:
            made[device] = DeviceChains(device, chains, objects, pool, homes[device])
        except (CodecError, torch.OutOfMemoryError):
            continue  # the CPU puts them together
    return made
