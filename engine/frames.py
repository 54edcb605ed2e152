"""Read one frame and decode it on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from tidegate.codec.base import HEADER_BYTES, RAW_CODEC, FrameHeader
from tidegate.codec.digest import digest
from tidegate.codec.errors import CodecError, CorruptionError
from tidegate.codec.frame import decode_frame
from tidegate.storage.errors import ObjectNotFoundError, StorageError

from .buffers import BufferPool
from .delta import DeltaChunk
from .errors import InternalError
from .load_plan import ReadItem
from .open_objects import OpenObjects
from .residual import undo_residual
from .sources import bytes_at

_LEAST_READ_IN_PLACE_BYTES = 1 << 20
# Below, a second read costs more than a copy.


class HostDecoder:
    """Reads frames and decodes them, for several threads at once.

    Args:
        objects: Where they are.
        pool: Host buffers, for frames and for what is decoded on its way elsewhere: at most two at a time a thread,
            three where some are residuals.
    """

    def __init__(self, objects: OpenObjects, pool: BufferPool) -> None:
        self._objects = objects
        self._pool = pool

    def decode_into(self, item: ReadItem, out: torch.Tensor) -> None:
        """Read a frame and decode it. Blocks.

        Args:
            item: The frame.
            out: Shape (raw_bytes,), uint8, contiguous, on the CPU, perhaps the caller's; undefined after an error.

        Raises:
            CodecError, StorageError: The frame is damaged, or cannot be read or decoded here.
        """
        header = item.entry.header
        own = bytes_at(out.data_ptr(), out.numel(), out)
        if item.delta is not None:
            self._rebuild(item, own)
            return
        if header.codec == RAW_CODEC and header.raw_bytes >= _LEAST_READ_IN_PLACE_BYTES:
            self._read_in_place(item, own)
            return
        with self._frame(item) as frame:
            decode_frame(frame, own)

    @contextmanager
    def decoded(self, item: ReadItem) -> Iterator[torch.Tensor]:
        """Read a frame and lend what it decodes to: shape (raw_bytes,), uint8, on the CPU. Blocks. Raises as above."""
        header = item.entry.header
        if item.delta is not None:
            with self._pool.lent(header.raw_bytes) as out:
                self._rebuild(item, out)
                yield out
        elif header.codec == RAW_CODEC:
            with self._frame(item) as frame:
                body = frame[HEADER_BYTES:]
                check_raw_body(header, digest(body.numpy()))
                yield body
        else:
            with self._pool.lent(header.raw_bytes) as out:
                with self._frame(item) as frame:
                    decode_frame(frame, out)
                yield out

    def _rebuild(self, item: ReadItem, out: torch.Tensor) -> None:
        rebuild_chain(item, lambda full: self.decode_into(full, out), partial(self._put_on, out=out))

    def _put_on(self, item: ReadItem, delta: DeltaChunk, before: ReadItem, out: torch.Tensor) -> None:
        with self.decoded(replace(item, delta=None, base=None)) as residual:
            undo_residual(delta.kind, item.chunk.word, residual.numpy(), out.numpy())
        check_rebuilt(item, before, delta, digest(out.numpy()))

    def _read_in_place(self, item: ReadItem, out: torch.Tensor) -> None:
        header, offset = item.entry.header, item.entry.offset
        if out.numel() != header.raw_bytes:
            raise CorruptionError(f"it holds {header.raw_bytes} bytes where {out.numel()} are expected")
        start = bytearray(HEADER_BYTES)
        self._objects.read_into(item.key, offset, memoryview(start))
        check_start(header, start)
        self._objects.read_into(item.key, offset + HEADER_BYTES, out.numpy().data)
        check_raw_body(header, digest(out.numpy()))

    @contextmanager
    def _frame(self, item: ReadItem) -> Iterator[torch.Tensor]:
        with self._pool.lent(item.entry.header.frame_bytes) as frame:
            view = frame.numpy().data
            self._objects.read_into(item.key, item.entry.offset, view)
            check_start(item.entry.header, view)
            yield frame


def chain_of(item: ReadItem) -> Iterator[ReadItem]:
    """Yield a frame and all that it is a difference to, the full one last."""
    at: ReadItem | None = item
    while at is not None:
        yield at
        at = at.base


def rebuild_chain(
    item: ReadItem, decode: Callable[[ReadItem], None], put_on: Callable[[ReadItem, DeltaChunk, ReadItem], None]
) -> None:
    """Make the chunk of a frame that is a difference: decode that of the full checkpoint, and put each residual on it.

    Args:
        item: The newest frame.
        decode: Decodes a frame that holds the chunk itself.
        put_on: Decodes a frame that holds a residual, and puts it on the chunk of the frame that comes third.

    Raises:
        CodecError, StorageError: What these raise; of a base, with both steps named.
    """
    chain = list(chain_of(item))
    at = chain.pop()
    try:
        decode(at)
        while chain:
            before, at = at, chain.pop()
            if at.delta is None:
                raise InternalError(f"chunk {at.chunk.index} of step {at.step} has a base and is no residual")
            put_on(at, at.delta, before)
    except (CodecError, StorageError) as exc:
        if at is item:
            raise
        raise _base_failure(item, at, exc) from exc


def check_rebuilt(item: ReadItem, before: ReadItem, delta: DeltaChunk, found: int) -> None:
    """Raise CorruptionError unless a chunk that a residual was put on has the digest of the one that was saved."""
    if found != delta.raw_digest:
        raise CorruptionError(
            f"chunk {item.chunk.index} of step {item.step}, put on that of step {before.step}, has digest "
            f"{found:016x} and should have {delta.raw_digest:016x}: step {before.step} is not what step "
            f"{item.step} was saved as a difference to; load a step that needs neither"
        )


def _base_failure(item: ReadItem, base: ReadItem, exc: CodecError | StorageError) -> Exception:
    """Return what to raise where the frame of a base fails."""
    text = (
        f"step {item.step} is stored as a difference and needs step {base.step}, whose frame in {base.key} fails: {exc}"
    )
    if isinstance(exc, StorageError) and not isinstance(exc, ObjectNotFoundError):
        exc.add_note(text)
        return exc
    return CorruptionError(text)


def check_start(header: FrameHeader, start: memoryview | bytearray) -> None:
    """Raise CorruptionError unless a frame starts with the header that the index has of it."""
    if bytes(start[:HEADER_BYTES]) != header.pack():
        raise CorruptionError("its header differs from the one in the index")


def check_raw_body(header: FrameHeader, found: int) -> None:
    """Raise CorruptionError unless the digest of a raw frame's body, which is the chunk, is what its header says."""
    for name, promised in (("body", header.body_digest), ("chunk", header.raw_digest)):
        if found != promised:
            raise CorruptionError(
                f"the {name} has digest {found:016x} and the frame header promises {promised:016x}: "
                "the bytes have changed since they were written; load an earlier checkpoint"
            )
