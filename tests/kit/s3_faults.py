"""Faults between a boto3 client and a real server: answers that the server did not give, and ones that got lost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'


class Faults:
    """Arms single calls of a client.

    Args:
        client: A boto3 client.

    Attributes:
        num_calls: How often each operation was sent.
        num_at_once: The most calls of each operation that were under way at a time.
    """

    def __init__(self, client: Any) -> None:
        self.num_calls: Counter[str] = Counter()
        self.num_at_once: Counter[str] = Counter()
        self._under_way: Counter[str] = Counter()
        self._armed: dict[tuple[str, int], Callable[[Any], Any]] = {}
        self._always: dict[str, Callable[[Any], Any]] = {}
        self._lock = threading.Lock()
        client.meta.events.register("before-send.s3", self._on_send)
        client.meta.events.register("response-received.s3", self._on_response)

    def answer(
        self, operation: str, status: int, code: str, *, nth: int | None = 1, message: str = "scripted", **headers: str
    ) -> None:
        """Answer the `nth` call from now on (None: all of them) with an error, which the server never sees."""

        def reply(request: Any) -> Any:
            from botocore.awsrequest import AWSResponse

            return AWSResponse(
                request.url, status, {"content-type": "application/xml", **headers}, _Raw(_error(code, message))
            )

        self._arm(operation, nth, reply)

    def lose_reply(self, operation: str, *, nth: int | None = 1) -> None:
        """Let the server take the `nth` call from now on, and lose its answer."""

        def reply(request: Any) -> Any:
            from botocore.exceptions import ConnectionClosedError
            from botocore.httpsession import URLLib3Session

            session = URLLib3Session()
            _ = session.send(request).content
            session.close()
            raise ConnectionClosedError(endpoint_url=request.url)

        self._arm(operation, nth, reply)

    def change(self, operation: str, change: Callable[[Any], None], *, nth: int | None = 1) -> None:
        """Change a request before it is sent."""
        self._arm(operation, nth, change)

    def clear(self) -> None:
        """Disarm everything."""
        with self._lock:
            self._armed.clear()
            self._always.clear()

    def _arm(self, operation: str, nth: int | None, reply: Callable[[Any], Any]) -> None:
        with self._lock:
            if nth is None:
                self._always[operation] = reply
            else:
                self._armed[operation, self.num_calls[operation] + nth] = reply

    def _on_send(self, request: Any, event_name: str, **_: Any) -> Any:
        operation = event_name.rpartition(".")[2]
        with self._lock:
            self.num_calls[operation] += 1
            self._under_way[operation] += 1
            self.num_at_once[operation] = max(self.num_at_once[operation], self._under_way[operation])
            reply = self._armed.pop((operation, self.num_calls[operation]), self._always.get(operation))
        return None if reply is None else reply(request)

    def _on_response(self, event_name: str, **_: Any) -> None:
        with self._lock:
            self._under_way[event_name.rpartition(".")[2]] -= 1


class _Raw:
    """A response's stream, as botocore reads it."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, **_: Any) -> list[bytes]:
        body, self._body = self._body, b""
        return [body]


def _error(code: str, message: str) -> bytes:
    return _ERROR.format(code=code, message=message).encode()
