"""Checkpoints in DCP's own format, read in place: its `.metadata`, without running anything, and its `.distcp` files.

A `.distcp` file holds items end to end, each a file of torch.save's: a zip whose record `…/data/0` is the tensor's
bytes, stored as they are.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from .dcp_metadata import ItemName
from .errors import CorruptCheckpointError, UnsupportedStateError
from .scratch import file_bytes

METADATA_NAME = ".metadata"
_LOCAL_HEADER_BYTES = 30
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": set(),
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Builds what a `.metadata` file is made of, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        if not is_dtype and name not in _ALLOWED.get(module, set()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of DCP has")
        return super().find_class(module, name)


@dataclass(frozen=True, slots=True)
class DcpFiles:
    """A checkpoint in DCP's format.

    Attributes:
        metadata: What it holds.
        items: Tensors, mapped and not read, and other values; by name and offsets.
    """

    metadata: Metadata
    items: Mapping[ItemName, object]


def open_dcp(folder: Path) -> DcpFiles:
    """Open a checkpoint that DCP's FileSystemWriter has written. Blocks for the metadata and small values.

    Raises:
        CorruptCheckpointError: It is none, or damaged.
        UnsupportedStateError: A value is of a class that is not allowed, or an item was transformed by an extension.
    """
    path = folder / METADATA_NAME
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("it holds no Metadata")
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ImportError, IndexError, KeyError) as exc:
        raise CorruptCheckpointError(f"{path} is no metadata of DCP: {exc}", key=str(path), stage="open") from exc
    mapped: dict[Path, torch.Tensor] = {}
    items: dict[ItemName, object] = {}
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex):
            raise CorruptCheckpointError(f"{path} is damaged: {index!r:.80} is no index", key=str(path), stage="open")
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedStateError(
                f"{index.fqn} was written through an extension of DCP's; load it with dcp.load and save it anew",
                path=index.fqn,
            )
        name = (index.fqn, None if index.offset is None else tuple(index.offset))
        items[name] = _item(_inside(folder, str(info.relative_path)), int(info.offset), int(info.length), name, mapped)
    return DcpFiles(metadata, items)


def _inside(folder: Path, relative: str) -> Path:
    path = folder / relative
    if Path(relative).is_absolute() or ".." in Path(relative).parts or path.is_symlink() or not path.is_file():
        raise CorruptCheckpointError(f"{folder} names {relative!r}, which is not in it", key=relative, stage="open")
    return path


def _item(path: Path, offset: int, length: int, name: ItemName, mapped: dict[Path, torch.Tensor]) -> object:
    if path not in mapped:
        mapped[path] = file_bytes(path)
    content = mapped[path]
    if not 0 <= offset <= offset + length <= content.numel():
        raise CorruptCheckpointError(f"{path} is cut short: {name[0]} ends behind it", key=str(path), stage="open")
    stream = io.BufferedReader(_Slice(content.numpy().data[offset : offset + length]))
    try:
        if name[1] is None:
            return torch.load(stream, weights_only=True, map_location="cpu")
        return _tensor(stream, content, offset)
    except pickle.UnpicklingError as exc:
        raise UnsupportedStateError(f"cannot convert {name[0]}: {exc}", path=name[0]) from exc
    except (zipfile.BadZipFile, RuntimeError, ValueError, KeyError) as exc:
        raise CorruptCheckpointError(f"{name[0]} in {path} cannot be read: {exc}", key=str(path), stage="open") from exc


def _tensor(stream: BinaryIO, content: torch.Tensor, offset: int) -> torch.Tensor:
    """Map the tensor of an item: what it is comes from its pickle, its bytes from where they lie in the file."""
    like = torch.load(stream, weights_only=True, map_location="meta")
    if not isinstance(like, torch.Tensor):
        raise ValueError("it is no tensor")
    with zipfile.ZipFile(stream) as archive:
        (record,) = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its bytes are compressed")
    stream.seek(record.header_offset)
    header = stream.read(_LOCAL_HEADER_BYTES)
    skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = offset + record.header_offset + _LOCAL_HEADER_BYTES + skipped
    row = content[start : start + record.file_size]
    if row.numel() != record.file_size or (row.numel() and row.data_ptr() % like.itemsize):
        row = row.clone()
    plain = torch.empty(0, dtype=like.dtype)
    first = row.storage_offset() // like.itemsize + like.storage_offset()
    return plain.set_(row.untyped_storage(), first, like.shape, like.stride())


class _Slice(io.RawIOBase):
    """A part of a mapped file as a file of its own."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, out: Any) -> int:
        part = self._view[self._at : self._at + len(out)]
        out[: len(part)] = part
        self._at += len(part)
        return len(part)
