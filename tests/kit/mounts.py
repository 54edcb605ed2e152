"""Small filesystems for tests: a real disk that is full, one without O_DIRECT."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, kind: str, options: str = "") -> Iterator[Path]:
    """Mount a filesystem of memory at `folder` for the body; skip the test where that is not allowed.

    Args:
        folder: It is made.
        kind: "tmpfs" (options like "size=4m" limit it) or "ramfs" (no O_DIRECT, no fallocate).
        options: Passed on to mount.
    """
    if os.geteuid() != 0:
        pytest.skip(f"mounting a {kind} needs root")
    folder.mkdir()
    command = ["mount", "-t", kind, *(["-o", options] if options else []), kind, str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"mounting a {kind} is not permitted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a test that fails may still hold files
