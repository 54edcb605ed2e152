"""Compare two files that `tidegate.save` wrote, bit for bit; exit with 1 if anything differs.

python -m demo.compare A.tg B.tg
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import tidegate


def differing(a: object, b: object, path: str = "state") -> list[str]:
    """Name what differs between two states: type, dtype, shape, or a single bit."""
    if type(a) is not type(b):
        return [path]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        is_alike = a.dtype == b.dtype and a.shape == b.shape
        return [] if is_alike and torch.equal(_bits(a), _bits(b)) else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            return [path]
        return [found for key in a for found in differing(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [path]
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in differing(x, y, f"{path}.{i}")]
    return [] if repr(a) == repr(b) else [path]


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8)


def compare(a: Path, b: Path) -> int:
    """Print what differs between two files, and return the exit code."""
    found = differing(tidegate.load(a), tidegate.load(b))
    if found:
        print(f"DIFFERENT in {len(found)} places: {', '.join(found[:10])}")
        return 1
    print(f"{a.name} and {b.name} are equal, bit for bit: weights, optimizer, random state")
    return 0


if __name__ == "__main__":
    sys.exit(compare(Path(sys.argv[1]), Path(sys.argv[2])))
