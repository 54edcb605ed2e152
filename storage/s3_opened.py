"""One object of S3, held to the ETag that it had when it was opened."""

from __future__ import annotations

from typing import Protocol

from .errors import ObjectNotFoundError, StorageError
from .s3_client import Answer


class Ranges(Protocol):
    """Reads ranges of objects: `S3Reader`."""

    def head(self, key: str) -> Answer: ...
    def read_into(self, key: str, offset: int, out: memoryview, *, etag: str = "") -> None: ...
    def too_short(self, key: str, offset: int, end: int, num_bytes: int) -> StorageError: ...
    def gone(self, key: str) -> StorageError: ...


class S3OpenObject:
    """Reads one object as long as it is the one that was opened; see `ObjectReader`. Safe for threads.

    S3 keeps nothing open: an object that has been replaced or deleted meanwhile cannot be read, and that is an error.

    Args:
        ranges: Who reads.
        key: Key of the object.
        etag: Its ETag; "" where the server gives none.
        num_bytes: Its length.
    """

    def __init__(self, ranges: Ranges, key: str, etag: str, num_bytes: int) -> None:
        self._ranges = ranges
        self._key = key
        self._etag = etag
        self._num_bytes = num_bytes

    @classmethod
    def look_up(cls, ranges: Ranges, key: str) -> S3OpenObject:
        """Open an object. Raises ObjectNotFoundError. Blocks."""
        answer = ranges.head(key)
        return cls(ranges, key, str(answer.get("ETag", "")), int(answer["ContentLength"]))

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on; see `Store.read_into`.

        Raises:
            ObjectNotFoundError: It was deleted.
            StoreIOError: It was replaced, or is shorter.
        """
        end = offset + out.nbytes
        if not 0 <= offset <= end <= self._num_bytes:
            raise self._ranges.too_short(self._key, offset, end, self._num_bytes)
        if out.nbytes == 0:
            return
        try:
            self._ranges.read_into(self._key, offset, out, etag=self._etag)
        except ObjectNotFoundError as exc:
            raise self._ranges.gone(self._key) from exc

    def close(self) -> None:
        """Nothing is held. May be called again."""
