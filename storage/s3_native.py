"""Send parts by awscrt's own threads, which do not need the interpreter's lock.

urllib3 sends a part in many pieces, and takes the lock for each: beside a thread that runs Python without pause every
piece waits for up to 5 ms, and that thread loses up to half of its time. awscrt asks once for the whole part and does
the rest (TLS, sockets, the answer) without Python. botocore goes on to make and sign the requests and to read the
answers: this is only what is between, by its event "before-send".
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

from .s3_body import Body
from .s3_options import S3Options

LEAST_BYTES_PER_S = 256 << 10
"""A part that has had `timeout_s` and travels slower than this counts as lost: awscrt does not tell how far it is."""
_LOOK_S = 1.0
_KEPT_BACK = {
    "AWS_ERROR_S3_INTERNAL_ERROR": (500, "InternalError"),
    "AWS_ERROR_S3_SLOW_DOWN": (503, "SlowDown"),
    "AWS_ERROR_S3_REQUEST_TIMEOUT": (400, "RequestTimeout"),
    "AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED": (403, "RequestTimeTooSkewed"),
}
"""Answers that awscrt gives the name of and nothing else, by that name: status and code."""
_CLOSED = {
    *("AWS_ERROR_HTTP_CONNECTION_CLOSED", "AWS_ERROR_HTTP_SERVER_CLOSED", "AWS_ERROR_HTTP_CHANNEL_THROUGHPUT_FAILURE"),
    *("AWS_ERROR_HTTP_PROTOCOL_ERROR", "AWS_ERROR_HTTP_GOAWAY_RECEIVED", "AWS_ERROR_HTTP_RST_STREAM_RECEIVED"),
    *("AWS_IO_SOCKET_CLOSED", "AWS_IO_SOCKET_CONNECT_ABORTED", "AWS_IO_SOCKET_NOT_CONNECTED", "AWS_IO_BROKEN_PIPE"),
    *("AWS_IO_TLS_CLOSED_ABORT", "AWS_IO_TLS_CLOSED_GRACEFUL", "AWS_IO_TLS_ALERT_NOT_GRACEFUL"),
    *("AWS_IO_TLS_ERROR_READ_FAILURE", "AWS_IO_TLS_ERROR_WRITE_FAILURE"),
}
_UNREACHABLE = ("DNS", "REFUSED", "NO_ROUTE", "NETWORK_DOWN")
_CPUS_A_THREAD = 8  # one thread sends about 0.6 GB/s on a slow core
_MAX_THREADS = 4


class Request(Protocol):
    """What we use of botocore's signed request."""

    method: str
    url: str
    headers: Any
    body: object


def native_sender(options: S3Options, ca_path: str | None) -> Callable[..., Any] | None:
    """Return a handler of "before-send" that sends parts; None if awscrt, or one that is new enough, is missing.

    Args:
        options: For concurrency and timeouts.
        ca_path: The certificates that a server's must go back to; None: the system's.
    """
    try:
        from awscrt.s3 import S3RetryConfig  # noqa: F401 - the newest thing that we use of it
    except ImportError:
        return None
    return _Sender(options, ca_path)


class _Sender:
    """Sends parts. The threads and the connections are made for the first one."""

    def __init__(self, options: S3Options, ca_path: str | None) -> None:
        self._options = options
        self._ca_path = ca_path
        self._clients: dict[bool, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, request: Request, event_name: str, **_: object) -> Any:
        """Send a part and return botocore's answer; None for any other request. Blocks.

        Raises:
            StorageError: What the body's check says.
            botocore.exceptions.HTTPClientError: There was no answer, which may pass.
            Exception: What awscrt or the body says where it does not pass.
        """
        body = request.body
        if not event_name.endswith(".UploadPart") or not isinstance(body, Body):
            return None
        transfer = _Transfer(body)
        transfer.begin(self._client_for(request.url), request)
        transfer.wait(self._options.timeout_s + body.num_bytes / LEAST_BYTES_PER_S, request.url)
        return transfer.answer(request.url)

    def _client_for(self, url: str) -> Any:
        is_tls = url.startswith("https:")
        with self._lock:
            if is_tls not in self._clients:
                self._clients[is_tls] = _make_client(self._options, self._ca_path, is_tls)
            return self._clients[is_tls]


class _Source:
    """A body, as awscrt's threads read it."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.error: Exception | None = None  # awscrt keeps no more of it than a number

    def readinto(self, out: memoryview) -> int:
        """Copy the next bytes."""
        try:
            return self._body.readinto(out)
        except Exception as exc:
            self.error = exc
            raise

    def read(self, size: int = -1) -> memoryview | bytes:
        """Return the next block. awscrt takes nothing without this, and does not call it."""
        return self._body.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move."""
        return self._body.seek(offset, whence)


class _Transfer:
    """One request under way. awscrt's threads call the methods whose names begin with `_on`."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._source = _Source(body)
        self._done = threading.Event()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._content = b""
        self._error: Exception | None = None
        self._request: Any = None

    def begin(self, client: Any, request: Request) -> None:
        """Start it."""
        from awscrt.http import HttpHeaders, HttpRequest
        from awscrt.s3 import S3RequestType

        parts = urlsplit(request.url)
        headers = HttpHeaders([(name, _text(value)) for name, value in request.headers.items() if name != "Expect"])
        headers.set("Host", parts.netloc)
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        self._request = client.make_request(
            type=S3RequestType.DEFAULT,
            operation_name="UploadPart",
            request=HttpRequest(request.method, path, headers, self._source),
            on_headers=self._on_headers,
            on_body=self._on_body,
            on_done=self._on_done,
        )

    def wait(self, limit_s: float, url: str) -> None:
        """Wait for its end; after `limit_s`, or when the body's check says so, it is given up."""
        from botocore.exceptions import ReadTimeoutError

        end_s = time.monotonic() + limit_s
        try:
            while not self._done.wait(_LOOK_S):
                self._body.check()
                if time.monotonic() > end_s:
                    raise ReadTimeoutError(endpoint_url=url)
        except BaseException:
            self._body.close()  # nothing reads the caller's memory from now on, whatever awscrt still does
            self._request.cancel()
            raise

    def answer(self, url: str) -> Any:
        """Return what the server said, as botocore's; or raise why there is no answer."""
        from botocore.awsrequest import AWSResponse

        if not self._status:
            status, code = _KEPT_BACK.get(str(getattr(self._error, "name", "")), (0, ""))
            if not status:
                if self._source.error is not None:
                    raise self._source.error
                raise _no_answer(self._error, url)
            text = f"<Error><Code>{code}</Code><Message>{self._error}</Message></Error>"
            return AWSResponse(url, status, {}, _Content(text.encode()))
        return AWSResponse(url, self._status, self._headers, _Content(self._content))

    def _on_headers(self, status_code: int, headers: list[tuple[str, str]], **_: object) -> None:
        self._status, self._headers = status_code, dict(headers)

    def _on_body(self, chunk: bytes, **_: object) -> None:
        self._content += bytes(chunk)

    def _on_done(
        self,
        error: Exception | None = None,
        status_code: int | None = None,
        error_headers: list[tuple[str, str]] | None = None,
        error_body: bytes | None = None,
        **_: object,
    ) -> None:
        if error is not None:
            self._error = error
            self._status = status_code or 0  # headers without the rest are no answer
            self._headers = dict(error_headers or ())
            self._content = error_body or b""
        self._done.set()


class _Content:
    """What botocore reads an answer's body from."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self, *_: object) -> Iterator[bytes]:
        """Yield all of it."""
        yield self._content


def _make_client(options: S3Options, ca_path: str | None, is_tls: bool) -> Any:
    from awscrt.io import ClientBootstrap, ClientTlsContext, DefaultHostResolver, EventLoopGroup, TlsContextOptions
    from awscrt.s3 import S3Client, S3RequestTlsMode, S3RetryConfig, S3RetryMode

    group = EventLoopGroup(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // _CPUS_A_THREAD)))
    tls = None
    if is_tls:
        context = TlsContextOptions()
        if ca_path is not None:
            context.override_default_trust_store_from_path(None, ca_path)
        tls = ClientTlsContext(context).new_connection_options()
    return S3Client(
        bootstrap=ClientBootstrap(group, DefaultHostResolver(group)),
        region=options.region or "us-east-1",
        tls_mode=S3RequestTlsMode.ENABLED if is_tls else S3RequestTlsMode.DISABLED,
        tls_connection_options=tls,
        part_size=options.part_bytes,  # of its pool's chunks: memory that is used again costs no page faults
        max_active_connections_override=options.concurrency,
        retry_config=S3RetryConfig(retry_mode=S3RetryMode.NONE),  # they are ours (`s3_calls`)
        connect_timeout_ms=round(1000 * min(10.0, options.timeout_s)),
    )


def _no_answer(error: Exception | None, url: str) -> Exception:
    """Say in botocore's words why there was no answer; what is not known to pass stays what it is."""
    from botocore import exceptions as of

    name = str(getattr(error, "name", ""))
    kind: Callable[..., Exception]
    if "TIMEOUT" in name:
        kind = of.ConnectTimeoutError
    elif any(word in name for word in _UNREACHABLE):
        kind = of.EndpointConnectionError
    elif name in _CLOSED or error is None:
        kind = of.ConnectionClosedError
    elif "TLS" in name:
        kind = of.SSLError
    else:
        return error
    return kind(endpoint_url=url, error=error)


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
