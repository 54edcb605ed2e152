"""The objects in a folder, as a listing shows them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from .base import ObjectStat
from .errors import InvalidKeyError
from .folders import FolderChain
from .keys import MAX_KEY_PARTS, check_key


def object_stat(key: str, status: os.stat_result) -> ObjectStat:
    """Tell an object's length, and its age by its file's time; never a negative one."""
    return ObjectStat(key, status.st_size, max(0.0, time.time() - status.st_mtime))


def folder_names(root: str) -> list[str]:
    """Name the folders in a store's folder; none if that is not there. Blocks."""
    with (
        contextlib.suppress(FileNotFoundError),
        FolderChain(root, ()) as chain,
        os.scandir(chain.fd) as entries,
    ):
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def scan(root: str, folder: str) -> tuple[Sequence[ObjectStat], Sequence[str]]:
    """List one folder. Blocks.

    Args:
        root: The store's folder.
        folder: "" for the root itself, or a prefix that ends in "/".

    Returns:
        Its objects, and the folders below it, as prefixes. Nothing if it is not there.
    """
    stats = []
    below = []
    with (
        contextlib.suppress(FileNotFoundError),
        FolderChain(root, folder.split("/")[:-1]) as chain,
        os.scandir(chain.fd) as entries,
    ):
        for entry in entries:
            key = folder + entry.name
            with contextlib.suppress(InvalidKeyError, FileNotFoundError):  # not ours, or gone meanwhile
                check_key(key)
                if entry.is_file(follow_symlinks=False):
                    stats.append(object_stat(key, entry.stat(follow_symlinks=False)))
                elif entry.is_dir(follow_symlinks=False) and key.count("/") < MAX_KEY_PARTS - 1:
                    below.append(key + "/")
    return stats, below
