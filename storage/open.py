"""From a path or a URL to a store."""

from __future__ import annotations

import os
import re
import threading
from urllib.parse import unquote, urlsplit

from .base import Store
from .errors import StorageError
from .local import LocalStore
from .memory import MemoryStore
from .output_file import IOMode
from .s3 import S3Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.RLock()


def open_store(root: str | os.PathLike[str], *, io: IOMode = "auto") -> Store:
    """Open the store at `root`.

    Args:
        root: A folder, or `file:///absolute/folder` (percent-encoded), or `s3://bucket/prefix` (for options in it see
            `parse_s3_url`), or `memory://name`: one store of that name in this process. A PathLike is always a folder.
        io: For folders; see `LocalStore`.

    Raises:
        StorageError: The scheme is none of these, the root cannot hold objects, `io` is "gds" and KvikIO cannot be
            used, or boto3 is missing for S3.
    """
    text = os.fspath(root)
    scheme = _SCHEME.match(text) if isinstance(root, str) else None
    if scheme is None:
        return LocalStore(text, io=io)
    match scheme[1].lower():
        case "file":
            return LocalStore(_path_of_url(text), io=io)
        case "memory":
            return _memory_store(text[scheme.end() :])
        case "s3":
            return S3Store.from_url(text)
        case other:
            raise StorageError(
                f'cannot open {text}: "{other}" is no scheme of a store; give a folder, file:///folder, '
                "s3://bucket/prefix or memory://name"
            )


def split_url(url: str) -> tuple[str, str]:
    """Split the URL of an object into that of its store and its key; options after a "?" go with the store."""
    if not url.lower().startswith("s3://"):
        root, _, key = url.rpartition("/")
        return root, key
    address, question, options = url.partition("?")
    root, _, key = address.rpartition("/")
    return root + question + options, unquote(key)


def _path_of_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise StorageError(f"cannot open {url}: write file:///absolute/folder, with ? and # as %3F and %23")
    return unquote(parts.path)


def _memory_store(name: str) -> MemoryStore:
    if not name:
        raise StorageError("cannot open memory://: give it a name, as in memory://trial")
    with _memory_lock:
        return _memory_stores.setdefault(name, MemoryStore(name))
