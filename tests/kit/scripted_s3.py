"""A server on loopback that answers as a test says: for what a real one cannot be made to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked; `number` counts from 0."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered.

    Attributes:
        status: The HTTP status.
        body: The body.
        headers: Added to, or instead of, Content-Length, ETag and Date.
        cut_bytes: How many bytes of the body are sent before the connection ends; None: all.
        stalls: Nothing more is sent after those, and the connection stays open until the server is closed.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut_bytes: int | None = None
    stalls: bool = False


class ScriptedS3:
    """A server that asks `script` for every answer. Signatures are not checked."""

    def __init__(self, script: Callable[[Request], Reply]) -> None:
        self.requests: list[Request] = []
        self._script = script
        self._lock = threading.Lock()
        self._closing = threading.Event()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                scripted._answer(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ScriptedS3:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        handler.rfile.read(length)
        with self._lock:
            request = Request(
                len(self.requests), handler.command, handler.path,
                {name.lower(): value for name, value in handler.headers.items()}, length,
            )  # fmt: skip
            self.requests.append(request)
        reply = self._script(request)
        if reply.stalls and reply.cut_bytes is None:
            self._closing.wait()
            handler.close_connection = True
            return
        handler.send_response_only(reply.status)
        headers = {"Content-Length": str(len(reply.body)), "ETag": '"e"', "Date": formatdate(usegmt=True)}
        for name, value in {**headers, **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(reply.body[: reply.cut_bytes])
        if reply.stalls:
            self._closing.wait()
        handler.close_connection = reply.stalls or reply.cut_bytes is not None
