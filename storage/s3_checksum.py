"""Checksums that the server verifies, computed over memoryviews without a copy."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable

from .errors import StorageError
from .s3_options import Checksum

_Update = Callable[[memoryview, int], int]


class Checksummer:
    """Computes one kind of checksum and names it as S3 does.

    Args:
        kind: See `S3Options.checksum`.

    Raises:
        StorageError: The kind needs awscrt, which is not installed.
    """

    def __init__(self, kind: Checksum) -> None:
        self._kind, self._update = _choose(kind)

    @property
    def algorithm(self) -> str | None:
        """ "CRC64NVME", "CRC32C" or "CRC32"; None: no checksums."""
        return None if self._update is None else self._kind.upper()

    def upload_arguments(self) -> dict[str, object]:
        """Arguments of create_multipart_upload."""
        if self.algorithm is None:
            return {}
        kind = "FULL_OBJECT" if self._kind == "crc64nvme" else "COMPOSITE"
        return {"ChecksumAlgorithm": self.algorithm, "ChecksumType": kind}

    def arguments(self, views: Iterable[memoryview]) -> dict[str, str]:
        """Arguments of put_object, upload_part and of a completed part: the checksum of all bytes of `views`."""
        if self._update is None:
            return {}
        value = 0
        for view in views:
            value = self._update(view, value)  # all of these let the GIL go
        digest = value.to_bytes(8 if self._kind == "crc64nvme" else 4, "big")
        return {f"Checksum{self.algorithm}": base64.b64encode(digest).decode()}


def _choose(kind: Checksum) -> tuple[str, _Update | None]:
    if kind == "none":
        return kind, None
    if kind == "crc32":
        return kind, zlib.crc32
    try:
        from awscrt import checksums
    except ImportError as exc:
        if kind == "auto":
            return "crc32", zlib.crc32
        raise StorageError(f'checksum "{kind}" needs awscrt: pip install awscrt, or use "crc32"') from exc
    if kind == "crc32c":
        return kind, checksums.crc32c
    return "crc64nvme", checksums.crc64nvme
