"""Calls of an S3 server that are tried again until a deadline."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .errors import StorageError, StorePermissionError, StoreTimeoutError
from .s3_client import Client, make_client, request_arguments
from .s3_errors import error_code, is_expired, s3_error
from .s3_options import S3Options, s3_url

_T = TypeVar("_T")
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 8.0
_MAX_REFUSALS = 3  # of credentials that a provider may renew
_FIRST_DEADLINE_S = 30.0  # until a server has answered once: it may not be the right one


class Attempt:
    """One attempt at a call.

    Attributes:
        client: What to call.
        number: 0 for the first attempt.
    """

    def __init__(self, client: Client, number: int, check: Callable[[], None]) -> None:
        self.client = client
        self.number = number
        self.check = check
        """Raises StoreTimeoutError once the deadline has passed: to be called where bytes trickle."""


class Calls:
    """Makes the calls of one store. Safe for threads.

    Retries are ours, not botocore's, because a call has to end by a deadline, and because a refused put is a success
    if an attempt before it did take effect and only its answer was lost.

    Args:
        options: Deadlines, and what the client is made from.
        bucket: The bucket.
        prefix: What all keys of the store begin with, without "/" at its end.
        client: Used instead of one of ours.
        clock: Seconds, never going back.
        jitter: A number from 0 to 1 for each pause.
    """

    def __init__(
        self,
        options: S3Options,
        bucket: str,
        prefix: str,
        *,
        client: Client | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.options = options
        self.bucket = bucket
        self.prefix = prefix
        self.url = s3_url(bucket, prefix)
        self._client = client
        self._owns_client = client is None
        self._clock = clock
        self._jitter = jitter
        self._has_answered = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def name(self, key: str) -> str:
        """The name of an object in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def at(self, key: str) -> dict[str, object]:
        """Arguments that say which object is meant, and those of every call."""
        return {"Bucket": self.bucket, "Key": self.name(key), **request_arguments(self.options)}

    def run(
        self,
        call: Callable[[Attempt], _T],
        *,
        action: str,
        key: str,
        deadline_s: float | None = None,
        recover: Callable[[StorageError], _T | None] | None = None,
        stop: threading.Event | None = None,
    ) -> _T:
        """Make a call, again and again with growing random pauses while its errors are retryable. Blocks.

        Args:
            call: Makes one attempt. It may raise what boto3 raises, or a StorageError.
            action: What it does, to follow "cannot": "read", "write", …
            key: The object concerned.
            deadline_s: How long all attempts may take; None: the option.
            recover: Asked when an attempt that was not the first fails for good: returns what the call would have
                returned, if an earlier attempt took effect.
            stop: Ends the pauses and further attempts.

        Raises:
            StorageError: The last attempt's error.
        """
        limit_s = self.options.deadline_s if deadline_s is None else deadline_s
        if not self._has_answered:
            limit_s = min(limit_s, _FIRST_DEADLINE_S)
        start_s = self._clock()

        def check() -> None:
            if self._clock() - start_s > limit_s:
                raise StoreTimeoutError(
                    f"cannot {action} {self.url}/{key} within {limit_s:g} s: the server is too slow; see deadline_s",
                    key=key,
                )

        number = 0
        while True:
            client = self._made_client(action, key)
            try:
                result = call(Attempt(client, number, check))
                self._has_answered = True
                return result
            except StorageError as exc:
                error = exc
            except Exception as exc:  # noqa: BLE001 - all that boto3 and urllib3 raise; told as ours below
                error = s3_error(exc, action=action, url=f"{self.url}/{key}", key=key)
                error.__cause__ = exc
                self._has_answered = self._has_answered or bool(error_code(exc))  # a refusal is an answer, too
                if is_expired(exc):
                    self._renew(client)
            number += 1
            pause_s = self._pause_s(number)
            is_late = self._clock() - start_s + pause_s >= limit_s
            if self._is_final(error, number) or is_late or (stop is not None and stop.is_set()):
                return self._end(error, number, recover)
            _pause(pause_s, stop)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            if self._client is not None and self._pid == os.getpid():
                self._client.close()

    def _renew(self, expired: Client) -> None:
        """Let the next attempt make a client, which reads keys anew that lie in a file or in the environment."""
        with self._lock:
            if self._client is not expired or not self._owns_client:
                return
            self._client = None
        expired.close()  # what other threads still have under way on it is not cut off

    def _made_client(self, action: str, key: str) -> Client:
        if self._pid != os.getpid():
            raise StorageError(f"{self.url} was opened before a fork; open it anew here")
        with self._lock:
            if self._client is None:
                try:
                    self._client = make_client(self.options)
                except StorageError:
                    raise
                except Exception as exc:
                    raise s3_error(exc, action=action, url=f"{self.url}/{key}", key=key) from exc
            return self._client

    def _pause_s(self, number: int) -> float:
        return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**number) * (0.5 + 0.5 * self._jitter())

    @staticmethod
    def _is_final(error: StorageError, number: int) -> bool:
        return not error.retryable or (isinstance(error, StorePermissionError) and number >= _MAX_REFUSALS)

    @staticmethod
    def _end(error: StorageError, number: int, recover: Callable[[StorageError], _T | None] | None) -> _T:
        if number > 1:
            if recover is not None:
                recovered = recover(error)
                if recovered is not None:
                    return recovered
            error.message += f" (after {number} attempts)"
        raise error


def _pause(pause_s: float, stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(pause_s)
    else:
        stop.wait(pause_s)
