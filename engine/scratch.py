"""Tensors in a file of their own: a conversion needs no more memory than the system gives it for caching."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

_ALIGNMENT_BYTES = 64


@contextmanager
def scratch_bytes(sizes: Sequence[int], folder: Path) -> Iterator[list[torch.Tensor]]:
    """Lend memory that lies in an unnamed file, gone at the end of the body, in which it must not outlive.

    Args:
        sizes: Bytes of each.
        folder: Where the file lies: on a disk that has room for all of it.

    Yields:
        One tensor a size: shape (size,), uint8, each with a storage of its own.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        yield mapped_bytes(file.fileno(), sizes)


def mapped_bytes(
    file: int, sizes: Sequence[int], start: int = 0, alignment: int = _ALIGNMENT_BYTES
) -> list[torch.Tensor]:
    """Map an open file, made as long as need be, and lend its bytes from `start` on, one tensor a size."""
    padded = [-(-size // alignment) * alignment for size in sizes]
    starts = list(itertools.accumulate(padded, initial=start))
    os.ftruncate(file, max(starts[-1], 1))
    memory = mmap.mmap(file, max(starts[-1], 1))
    empty = torch.empty(0, dtype=torch.uint8)
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at) if size else empty.clone()
        for at, size in zip(starts, sizes, strict=False)
    ]


def file_bytes(path: Path) -> torch.Tensor:
    """Map a file to be read: shape (length,), uint8. Nobody may write to it: its pages are copied when changed."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8)
