"""The stages of a load, each alone: read a file, copy it to the GPU, decode its frames; for restore.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tidegate.codec.base import HEADER_BYTES, RAW_CODEC
from tidegate.codec.frame import decode_frame
from tidegate.container import FrameEntry, read_index
from tidegate.readers import PIECE_BYTES
from tidegate.storage import DeviceBytes
from tidegate.storage.local import LocalStore

from .rig import Times, repeat

_COPY_BYTES = 256 << 20


class Stages:
    """One `.tg` file and what is needed to run each stage of its load by itself.

    Args:
        path: The file.
        device: Where it is loaded to.
        num_threads: How many read, and decode on a CPU: as many as a load uses.
    """

    def __init__(self, path: Path, device: torch.device, num_threads: int) -> None:
        store = LocalStore(path.parent)
        try:
            self.entries: Sequence[FrameEntry] = read_index(store, path.name).entries
        finally:
            store.close()
        self.stored_bytes = path.stat().st_size
        self.raw_bytes = sum(entry.header.raw_bytes for entry in self.entries)
        self._path = path
        self._device = device
        self._num_threads = num_threads

    def read(self, num: int) -> Times:
        """Read every frame into host memory (page-locked, for a GPU), in pieces as a load does, each by any thread."""
        pieces = [
            (entry.offset + start, min(PIECE_BYTES, entry.header.frame_bytes - start))
            for entry in self.entries
            for start in range(0, entry.header.frame_bytes, PIECE_BYTES)
        ]
        pin = self._device.type == "cuda"
        buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pin) for _ in range(2 * self._num_threads)]
        with ThreadPoolExecutor(self._num_threads) as pool, open(self._path, "rb", buffering=0) as file:

            def some(thread: int) -> None:
                own = buffers[2 * thread : 2 * thread + 2]
                for i, (offset, num_bytes) in enumerate(pieces[thread :: self._num_threads]):
                    _read(file.fileno(), offset, own[i % 2][:num_bytes].numpy().data)

            return repeat(lambda: list(pool.map(some, range(self._num_threads))), num=num)

    def copy(self, num: int) -> Times:
        """Copy as many bytes as the file has from page-locked memory to the GPU."""
        num_bytes = min(_COPY_BYTES, self.stored_bytes)
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

        def copy_all() -> None:
            for at in range(0, self.stored_bytes, num_bytes):
                part = min(num_bytes, self.stored_bytes - at)
                there[:part].copy_(host[:part], non_blocking=True)
            torch.cuda.synchronize(self._device)

        return repeat(copy_all, num=num)

    def arrive(self, num: int) -> Times | None:
        """Read every frame right into memory of the GPU by the store's own means; None where it has none."""
        if self._device.type != "cuda":
            return None
        there = torch.empty(self.stored_bytes, dtype=torch.uint8, device=self._device)
        store = LocalStore(self._path.parent)
        try:
            reader = store.open_reader(self._path.name)
            if not store.reads_into_devices(self.stored_bytes):
                return None

            def read_all() -> None:
                pending = []
                for entry in self.entries:
                    part = there[entry.offset : entry.offset + entry.header.frame_bytes]
                    index = part.get_device()
                    pending.append(reader.start_read(entry.offset, DeviceBytes(part.data_ptr(), part.numel(), index)))
                for read in pending:
                    read.wait()

            torch.cuda.synchronize(self._device)
            found = repeat(read_all, num=num)
            reader.close()
            return found
        finally:
            store.close()

    def decode(self, num: int) -> Times:
        """Decode every frame from memory of the device to other memory of it, all checksums looked at."""
        content = torch.from_numpy(np.fromfile(self._path, dtype=np.uint8))
        outs = torch.empty(self.raw_bytes, dtype=torch.uint8, device=self._device)
        parts = outs.split([entry.header.raw_bytes for entry in self.entries])
        if self._device.type == "cuda":
            return self._decode_on_gpu(content, parts, num)

        def one(entry: FrameEntry, out: torch.Tensor) -> None:
            decode_frame(content[entry.offset : entry.offset + entry.header.padded_bytes], out)

        with ThreadPoolExecutor(self._num_threads) as pool:
            return repeat(lambda: list(pool.map(one, self.entries, parts)), num=num)

    def _decode_on_gpu(self, content: torch.Tensor, parts: Sequence[torch.Tensor], num: int) -> Times:
        """As a load does: digests of bodies on one stream, ahead of the decoding on another. A raw body is decoded."""
        from tidegate.codec.device_check import check_body
        from tidegate.codec.device_decode import DeviceDecoder, prefix_bytes
        from tidegate.codec.host_rooms import HostRooms
        from tidegate.codec.kernels import indexed, kernels_of

        digests, decodes = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        decoder = DeviceDecoder(max(entry.header.raw_bytes for entry in self.entries), self._device, decodes)
        rooms = HostRooms(kernels_of(indexed(self._device)), digests)
        there = content.to(self._device)
        frames = []
        for entry, part in zip(self.entries, parts, strict=True):
            start = entry.offset + HEADER_BYTES
            prefix = content[start : start + prefix_bytes(entry.header)].numpy()
            frames.append((entry.header, there[start : start + entry.header.body_bytes], prefix, part))

        def decode_all() -> None:
            bodies = [check_body(header, body, digests, rooms) for header, body, _, _ in frames]
            chunks = []
            for (header, body, prefix, part), check in zip(frames, bodies, strict=True):
                check.wait()
                if header.codec != RAW_CODEC:
                    with torch.cuda.stream(decodes):
                        chunks.append(decoder.decode(header, body, prefix, part, body_verified=True))
            for chunk in chunks:
                chunk.wait()

        return repeat(decode_all, num=num)


def _read(descriptor: int, offset: int, out: memoryview) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(descriptor, [out[done:]], offset + done)
        if count == 0:
            raise RuntimeError(f"the file ends {len(out) - done} bytes before its index says")
        done += count
