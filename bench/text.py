"""Real text to train on: the sources of Python's standard library, as bytes or as words."""

from __future__ import annotations

import re
import sysconfig
import zlib
from pathlib import Path

import torch

_WORD = re.compile(rb"\w+|\s+|[^\w\s]")


def read_text(limit_bytes: int = 16 << 20) -> torch.Tensor:
    """Sources of the standard library: shape (at most limit_bytes,), uint8."""
    return torch.frombuffer(_read(limit_bytes), dtype=torch.uint8)


def read_words(num_words: int, limit_bytes: int = 6 << 20) -> torch.Tensor:
    """The same sources cut into words, runs of spaces and signs, each hashed to a number below `num_words`.

    Returns:
        int32[tokens]. Like the vocabulary of a byte-pair encoding, most of the numbers are rare, and some never occur.
    """
    return torch.tensor([zlib.crc32(word) % num_words for word in _WORD.findall(_read(limit_bytes))], dtype=torch.int32)


def _read(limit_bytes: int) -> bytearray:
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return text[:limit_bytes]
