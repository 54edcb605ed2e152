"""Send the further parts of an upload as botocore sent the first, without asking it again.

botocore makes a request from a model of the service: about a millisecond more of Python for every part, which a thread
that trains has to wait for (engine/DESIGN.md). All parts of an upload are asked for in the same way but for their
number, their checksum and the time. So what botocore said for the first one is kept, and awscrt signs the others:
Signature Version 4 with UNSIGNED-PAYLOAD (docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html). What
is signed in another way (session tokens of directory buckets, several regions at once, a hash of the part) goes on
through botocore.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qs, quote, urlsplit

from .s3_body import Body
from .s3_native import NativeSender, Request, text_of

_OPERATION = "UploadPart"
_MAX_KEPT = 64  # uploads; those that ended are not told of
_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=\S+/\d{8}/([^/]+)/s3/aws4_request,")
_UNSIGNED = "UNSIGNED-PAYLOAD"
_OF_ONE_PART = {
    *("authorization", "x-amz-date", "x-amz-security-token", "x-amz-content-sha256", "content-length", "host"),
    *("expect", "amz-sdk-invocation-id", "amz-sdk-request"),
}
_CHECKSUM = "x-amz-checksum-"
_OF_MODEL = {"Bucket", "Key", "UploadId", "PartNumber", "ContentLength", "Body", "RequestPayer"}


@dataclass(frozen=True, slots=True)
class Pattern:
    """How the parts of an upload are asked for.

    Attributes:
        url: Where, without the query.
        headers: Those that all parts have.
        region: What they are signed for.
    """

    url: str
    headers: tuple[tuple[str, str], ...]
    region: str

    @classmethod
    def of(cls, request: Request) -> Pattern | None:
        """Take it from a signed request; None if others cannot be signed like it."""
        headers = {name.lower(): text_of(value) for name, value in request.headers.items()}
        scope = _SCOPE.match(headers.get("authorization", ""))
        parts = urlsplit(request.url)
        is_plain = set(parse_qs(parts.query)) == {"partNumber", "uploadId"} and "content-md5" not in headers
        if scope is None or not is_plain or headers.get("x-amz-content-sha256") != _UNSIGNED:
            return None
        kept = {k: v for k, v in headers.items() if k not in _OF_ONE_PART and not k.startswith(_CHECKSUM)}
        return cls(f"{parts.scheme}://{parts.netloc}{parts.path}", tuple(kept.items()), scope[1])


class DirectClient:
    """A boto3 client that sends parts by awscrt, all but the first of an upload without botocore. Safe for threads.

    Who listens to the client's events "before-send" and "response-received" hears of all parts.

    Args:
        client: Of boto3; all other calls are its own.
        sender: Sends.
        credentials: Botocore's, which renew themselves; None: there are none, and nothing is signed.
    """

    def __init__(self, client: Any, sender: NativeSender, credentials: Any) -> None:
        self._client = client
        self._sender = sender
        self._credentials = credentials
        self._patterns: dict[str, Pattern] = {}
        self._lock = threading.Lock()
        client.meta.events.register_last("before-send.s3", self._send)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def upload_part(self, **arguments: Any) -> dict[str, Any]:
        """Send a part. Blocks.

        Args:
            arguments: As boto3's, with a Body of ours.

        Raises:
            StorageError: What the body's check says.
            botocore.exceptions.ClientError: The server refused it.
            botocore.exceptions.HTTPClientError: There was no answer, which may pass.
            Exception: What awscrt, the body or the source of the credentials says.
        """
        pattern = self._patterns.get(arguments["UploadId"])
        checksums = {name: value for name, value in arguments.items() if name.startswith("Checksum")}
        if pattern is None or self._credentials is None or set(arguments) - set(checksums) - _OF_MODEL:
            return cast(dict[str, Any], self._client.upload_part(**arguments))
        query = f"partNumber={arguments['PartNumber']}&uploadId={quote(arguments['UploadId'], safe='')}"
        headers = dict(pattern.headers)
        headers |= {_CHECKSUM + name.removeprefix("Checksum").lower(): value for name, value in checksums.items()}
        headers["content-length"] = str(arguments["ContentLength"])
        request = self._signed(f"{pattern.url}?{query}", headers, arguments["Body"], pattern.region)
        error: Exception | None = None
        try:
            return self._read(self._answer_to(request))
        except Exception as exc:
            error = exc
            raise
        finally:
            self._client.meta.events.emit(
                f"response-received.s3.{_OPERATION}", response_dict={}, parsed_response={}, context={}, exception=error
            )

    def _answer_to(self, request: Request) -> Any:
        """Send a request as botocore does: unless one who listens has an answer."""
        _, answer = self._client.meta.events.emit_until_response(f"before-send.s3.{_OPERATION}", request=request)
        if answer is not None:
            return answer
        with memoryview(cast(bytes, request.body)) as view:  # one who listens has changed it
            return self._sender.send(request.url, request.headers, Body((view,)))

    def _send(self, request: Request, event_name: str, **_: object) -> Any:
        """Send what is signed, and learn from the first part. Returns botocore's answer; None if it is not ours."""
        body = request.body
        if not event_name.endswith(f".{_OPERATION}") or not isinstance(body, Body):
            return None
        answer = self._sender.send(request.url, request.headers, body)
        if answer.status_code == 200:
            self._learn(request)
        return answer

    def _learn(self, request: Request) -> None:
        (upload_id,) = parse_qs(urlsplit(request.url).query).get("uploadId", ("",))
        pattern = None if upload_id in self._patterns else Pattern.of(request)
        if pattern is not None:
            with self._lock:
                while len(self._patterns) >= _MAX_KEPT:
                    del self._patterns[next(iter(self._patterns))]
                self._patterns[upload_id] = pattern

    def _signed(self, url: str, headers: dict[str, str], body: Body, region: str) -> Request:
        """Sign a request. Blocks only where the credentials have to be renewed."""
        from awscrt import auth, http
        from botocore.awsrequest import AWSPreparedRequest, HeadersDict

        keys = self._credentials.get_frozen_credentials()
        config = auth.AwsSigningConfig(
            algorithm=auth.AwsSigningAlgorithm.V4,
            signature_type=auth.AwsSignatureType.HTTP_REQUEST_HEADERS,
            credentials_provider=auth.AwsCredentialsProvider.new_static(keys.access_key, keys.secret_key, keys.token),
            region=region,
            service="s3",
            use_double_uri_encode=False,
            should_normalize_uri_path=False,
            signed_body_value=_UNSIGNED,
            signed_body_header_type=auth.AwsSignedBodyHeaderType.X_AMZ_CONTENT_SHA_256,
        )
        parts = urlsplit(url)
        given = http.HttpHeaders([*headers.items(), ("host", parts.netloc)])
        request = http.HttpRequest("PUT", f"{parts.path}?{parts.query}", given)
        auth.aws_sign_request(request, config).result()
        return cast(Request, AWSPreparedRequest("PUT", url, HeadersDict(dict(given)), body, stream_output=False))

    def _read(self, answer: Any) -> dict[str, Any]:
        """Return the answer as boto3 would, as far as it is used; or raise what it would."""
        from botocore.exceptions import ClientError
        from botocore.parsers import create_parser

        headers = {name.lower(): value for name, value in answer.headers.items()}
        if answer.status_code == 200 and "etag" in headers and not answer.content.strip():
            return {"ETag": headers["etag"]}
        status = 500 if answer.status_code == 200 else answer.status_code  # an error may come under a status of 200
        parser = create_parser(self._client.meta.service_model.metadata["protocol"])
        found = {"status_code": status, "headers": headers, "body": answer.content}
        raise ClientError(parser.parse(found, None), _OPERATION)
