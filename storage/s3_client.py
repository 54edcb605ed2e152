"""Make the boto3 client of a store, and the arguments that its options stand for."""

from __future__ import annotations

import os
from typing import Any, Protocol
from urllib.parse import urlsplit

from .errors import StorageError
from .s3_native import native_sender
from .s3_options import S3Options

Answer = dict[str, Any]
_loaders: dict[tuple[str, ...], Any] = {}
_AWS = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu")


class Client(Protocol):
    """What we use of boto3's client. Every call blocks; all may be made by several threads at once."""

    def put_object(self, **arguments: object) -> Answer: ...
    def get_object(self, **arguments: object) -> Answer: ...
    def head_object(self, **arguments: object) -> Answer: ...
    def delete_object(self, **arguments: object) -> Answer: ...
    def list_objects_v2(self, **arguments: object) -> Answer: ...
    def create_multipart_upload(self, **arguments: object) -> Answer: ...
    def upload_part(self, **arguments: object) -> Answer: ...
    def complete_multipart_upload(self, **arguments: object) -> Answer: ...
    def abort_multipart_upload(self, **arguments: object) -> Answer: ...
    def list_multipart_uploads(self, **arguments: object) -> Answer: ...
    def list_parts(self, **arguments: object) -> Answer: ...
    def close(self) -> None: ...


def check_boto3() -> None:
    """Raise StorageError unless boto3 is installed. Blocks for its import, about 0.3 s, the first time."""
    try:
        import boto3  # noqa: F401
    except ImportError as exc:
        raise StorageError(
            "stores on S3 need boto3, which is not installed: pip install 'tidegate[s3]'", retryable=False
        ) from exc


def make_client(options: S3Options) -> Client:
    """Make a client. Blocks for the look-up of credentials.

    botocore makes one attempt a call: ours go on until a deadline, and have to know whether an earlier one may have
    taken effect (`s3_calls`). Its checksums are off: ours are computed without a copy (`s3_checksum`).

    Raises:
        StorageError: boto3, the transport, or the file of certificates is missing.
        botocore.exceptions.BotoCoreError: The profile, the endpoint or another setting is wrong.
    """
    check_boto3()
    import boto3
    import botocore.session
    from botocore.config import Config

    addressing = options.addressing
    if addressing == "auto":
        addressing = "path" if options.endpoint_url else "virtual"
    if options.ca_bundle is not None and not os.path.isfile(options.ca_bundle):
        raise StorageError(f"ca_bundle is {options.ca_bundle!r}: there is no such file")
    session = boto3.session.Session(profile_name=options.profile, botocore_session=botocore.session.Session())
    _share_models(session._session)
    client: Client = session.client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region or session.region_name or "us-east-1",
        verify=options.ca_bundle,
        config=Config(
            signature_version="s3v4",
            # Our checksums guard the parts. SHA-256 over plain http would cost a core for every 0.46 GB/s.
            s3={"addressing_style": addressing, "payload_signing_enabled": options.checksum == "none"},
            connect_timeout=min(10.0, options.timeout_s),
            read_timeout=options.timeout_s,
            max_pool_connections=options.concurrency + 8,  # those of reads and of small calls
            retries={"mode": "standard", "total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            user_agent_extra="tidegate",
        ),
    )
    _choose_transport(client, options, session)
    return client


def _share_models(core: Any) -> None:
    """Let a session use what another one has read of S3's description: to read it anew takes a core 0.1 s."""
    loader = core.get_component("data_loader")
    core.register_component("data_loader", _loaders.setdefault(tuple(loader.search_paths), loader))


def _choose_transport(client: Any, options: S3Options, session: Any) -> None:
    from botocore.httpsession import get_cert_path
    from botocore.utils import get_environ_proxies

    if options.transport == "urllib3":
        return
    has_proxy = bool(get_environ_proxies(client.meta.endpoint_url))
    ca_path = options.ca_bundle or session._session.get_config_variable("ca_bundle") or get_cert_path(True)
    sender = None if has_proxy and options.transport == "auto" else native_sender(options, ca_path)
    if sender is not None:
        client.meta.events.register_last("before-send.s3", sender)
    elif options.transport == "awscrt":
        raise StorageError('transport="awscrt" needs awscrt >= 0.38: pip install -U awscrt, or use "urllib3"')


def endpoint_of(client: Client) -> str | None:
    """Return the server that a client was made for; None for AWS, or where the client does not say."""
    url = str(getattr(getattr(client, "meta", None), "endpoint_url", None) or "")
    host = urlsplit(url).hostname or ""
    return None if not host or host.endswith(_AWS) else url


def request_arguments(options: S3Options) -> dict[str, object]:
    """Arguments of every call."""
    return {"RequestPayer": "requester"} if options.requester_pays else {}


def object_arguments(options: S3Options) -> dict[str, object]:
    """Arguments of the calls that begin an object: put_object and create_multipart_upload."""
    arguments = request_arguments(options)
    if options.encryption is not None:
        arguments["ServerSideEncryption"] = options.encryption
    if options.encryption == "aws:kms":
        arguments["BucketKeyEnabled"] = options.bucket_key
        if options.kms_key_id is not None:
            arguments["SSEKMSKeyId"] = options.kms_key_id
    if options.storage_class is not None:
        arguments["StorageClass"] = options.storage_class
    if options.tagging is not None:
        arguments["Tagging"] = options.tagging
    return arguments
