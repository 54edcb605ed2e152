"""The one place where boto3's errors become errors of the stores."""

from __future__ import annotations

import datetime
import email.utils
import enum
import errno
import http.client
import ssl
from collections.abc import Mapping
from typing import Any

from .errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoreFullError,
    StoreIOError,
    StorePermissionError,
    StoreTimeoutError,
)

_Kind = tuple[type[StorageError], int | None, bool, str]
_AGAIN: _Kind = (StoreIOError, errno.EIO, True, "the server was busy or failed: try again")
_EXPIRED: _Kind = (StorePermissionError, errno.EACCES, True, "the credentials have expired: renew them")
_KEYS: _Kind = (StorePermissionError, errno.EACCES, False, "the server does not know these keys: check the credentials")
_DENIED: _Kind = (
    StorePermissionError, errno.EACCES, False,
    "these credentials may not do this: have the bucket's owner grant it (the README has the policy)",
)  # fmt: skip
_CLOCK: _Kind = (StorePermissionError, errno.EACCES, False, "this machine's clock is wrong: set it")
_CHANGED: _Kind = (StoreIOError, errno.EIO, True, "the bytes changed on their way: try again")
_SILENT: _Kind = (StoreTimeoutError, errno.ETIMEDOUT, True, "the server does not answer: check it and the network")
_SLOW: _Kind = (StoreTimeoutError, errno.ETIMEDOUT, True, "the server takes no more bytes: check it and the network")
_NETWORK: _Kind = (StoreIOError, errno.EIO, True, "check endpoint_url, the server and the network")
_CERTIFICATE: _Kind = (
    StoreIOError, errno.EIO, False, "check the server's certificate, and ca_bundle or AWS_CA_BUNDLE"
)  # fmt: skip
_OPTIONS: _Kind = (StoreIOError, errno.EINVAL, False, "check the options of this store")
_UNKNOWN: _Kind = (
    StorageError, None, False,
    "this is no failure that passes: check the options of this store, and report it if they are right",
)  # fmt: skip
_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ConnectionError)
_KMS: _Kind = (StorePermissionError, errno.EACCES, False, "check kms_key_id and the right to use that key")
_REGION: _Kind = (StoreIOError, errno.EINVAL, False, "the bucket is in another region: give region")
_FULL: _Kind = (StoreFullError, errno.ENOSPC, False, "free some room there, keep fewer checkpoints, or write elsewhere")
_NO_OBJECT: _Kind = (ObjectNotFoundError, errno.ENOENT, False, "check bucket, prefix and key")
_REFUSED: _Kind = (
    StoreIOError, errno.EINVAL, False,
    "check the options of this store; a server that does not know checksums needs checksum=none",
)  # fmt: skip
_UNSUPPORTED: _Kind = (StoreIOError, errno.EOPNOTSUPP, False, "this server does not have that")

_EXPIRED_CODES = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
_BY_CODE: dict[str, _Kind] = {
    **dict.fromkeys(("NoSuchKey", "NotFound", "404", "NoSuchVersion"), _NO_OBJECT),
    "NoSuchBucket": (StoreIOError, errno.ENOENT, False, "there is no such bucket: create it, or check its name"),
    "NoSuchUpload": (StoreIOError, errno.ENOENT, False, "the upload is gone: it was aborted, by `gc` or a rule"),
    "PreconditionFailed": (ObjectExistsError, errno.EEXIST, False, "it is never overwritten unless asked"),
    **dict.fromkeys(("ConditionalRequestConflict", "OperationAborted"), _AGAIN),
    **dict.fromkeys(_EXPIRED_CODES, _EXPIRED),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "NotSignedUp"), _KEYS),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "InvalidObjectState"), _DENIED),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired"), _CLOCK),
    **dict.fromkeys(("BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"), _CHANGED),
    **dict.fromkeys(("InvalidDigest", "InvalidChecksum", "IncompleteBody"), _CHANGED),
    **dict.fromkeys(
        ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"), _AGAIN
    ),
    **dict.fromkeys(("TooManyRequests", "BandwidthLimitExceeded", "ServiceUnavailable", "InternalError"), _AGAIN),
    **dict.fromkeys(("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "InsufficientCapacity"), _FULL),
    **dict.fromkeys(("InvalidArgument", "InvalidRequest"), _REFUSED),
    "EntityTooLarge": (
        StoreFullError,
        errno.EFBIG,
        False,
        "this is over the server's limit: see part_bytes, max_parts",
    ),
    "InvalidRange": (StoreIOError, None, False, "it is shorter: it was cut short, or is not what was written"),
    **dict.fromkeys(("PermanentRedirect", "AuthorizationHeaderMalformed", "301"), _REGION),
    **dict.fromkeys(("NotImplemented", "MethodNotAllowed", "501", "405"), _UNSUPPORTED),
}
_BY_STATUS: dict[int, _Kind] = {
    301: _REGION, 403: _DENIED, 404: _NO_OBJECT, 405: _UNSUPPORTED, 408: _AGAIN, 409: _AGAIN, 429: _AGAIN,
    412: _BY_CODE["PreconditionFailed"], 416: _BY_CODE["InvalidRange"], 501: _UNSUPPORTED, 507: _FULL,
}  # fmt: skip


def s3_error(exc: Exception, *, action: str, url: str, key: str) -> StorageError:
    """Translate an error of boto3. Only what is known to pass becomes one that is retryable.

    Args:
        exc: A ClientError, a BotoCoreError, what urllib3 let through, or any other: a mistake of ours, for instance.
        action: What was tried, to follow "cannot": "read", "write", …
        url: The object concerned.
        key: Its key.

    Returns:
        The error to be raised from `exc`. Its message has the URL, what the server said, and what to do.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    if isinstance(exc, ClientError):
        return _of_answer(exc.response, action, url, key)
    kind = _kind_of_botocore(exc) if isinstance(exc, BotoCoreError) else _kind_of_other(exc)
    cls, number, retryable, advice = kind
    message = f"cannot {action} {url}: {exc} [{type(exc).__name__}]; {advice}"
    return cls(message, key=key, errno=number, retryable=retryable)


def error_code(exc: BaseException | None) -> str:
    """The code of the server's answer behind an error, such as "NoSuchUpload"; "" where there was none."""
    response = getattr(exc, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, Mapping) else ""


def is_expired(exc: BaseException | None) -> bool:
    """Whether the server says that the credentials have expired: others may be had by now."""
    return error_code(exc) in _EXPIRED_CODES


class Effect(enum.Enum):
    """Whether a request that has failed may have taken effect."""

    NONE = enum.auto()
    """It has not: it was refused, or never sent."""
    PERHAPS = enum.auto()
    """It may have; the server is done with it."""
    LATER = enum.auto()
    """Nobody has answered it. It may have, and it may yet."""


def effect_of(exc: BaseException) -> Effect:
    """Tell from an error of boto3, or from ours that came of one, what may have become of the request."""
    from botocore import exceptions as of

    if isinstance(exc, StorageError):
        if exc.__cause__ is None:  # what we gave up ourselves
            return Effect.LATER if isinstance(exc, StoreTimeoutError) else Effect.NONE
        exc = exc.__cause__
    if isinstance(exc, of.ClientError):
        status = int(exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if 400 <= status < 500:
            return Effect.NONE
        return Effect.LATER if status in (502, 504) else Effect.PERHAPS  # a gateway has lost sight of it
    if isinstance(exc, of.EndpointConnectionError | of.ConnectTimeoutError | of.CredentialRetrievalError):
        return Effect.NONE
    is_cut_off = not isinstance(exc, Exception) or s3_error(exc, action="", url="", key="").retryable
    return Effect.LATER if is_cut_off else Effect.PERHAPS


def _of_answer(response: Mapping[str, Any], action: str, url: str, key: str) -> StorageError:
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    fallback = (
        _AGAIN if status >= 500 or status == 200 else (StoreIOError, errno.EIO, False, "see what the server says")
    )
    kind = _KMS if code.startswith("KMS.") else _BY_CODE.get(code) or _BY_STATUS.get(status) or fallback
    cls, number, retryable, advice = kind
    if kind is _CLOCK:
        advice = f"this machine's clock is {_skew(response)}: set it"
    said = str(response.get("Error", {}).get("Message", "")) or "no reason given"
    message = f"cannot {action} {url}: {said} [{code}, HTTP {status}{_request_id(response)}]; {advice}"
    return cls(message, key=key, errno=number, retryable=retryable)


def _request_id(response: Mapping[str, Any]) -> str:
    """What the server's owner finds the request by, to follow the status."""
    found = str(response.get("ResponseMetadata", {}).get("RequestId", ""))
    return f", request {found}" if found else ""


def _skew(response: Mapping[str, Any]) -> str:
    server = server_time(response)
    if server is None:
        return "too far from the server's"
    skew_s = (datetime.datetime.now(datetime.UTC) - server).total_seconds()
    return f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the server's"


def server_time(response: Mapping[str, Any]) -> datetime.datetime | None:
    """The server's clock, from the Date header of an answer; None where it has none."""
    text = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        found = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def _kind_of_botocore(exc: Exception) -> _Kind:
    from botocore import exceptions as of

    if isinstance(exc, of.ConnectTimeoutError | of.ReadTimeoutError):
        return _SILENT
    if isinstance(exc, of.SSLError):
        return _NETWORK if _is_behind(exc, _CUT_OFF) else _CERTIFICATE
    if isinstance(exc, of.HTTPClientError | of.ConnectionError | of.IncompleteReadError):
        if _is_behind(exc, TimeoutError):  # urllib3 calls one while sending a closed connection
            return _SLOW
        if type(exc) is of.HTTPClientError:  # around whatever came out of urllib3 or of a request's body
            return _kind_of_other(exc.__cause__ or exc.__context__)
        return _NETWORK
    if isinstance(exc, of.NoCredentialsError | of.PartialCredentialsError | of.CredentialRetrievalError):
        advice = "give credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role"
        return StorePermissionError, errno.EACCES, isinstance(exc, of.CredentialRetrievalError), advice
    if isinstance(exc, of.ProfileNotFound):
        return StorePermissionError, errno.EACCES, False, "check profile and AWS_PROFILE"
    return _OPTIONS


def _kind_of_other(exc: BaseException | None) -> _Kind:
    from urllib3 import exceptions as of

    if isinstance(exc, TimeoutError | of.TimeoutError):
        return _SILENT
    if isinstance(exc, ssl.SSLError | of.SSLError):
        return _NETWORK if _is_behind(exc, _CUT_OFF) else _CERTIFICATE
    if isinstance(exc, ConnectionError | http.client.HTTPException | of.ProtocolError | of.NewConnectionError):
        return _NETWORK
    if isinstance(exc, of.ClosedPoolError):  # of a client that another thread has just given up for its old keys
        return _NETWORK
    return _UNKNOWN


def _is_behind(exc: BaseException, kinds: type[Exception] | tuple[type[Exception], ...]) -> bool:
    """Whether an error is one of these, or has come of one."""
    seen: BaseException | None = exc
    while seen is not None:
        if isinstance(seen, kinds):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
