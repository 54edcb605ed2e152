"""A server on loopback that takes uploads at a set rate, keeps small objects and forgets the rest.

    python -m tests.kit.slow_s3 [BYTES_PER_S]

For measuring: it costs little, counts what is under way at once, and looks at neither signatures nor checksums.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE_BYTES = 1 << 18
_KEPT_BYTES = 1 << 20
_UPLOAD = "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
_COMPLETED = '<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>'
_ENTRY = "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>{size}</Size></Contents>"


class SlowS3:
    """The server in a process of its own, while it is entered.

    Args:
        bytes_per_s: What all connections together may send it.
    """

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self._bytes_per_s = bytes_per_s
        self._process: subprocess.Popen[str] | None = None
        self.endpoint_url = ""

    def __enter__(self) -> SlowS3:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._bytes_per_s)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.endpoint_url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def counts(self) -> dict[str, int]:
        """What it has taken: `num_bytes`, `num_parts`, `longest_part` in bytes, `at_once`: the most parts under way."""
        with urllib.request.urlopen(f"{self.endpoint_url}/counts") as answer:
            found: dict[str, int] = json.loads(answer.read())
        return found


class _Taker:
    """What all connections share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._busy_until_s = 0.0
        self._lock = threading.Lock()
        self._under_way = 0
        self.counts = {"num_bytes": 0, "num_parts": 0, "longest_part": 0, "at_once": 0}
        self.kept: dict[str, bytes] = {}

    def take(self, num_bytes: int) -> None:
        """Count bytes, and sleep until the rate allows them."""
        with self._lock:
            self.counts["num_bytes"] += num_bytes
            now_s = time.monotonic()
            self._busy_until_s = max(now_s - 0.05, self._busy_until_s) + num_bytes / self._bytes_per_s
            pause_s = self._busy_until_s - now_s
        if pause_s > 0:
            time.sleep(pause_s)

    @contextlib.contextmanager
    def part(self, num_bytes: int) -> Iterator[None]:
        """Count a part that is on its way."""
        with self._lock:
            self._under_way += 1
            self.counts["num_parts"] += 1
            self.counts["longest_part"] = max(self.counts["longest_part"], num_bytes)
            self.counts["at_once"] = max(self.counts["at_once"], self._under_way)
        yield
        with self._lock:
            self._under_way -= 1


def _serve(connection: socket.socket, taker: _Taker) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    piece = memoryview(bytearray(_PIECE_BYTES))
    rest = b""
    with contextlib.suppress(ConnectionError):
        while True:
            while b"\r\n\r\n" not in rest:
                got = connection.recv(1 << 16)
                if not got:
                    return
                rest += got
            head, _, rest = rest.partition(b"\r\n\r\n")
            if b"100-continue" in head.lower():
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            left = int(found[1]) if found else 0
            method, target = head.split(b" ", 2)[:2]
            with taker.part(left) if b"partNumber=" in target else contextlib.nullcontext():
                content = bytearray(rest[:left]) if left <= _KEPT_BYTES else None
                taker.take(min(left, len(rest)))
                rest, left = rest[left:], left - min(left, len(rest))
                while left:
                    num_bytes = connection.recv_into(piece[: min(left, _PIECE_BYTES)])
                    if not num_bytes:
                        return
                    if content is not None:
                        content += piece[:num_bytes]
                    left -= num_bytes
                    taker.take(num_bytes)
            connection.sendall(_answer(method.decode(), target.decode(), head, content, taker))


def _answer(method: str, target: str, head: bytes, content: bytearray | None, taker: _Taker) -> bytes:
    parts = urlsplit(target)
    path, query = unquote(parts.path), unquote(parts.query)
    if path == "/counts":
        return _response(200, json.dumps(taker.counts).encode())
    if method == "POST":
        return _response(200, (_UPLOAD if "uploads" in query else _COMPLETED).encode())
    if method == "PUT" and "partNumber=" not in query:
        if path in taker.kept and b"if-none-match" in head.lower():
            return _response(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        if content is not None:
            taker.kept[path] = bytes(content)
        return _response(200, b"")
    if method == "DELETE":
        taker.kept.pop(path, None)
        return _response(204, b"")
    if method in ("GET", "HEAD") and (path in taker.kept or path.count("/") > 1):
        text = taker.kept.get(path)
        return _response(404 if text is None else 200, text or b"", is_head=method == "HEAD")
    if method == "GET":
        return _response(200, _listing(path, query, taker.kept))
    return _response(200, b"")


def _listing(bucket: str, query: str, kept: dict[str, bytes]) -> bytes:
    if "uploads" in query:
        return b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"
    root = bucket.rstrip("/") + "/"
    found = re.search(r"(?:^|&)prefix=([^&]*)", query)
    prefix = root + (found[1] if found else "")
    entries = (
        _ENTRY.format(key=escape(path[len(root) :]), size=len(text))
        for path, text in kept.items()
        if path.startswith(prefix)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>".encode()


def _response(status: int, body: bytes, *, is_head: bool = False) -> bytes:
    head = f'HTTP/1.1 {status} X\r\nETag: "e"\r\nContent-Length: {len(body)}\r\n\r\n'
    return head.encode() + (b"" if is_head else body)


def main(*arguments: Any) -> None:
    """Serve until killed; the port is the first line of the output."""
    taker = _Taker(float(arguments[0]) if arguments else math.inf)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection, taker), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
