"""Stores that write from GPU memory and read into it by the real KvikIO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tidegate.storage import LocalStore, StorageError
from tidegate.storage.device_file import load_kvikio


def kvikio_mode() -> str:
    """How KvikIO works on this machine. Skips the test where it does not."""
    try:
        return load_kvikio().mode
    except StorageError as exc:
        pytest.skip(str(exc))


@contextmanager
def gds_store(folder: Path) -> Iterator[LocalStore]:
    """Open such a store in a folder, or skip the test."""
    kvikio_mode()
    with closing(LocalStore(folder / "root", io="gds")) as store:
        yield store
