"""The `.tg` object: frames, then an index, then a trailer. Append-only to write, read by ranges (storage/FORMAT.md)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import xxhash

from tidegate.codec.base import HEADER_BYTES, FrameHeader, unpack_header
from tidegate.codec.digest import digest
from tidegate.codec.errors import CodecError
from tidegate.storage.aligned import aligned_buffer
from tidegate.storage.base import ALIGNMENT_BYTES, DeviceBytes, DeviceWriter, ObjectWriter, Store

from .errors import CorruptCheckpointError, InternalError

OBJECT_VERSION = 1
_TRAILER = struct.Struct("<8sIIQQQQQ")
_TRAILER_MAGIC = b"TGOBJECT"
TRAILER_BYTES = _TRAILER.size + 8
_ENTRY = struct.Struct("<QQ")
ENTRY_BYTES = _ENTRY.size + HEADER_BYTES


@dataclass(frozen=True, slots=True)
class FrameEntry:
    """Where the frame of a chunk lies in its object, and that frame's header."""

    chunk: int
    offset: int
    header: FrameHeader


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """What the manifest remembers of an object."""

    key: str
    num_bytes: int
    tail_digest: int


class FrameAppender:
    """Write frames into one object, then its index and trailer, and seal it.

    Args:
        writer: The object.
        key: Its key, for the record.
    """

    def __init__(self, writer: ObjectWriter, key: str) -> None:
        self._writer = writer
        self._key = key
        self._entries: list[FrameEntry] = []
        self._end = 0

    @property
    def takes_device_memory(self) -> bool:
        """Whether frames may come from the memory of a CUDA device."""
        return isinstance(self._writer, DeviceWriter)

    def append(self, chunk: int, header: FrameHeader, frame: memoryview | DeviceBytes) -> Future[None]:
        """Queue a padded frame; it must stay unchanged until the returned future is done. May block.

        Raises:
            InternalError: It lies on a device, and this object takes no such bytes.
        """
        if isinstance(frame, memoryview):
            future = self._writer.append(frame)
        elif isinstance(self._writer, DeviceWriter):
            future = self._writer.append_device(frame)
        else:
            raise InternalError(f"object {self._key} takes no bytes of a device")
        self._entries.append(FrameEntry(chunk, self._end, header))
        self._end += header.padded_bytes
        return future

    def append_tail(self, manifest: Callable[[], bytes] | None = None) -> ObjectRecord:
        """Queue index, manifest (for an object that stands alone) and trailer. May block for room."""
        index = b"".join(_ENTRY.pack(e.offset, e.chunk) + e.header.pack() for e in self._entries)
        inner = manifest() if manifest else b""
        tail = index + inner
        num_bytes = self._end + _round_up(len(tail) + TRAILER_BYTES)
        tail_digest = digest(memoryview(tail))
        fields = _TRAILER.pack(
            _TRAILER_MAGIC, OBJECT_VERSION, 0, self._end, len(index), len(inner), num_bytes, tail_digest
        )
        view = aligned_buffer(num_bytes - self._end)
        view[: len(tail)] = tail
        view[len(view) - TRAILER_BYTES :] = fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))
        self._writer.append(view)
        return ObjectRecord(self._key, num_bytes, tail_digest)

    def seal(self) -> None:
        """Make the object durable. Blocks for all that is queued."""
        self._writer.seal()


@dataclass(frozen=True, slots=True)
class ObjectIndex:
    """The checked index of an object."""

    record: ObjectRecord
    entries: tuple[FrameEntry, ...]
    manifest: bytes


def read_index(store: Store, key: str) -> ObjectIndex:
    """Read and check an object's trailer, index and inner manifest. Blocks.

    Nothing is allocated from a length that has not been checked against the object's own. Raises StorageError or
    CorruptCheckpointError.
    """
    num_bytes = store.stat(key).num_bytes
    if num_bytes < ALIGNMENT_BYTES or num_bytes % ALIGNMENT_BYTES:
        raise _damaged(key, f"its length {num_bytes} is not a whole number of pages: it is cut short, or no .tg object")
    trailer = bytearray(TRAILER_BYTES)
    store.read_into(key, num_bytes - TRAILER_BYTES, memoryview(trailer))
    magic, version, flags, index_at, index_bytes, inner_bytes, length, tail_digest = _TRAILER.unpack(
        trailer[: _TRAILER.size]
    )
    if magic != _TRAILER_MAGIC:
        raise _damaged(key, "it does not end in a trailer: it is cut short, or no .tg object")
    if xxhash.xxh3_64_intdigest(bytes(trailer[: _TRAILER.size])) != int.from_bytes(trailer[_TRAILER.size :], "little"):
        raise _damaged(key, "its trailer's checksum does not hold")
    if version != OBJECT_VERSION or flags:
        raise _damaged(key, f"it has version {version}, flags {flags:#x}; this build reads version {OBJECT_VERSION}")
    if length != num_bytes or index_at % ALIGNMENT_BYTES or index_bytes % ENTRY_BYTES:
        raise _damaged(key, f"its trailer promises {length} bytes and the object has {num_bytes}")
    if index_at + _round_up(index_bytes + inner_bytes + TRAILER_BYTES) != num_bytes:
        raise _damaged(key, "its index does not fill the space between the frames and the trailer")
    tail = bytearray(index_bytes + inner_bytes)
    store.read_into(key, index_at, memoryview(tail))
    if digest(memoryview(tail)) != tail_digest:
        raise _damaged(key, "its index's checksum does not hold")
    entries = _parse_entries(key, memoryview(tail)[:index_bytes], index_at)
    return ObjectIndex(ObjectRecord(key, num_bytes, tail_digest), entries, bytes(tail[index_bytes:]))


def _parse_entries(key: str, index: memoryview, frames_end: int) -> tuple[FrameEntry, ...]:
    entries: list[FrameEntry] = []
    end = 0
    for at in range(0, len(index), ENTRY_BYTES):
        offset, chunk = _ENTRY.unpack_from(index, at)
        try:
            header = unpack_header(index[at + _ENTRY.size : at + ENTRY_BYTES])
        except CodecError as exc:
            raise _damaged(key, f"frame {len(entries)} cannot be read: {exc}") from exc
        if offset != end:
            raise _damaged(key, f"frame {len(entries)} lies at {offset}, not at {end} where the one before ends")
        end = offset + header.padded_bytes
        entries.append(FrameEntry(chunk, offset, header))
    if end != frames_end:
        raise _damaged(key, f"its frames end at {end}, not at {frames_end} where the index begins")
    return tuple(entries)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _damaged(key: str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"object {key} is damaged: {why}", key=key, stage="open")
