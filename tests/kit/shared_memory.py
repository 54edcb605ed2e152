"""Where ranks of a test share frames: a folder of its own, so that tests and other programs leave each other alone."""

from __future__ import annotations

from pathlib import Path

import xxhash


def shared_memory_of(root: str | Path) -> Path:
    """A place in this host's shared memory that no other test or program uses; it is not made."""
    return Path("/dev/shm") / f"tidegate-test-{xxhash.xxh3_64_hexdigest(str(root).encode())}"
