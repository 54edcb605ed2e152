"""Where benchmarks that need a fast filesystem put their checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def fast_folder(num_bytes: int, asked: Path | None) -> Iterator[Path]:
    """Make a temporary folder where `asked` says, else in shared memory if that has room, else where others are.

    Args:
        num_bytes: What will lie in it at most.
        asked: The user's own choice.

    Raises:
        SystemExit: There is not that much room there.
    """
    parent = asked
    if parent is None and SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.1 * num_bytes:
        parent = SHARED_MEMORY
    with tempfile.TemporaryDirectory(dir=parent, prefix="tidegate-bench-") as name:
        free_bytes = shutil.disk_usage(name).free
        if free_bytes < num_bytes:
            raise SystemExit(
                f"{name} has room for {free_bytes / 1e9:.1f} GB and this benchmark needs {num_bytes / 1e9:.1f} GB; "
                "give another --folder, or less to save"
            )
        yield Path(name)
