"""What is known to pass is tried again; anything else, such as a mistake of ours, fails at once, with its cause."""

from __future__ import annotations

import errno
import http.client
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

import tidegate
from tests.kit.slow_s3 import SlowS3
from tests.kit.states import filled
from tidegate.storage import S3Options, S3Store, StorageError
from tidegate.storage.s3_body import Body
from tidegate.storage.s3_calls import Attempt, Calls
from tidegate.storage.s3_errors import s3_error
from tidegate.storage.s3_native import _no_answer

PART_BYTES = 5 << 20
URL = "http://127.0.0.1:1"
TRANSPORTS = pytest.mark.parametrize("transport", ["awscrt", "urllib3"])


def of_urllib3(name: str) -> Exception:
    from urllib3 import exceptions

    kind = getattr(exceptions, name)
    error: Exception = kind(None, "no") if name in ("NewConnectionError", "ClosedPoolError") else kind("no")
    return error


def wrapped(inner: Exception, name: str = "HTTPClientError") -> Exception:
    """What botocore makes of an error that came out of urllib3."""
    from botocore import exceptions

    kind = getattr(exceptions, name)
    error: Exception = kind(error=inner, endpoint_url=URL)
    error.__context__ = inner  # as it was raised while that was handled
    return error


def unreadable() -> Exception:
    from botocore.parsers import ResponseParserError

    error: Exception = ResponseParserError("no XML")
    return error


PASSING: dict[str, Callable[[], Exception]] = {
    "reset": lambda: ConnectionResetError(errno.ECONNRESET, "reset"),
    "timeout": lambda: TimeoutError("timed out"),
    "half a line": lambda: http.client.IncompleteRead(b""),
    "protocol": lambda: of_urllib3("ProtocolError"),
    "no connection": lambda: of_urllib3("NewConnectionError"),
    "client given up": lambda: wrapped(of_urllib3("ClosedPoolError")),
    "reset in botocore": lambda: wrapped(ConnectionResetError(errno.ECONNRESET, "reset")),
    "timeout in botocore": lambda: wrapped(TimeoutError("timed out")),
    "TLS cut off": lambda: wrapped(ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), "SSLError"),
    "closed": lambda: wrapped(of_urllib3("ProtocolError"), "ConnectionClosedError"),
}
LASTING: dict[str, Callable[[], Exception]] = {
    "type": lambda: TypeError("a mistake"),
    "key": lambda: KeyError("ETag"),
    "memory": lambda: MemoryError("none left"),
    "descriptors": lambda: OSError(errno.EMFILE, "too many open files"),
    "type in botocore": lambda: wrapped(TypeError("a mistake")),
    "certificate": lambda: wrapped(ssl.SSLCertVerificationError(1, "self-signed"), "SSLError"),
    "no XML": unreadable,
}


@pytest.fixture(autouse=True)
def keys(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="needs boto3: pip install 'tidegate[dev]'")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")


@pytest.fixture
def server() -> Iterator[SlowS3]:
    with SlowS3() as server:
        yield server


def causes(error: BaseException | None) -> list[type]:
    """The kinds of an error and of all that it has come of."""
    found: list[type] = []
    while error is not None:
        found.append(type(error))
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize("name", [*PASSING, *LASTING])
def test_what_passes_is_known(name: str) -> None:
    exc = (PASSING.get(name) or LASTING[name])()
    error = s3_error(exc, action="write", url="s3://bucket/a", key="a")
    assert error.retryable is (name in PASSING)
    assert error.key == "a"
    assert type(exc).__name__ in str(error)


@pytest.mark.parametrize("name", [*PASSING, *LASTING])
def test_only_what_passes_is_tried_again(name: str) -> None:
    calls = Calls(S3Options(), "bucket", "run", client=object(), jitter=lambda: 0.0)  # type: ignore[arg-type]
    made: list[Exception] = []

    def call(attempt: Attempt) -> int:
        if attempt.number == 0 and not made:
            made.append((PASSING.get(name) or LASTING[name])())
            raise made[0]
        return 7

    if name in PASSING:
        assert calls.run(call, action="put", key="a") == 7
        return
    with pytest.raises(StorageError, match="cannot put s3://bucket/run/a") as caught:
        calls.run(call, action="put", key="a")
    assert caught.value.__cause__ is made[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AWS_ERROR_HTTP_CONNECTION_CLOSED", "ConnectionClosedError"),
        ("AWS_IO_SOCKET_CLOSED", "ConnectionClosedError"),
        ("AWS_IO_TLS_CLOSED_ABORT", "ConnectionClosedError"),
        ("AWS_IO_TLS_NEGOTIATION_TIMEOUT", "ConnectTimeoutError"),
        ("AWS_IO_SOCKET_CONNECTION_REFUSED", "EndpointConnectionError"),
        ("AWS_IO_DNS_QUERY_FAILED", "EndpointConnectionError"),
        ("AWS_IO_TLS_ERROR_NEGOTIATION_FAILURE", "SSLError"),
        ("AWS_IO_TLS_HOST_NAME_MISMATCH", "SSLError"),
        ("AWS_ERROR_HTTP_INVALID_HEADER_VALUE", "AwsCrtError"),
        ("AWS_ERROR_S3_EXCEEDS_MEMORY_LIMIT", "AwsCrtError"),
    ],
)
def test_what_awscrt_says_is_sorted_by_name(name: str, kind: str) -> None:
    exceptions = pytest.importorskip("awscrt.exceptions", reason="needs awscrt: pip install 'tidegate[dev]'")
    found = _no_answer(exceptions.AwsCrtError(1, name, "says so"), URL)
    assert type(found).__name__ == kind
    passes = kind not in ("SSLError", "AwsCrtError")
    assert s3_error(found, action="write", url="s3://bucket/a", key="a").retryable is passes


@TRANSPORTS
def test_a_mistake_in_mid_upload_fails_the_save_at_once(
    server: SlowS3, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Not after the deadline of five minutes; and its cause is told."""
    if transport == "awscrt":
        pytest.importorskip("awscrt", reason="needs awscrt: pip install 'tidegate[dev]'")
    num_calls = []

    def broken(body: Body, at: int) -> Any:
        num_calls.append(at)
        raise TypeError("a mistake of ours")

    options = S3Options(endpoint_url=server.endpoint_url, part_bytes=PART_BYTES, concurrency=1, transport=transport)  # type: ignore[arg-type]
    with closing(S3Store("bucket", "run", options=options)) as store:
        store.prepare()
        monkeypatch.setattr(Body, "_find", broken)
        engine = tidegate.CheckpointEngine(store, codec="raw")
        start_s = time.monotonic()
        with pytest.raises(tidegate.SaveError, match="a mistake of ours") as caught:
            engine.save_async(filled(1.0, 2, 4 << 20), step=1).result(60)
        assert time.monotonic() - start_s < 20
        assert len(num_calls) == 1
        assert TypeError in causes(caught.value)
        monkeypatch.undo()
        with pytest.raises(tidegate.SaveError):
            engine.close()
