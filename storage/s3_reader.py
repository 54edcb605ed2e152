"""Read objects of S3 by ranges, straight into memory, and notice when they change."""

from __future__ import annotations

import contextlib
import datetime
import errno
import re
import threading
from collections import OrderedDict
from concurrent.futures import wait
from typing import Any

from .base import ObjectStat
from .errors import ObjectExistsError, ObjectNotFoundError, StorageError, StoreIOError
from .s3_calls import Attempt, Calls
from .s3_client import Answer
from .s3_errors import server_time
from .workers import WorkerPool

RANGE_BYTES = 16 << 20
_STEP_BYTES = 256 << 10
_MAX_REMEMBERED = 10_000
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class S3Reader:
    """Reads the objects of a store. Safe for threads.

    An object that is read by several ranges must not change between them. So the ETag that `stat`, or else the first
    range, has found is remembered, and every later range has to be of the same; or else of one that the caller names.

    Args:
        calls: How the server is called.
        pool: Who reads the ranges of one long read.
    """

    def __init__(self, calls: Calls, pool: WorkerPool) -> None:
        self._calls = calls
        self._pool = pool
        self._etags: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def forget(self, key: str) -> None:
        """Let the object be another from now on: we have written or deleted it."""
        with self._lock:
            self._etags.pop(key, None)

    def head(self, key: str) -> Answer:
        """Ask for what is known of an object. Raises ObjectNotFoundError. Blocks."""
        return self._calls.run(lambda at: at.client.head_object(**self._calls.at(key)), action="look up", key=key)

    def stat(self, key: str) -> ObjectStat:
        """Tell an object's length and age, and hold what is read from now on to its ETag. Blocks."""
        answer = self.head(key)
        self.forget(key)
        self._hold_to(key, str(answer.get("ETag", "")))
        return ObjectStat(key, int(answer["ContentLength"]), age_s(answer, answer["LastModified"]))

    def read_into(self, key: str, offset: int, out: memoryview, *, etag: str = "") -> None:
        """Fill `out` from `offset` on; see `Store.read_into`. Long reads go by several ranges at once.

        Args:
            key: Key of the object.
            offset: Where to begin.
            out: What to fill.
            etag: What the object must be; "": what is remembered.
        """
        end = offset + out.nbytes
        if out.nbytes == 0 or offset < 0 or end >= 1 << 63:
            num_bytes = int(self.head(key)["ContentLength"])
            if not 0 <= offset <= end <= num_bytes:
                raise self.too_short(key, offset, end, num_bytes)
            return
        with out.cast("B") as view:
            if view.nbytes <= RANGE_BYTES:
                self._read_range(key, offset, view, etag)
            else:
                self._read_ranges(key, offset, view, etag)

    def read_all(self, key: str, limit_bytes: int) -> tuple[bytes | None, str]:
        """Return a small object, or None if it is longer than `limit_bytes`, and its ETag. Blocks."""

        def call(attempt: Attempt) -> tuple[bytes | None, str]:
            answer = attempt.client.get_object(**self._calls.at(key))
            num_bytes, etag = int(answer["ContentLength"]), str(answer.get("ETag", ""))
            with contextlib.closing(answer["Body"]) as body:
                if num_bytes > limit_bytes:
                    return None, etag
                out = bytearray(num_bytes)
                num_read = self._fill(attempt, body, memoryview(out))
            if num_read < num_bytes:
                raise self._cut_off(key, num_read, num_bytes)
            return bytes(out), etag

        return self._calls.run(call, action="read", key=key)

    def _read_ranges(self, key: str, offset: int, view: memoryview, etag: str) -> None:
        num_ranges = -(-view.nbytes // RANGE_BYTES)
        size = -(-view.nbytes // num_ranges)
        pieces = [(start, view[start : start + size]) for start in range(0, view.nbytes, size)]
        try:
            done = [self._pool.submit(self._read_range, key, offset + start, piece, etag) for start, piece in pieces]
        except RuntimeError as exc:
            raise StorageError(f"cannot read {self._calls.url}/{key}: its store was closed", key=key) from exc
        wait(done)
        for _, piece in pieces:
            piece.release()
        for each in done:
            each.result()

    def _read_range(self, key: str, offset: int, out: memoryview, etag: str) -> None:
        num_done = 0

        def call(attempt: Attempt) -> None:
            nonlocal num_done
            num_done += self._read_once(attempt, key, offset + num_done, out[num_done:], etag)
            if num_done < out.nbytes:
                raise self._cut_off(key, num_done, out.nbytes)

        try:
            self._calls.run(call, action="read", key=key)
        except ObjectExistsError as exc:  # 412: it has another ETag now
            self.forget(key)
            raise self._changed(key) from exc

    def _read_once(self, attempt: Attempt, key: str, offset: int, rest: memoryview, etag: str) -> int:
        """Read what is left of a range, until it is there or the body ends. Returns how many bytes came."""
        end = offset + rest.nbytes
        with self._lock:
            wanted = etag or self._etags.get(key)
        held = {"IfMatch": wanted} if wanted else {}
        with rest:
            answer = attempt.client.get_object(**self._calls.at(key), Range=f"bytes={offset}-{end - 1}", **held)
            with contextlib.closing(answer["Body"]) as body:
                self._check_answer(answer, key, offset, end, etag)
                return self._fill(attempt, body, rest)

    @staticmethod
    def _fill(attempt: Attempt, body: Any, out: memoryview) -> int:
        """Read until all is there or the body ends. Returns how many bytes came."""
        num_read = 0
        while num_read < out.nbytes:
            attempt.check()
            with out[num_read : num_read + _STEP_BYTES] as piece:
                count = _read_some(body, piece)
            if count == 0:
                break
            num_read += count
        return num_read

    def _check_answer(self, answer: Answer, key: str, offset: int, end: int, etag: str) -> None:
        match = _CONTENT_RANGE.fullmatch(str(answer.get("ContentRange", "")))
        total = int(match[3]) if match else int(answer["ContentLength"])
        found = str(answer.get("ETag", ""))
        if etag and found != etag:
            raise self._changed(key)
        if total < end:
            raise self.too_short(key, offset, end, total)
        first, last = (int(match[1]), int(match[2])) if match else (0, total - 1)
        if (first, last) != (offset, end - 1):
            raise StoreIOError(
                f"asked for bytes {offset} to {end} of {self._calls.url}/{key}, the server sends {first} to {last + 1}",
                key=key,
            )
        if not etag:
            self._hold_to(key, found)

    def _hold_to(self, key: str, etag: str) -> None:
        with self._lock:
            held = self._etags.setdefault(key, etag) if etag else etag
            if len(self._etags) > _MAX_REMEMBERED:
                self._etags.popitem(last=False)
        if held != etag:
            self.forget(key)
            raise self._changed(key)

    def _changed(self, key: str) -> StoreIOError:
        return StoreIOError(
            f"{self._calls.url}/{key} was replaced while it was being read (its ETag changed); load again", key=key
        )

    def gone(self, key: str) -> ObjectNotFoundError:
        """The error of an object that was there."""
        return ObjectNotFoundError(
            f"{self._calls.url}/{key} was deleted while it was being read; load again, or another step", key=key
        )

    def too_short(self, key: str, offset: int, end: int, num_bytes: int) -> StoreIOError:
        """The error of an object that has not the bytes that are asked for."""
        return StoreIOError(
            f"cannot read bytes {offset} to {end} of {self._calls.url}/{key}: it has {num_bytes}; it was cut short, or "
            "is not what was written",
            key=key,
        )

    def _cut_off(self, key: str, num_read: int, num_bytes: int) -> StoreIOError:
        return StoreIOError(
            f"the connection ended after {num_read} of {num_bytes} bytes of {self._calls.url}/{key}; try again",
            key=key,
            errno=errno.EIO,
            retryable=True,
        )


def _read_some(body: Any, piece: memoryview) -> int:
    """Read what has come, up to a whole piece; 0 where the body ends, early or not.

    boto3's own `readinto` waits until the piece is full, however slowly its bytes trickle.
    """
    from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError
    from urllib3 import exceptions as of

    raw: Any = getattr(body, "_raw_stream", None)
    try:
        if not hasattr(raw, "read1"):  # urllib3 1
            return int(body.readinto(piece))
        text = raw.read1(piece.nbytes)
    except (IncompleteReadError, ResponseStreamingError, of.ProtocolError):
        return 0
    except of.ReadTimeoutError as exc:
        raise ReadTimeoutError(endpoint_url=exc.url or "", error=exc) from exc
    piece[: len(text)] = text
    return len(text)


def age_s(answer: Answer, since: datetime.datetime) -> float:
    """Seconds from `since` to an answer's Date, which is the same server's clock; never negative."""
    now = server_time(answer) or datetime.datetime.now(datetime.UTC)
    return max(0.0, (now - since).total_seconds())
