"""A server on loopback that answers as a test says, or passes the request on to a real one."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

_ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>scripted</Message></Error>'
_OPERATIONS = {
    ("PUT", "partNumber"): "UploadPart",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "uploadId"): "ListParts",
    ("GET", "list-type"): "ListObjectsV2",
}
_PLAIN_OPERATIONS = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
_HOP_BY_HOP = {"connection", "transfer-encoding", "expect", "keep-alive"}


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked; `number` counts from 0, and the names of headers are in lower case."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}

    @property
    def operation(self) -> str:
        """As S3 names it."""
        query = self.query
        found = [name for (method, of), name in _OPERATIONS.items() if method == self.method and of in query]
        return found[0] if found else _PLAIN_OPERATIONS[self.method]

    @property
    def access_key(self) -> str:
        """Of whoever has signed it."""
        match = re.search(r"Credential=([^/]+)/", self.headers.get("authorization", ""))
        return match[1] if match else ""


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered.

    Attributes:
        status: The HTTP status.
        body: The body.
        headers: Added to, or instead of, Content-Length, ETag and Date.
        cut_bytes: How many bytes of the body are sent before the connection ends; None: all.
        stalls: Nothing more is sent after those, and the connection stays open until the server is closed.
        resets: The connection is reset in place of an answer.
        trickles: The body comes byte by byte, one in 20 ms, until the server is closed.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut_bytes: int | None = None
    stalls: bool = False
    resets: bool = False
    trickles: bool = False


def refusal(status: int, code: str, **headers: str) -> Reply:
    """An error as S3 tells it."""
    return Reply(status, _ERROR.format(code).encode(), {"Content-Type": "application/xml", **headers})


class ScriptedS3:
    """A server that asks `script` for every answer. Signatures are not checked here.

    Args:
        script: Answers; None where the real server is to answer.
        upstream_url: The real server, `http://127.0.0.1:8333`, if there is one.
    """

    def __init__(self, script: Callable[[Request], Reply | None], upstream_url: str = "") -> None:
        self.requests: list[Request] = []
        self._script = script
        self._upstream = urlsplit(upstream_url).netloc
        self._lock = threading.Lock()
        self._closing = threading.Event()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                scripted._answer(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def forward(self, request: Request) -> Reply:
        """Ask the real server. The Host that was signed is passed on, so its signature holds there."""
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP}
            connection.request(request.method, request.path, request.body, headers)
            answer = connection.getresponse()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP}
            return Reply(answer.status, answer.read(), kept)
        finally:
            connection.close()

    def num_requests(self, operation: str) -> int:
        """How often it was asked for."""
        return sum(request.operation == operation for request in self.requests)

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
        body = handler.rfile.read(length)
        with self._lock:
            headers = {name.lower(): value for name, value in handler.headers.items()}
            request = Request(len(self.requests), handler.command, handler.path, headers, body)
            self.requests.append(request)
        reply = self._script(request)
        if reply is None:
            reply = self.forward(request)
        if reply.resets:
            _reset(handler)
        elif reply.stalls and reply.cut_bytes is None:
            self._closing.wait()
            handler.close_connection = True
        else:
            self._send(handler, reply)

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        handler.send_response_only(reply.status)
        headers = {"content-length": str(len(reply.body)), "etag": '"e"', "date": formatdate(usegmt=True)}
        for name, value in {**headers, **{name.lower(): value for name, value in reply.headers.items()}}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if reply.trickles:
            self._trickle(handler, reply.body)
        elif handler.command != "HEAD":
            handler.wfile.write(reply.body[: reply.cut_bytes])
        if reply.stalls:
            self._closing.wait()
        handler.close_connection = reply.stalls or reply.cut_bytes is not None

    def _trickle(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        for i in range(len(body)):
            if self._closing.wait(0.02):
                return
            handler.wfile.write(body[i : i + 1])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are a part of what is tested; an error of the script is not."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _reset(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
