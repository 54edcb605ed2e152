"""From what a caller calls the root of checkpoints to a store."""

from __future__ import annotations

import os
from typing import get_args

from tidegate.storage.base import Store
from tidegate.storage.errors import StorageError
from tidegate.storage.open import open_store
from tidegate.storage.output_file import IOMode

from .errors import ConfigError


def open_root(root: str | os.PathLike[str] | Store | None, io: IOMode = "auto") -> Store:
    """Open a root; a Store is returned as it is. Raises ConfigError."""
    if root is None:
        raise ConfigError("no root was given; pass the folder or URL of the checkpoints, or a checkpoint_id with one")
    if not isinstance(root, str | os.PathLike):
        return root
    if io not in get_args(IOMode):
        raise ConfigError(f"io is {io!r}; choose one of {', '.join(get_args(IOMode))}")
    try:
        return open_store(root, io=io)
    except StorageError as exc:
        raise ConfigError(f"root {root!r} cannot be used: {exc}") from exc
