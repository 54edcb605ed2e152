"""Imported by what forks: S3's description, which takes a core 0.1 s to read, is there before."""

from __future__ import annotations

import contextlib

from tidegate.storage import S3Options, StorageError
from tidegate.storage.s3_client import make_client

with contextlib.suppress(StorageError):
    make_client(S3Options(endpoint_url="http://127.0.0.1:9", transport="urllib3")).close()
