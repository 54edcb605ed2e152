"""What an S3 store may be told: in code, in its URL, or by the usual AWS environment."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from .errors import StorageError

Checksum = Literal["auto", "crc64nvme", "crc32c", "crc32", "none"]
Addressing = Literal["auto", "path", "virtual"]
Encryption = Literal["AES256", "aws:kms"]
Transport = Literal["auto", "awscrt", "urllib3"]

MIN_PART_BYTES = 5 << 20
MAX_PART_BYTES = 5 << 30
MAX_PARTS = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How to talk to an S3 server. What is None comes from the AWS environment and configuration files.

    Attributes:
        endpoint_url: The server, unless it is AWS: `http://127.0.0.1:8333`.
        region: Its region; "us-east-1" where nobody says one.
        profile: A profile in the AWS configuration files.
        ca_bundle: File of certificates, in PEM, that the server's must go back to; None: AWS_CA_BUNDLE, the profile's
            `ca_bundle`, or those of botocore.
        addressing: How the bucket is named: in the "path", or as a "virtual" host. "auto" takes the path where there
            is an endpoint_url.
        checksum: What the server verifies every part by. "crc64nvme" and "crc32c" need the package `awscrt`; "auto" is
            "crc64nvme" with it and "crc32" without. "none" for servers that refuse these headers.
        encryption: Server-side encryption, "AES256" (SSE-S3) or "aws:kms"; None leaves it to the bucket.
        kms_key_id: The key for "aws:kms"; None: the account's own.
        bucket_key: Whether "aws:kms" uses a bucket key, which makes fewer calls of KMS.
        storage_class: Such as "STANDARD_IA" or "EXPRESS_ONEZONE".
        tagging: Tags for the objects, as in a query: `team=a&kind=checkpoint`.
        requester_pays: Whether we agree to pay for the requests.
        part_bytes: Length of the first parts; later ones are longer, so that an object of any length fits.
        least_part_bytes: The shortest part that the server takes, except for the last.
        max_parts: How many parts an object may have there: 10,000 on AWS.
        concurrency: How many parts travel at once.
        budget_bytes: The most bytes that wait or travel before `append` blocks, awscrt's copies of those that travel
            counted too; None: three times what may travel at once.
        transport: Who sends the parts. "awscrt" takes little of the time of a Python thread that trains, over TLS too,
            and copies each part that travels; "urllib3" does neither. "auto" is "awscrt" where that is installed and no
            proxy is set.
        timeout_s: How long one attempt may pass without a sign of the server.
        deadline_s: How long a call may take, with all its attempts.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    ca_bundle: str | None = None
    addressing: Addressing = "auto"
    checksum: Checksum = "auto"
    encryption: Encryption | None = None
    kms_key_id: str | None = None
    bucket_key: bool = True
    storage_class: str | None = None
    tagging: str | None = None
    requester_pays: bool = False
    part_bytes: int = 16 << 20
    least_part_bytes: int = MIN_PART_BYTES
    max_parts: int = MAX_PARTS
    concurrency: int = 8
    budget_bytes: int | None = None
    transport: Transport = "auto"
    timeout_s: float = 30.0
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_choice(field.name, getattr(self, field.name), _hint(field.name))
        if not 0 < self.least_part_bytes <= self.part_bytes <= MAX_PART_BYTES // 2:
            raise ValueError(
                f"part_bytes is {self.part_bytes}; give at least least_part_bytes, {self.least_part_bytes}, and at "
                f"most {MAX_PART_BYTES // 2}"
            )
        for name, low, high in (("max_parts", 1, MAX_PARTS), ("concurrency", 1, 64)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}; give {low} to {high}")
        for name in ("timeout_s", "deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a positive number of seconds")
        if self.kms_key_id is not None and self.encryption != "aws:kms":
            raise ValueError('kms_key_id is for encryption="aws:kms"; give both')

    @property
    def in_flight_bytes(self) -> int:
        """The most bytes that wait or travel, with all copies."""
        return self.budget_bytes or 3 * self.concurrency * self.part_bytes

    def target_bytes(self, part: int) -> int:
        """How long a part should be. It doubles with every tenth of `max_parts`.

        So 10,000 parts of at least half of it hold 4.3 TiB, and 1,000 hold 449 GiB.

        Args:
            part: Its number, counted from 0.
        """
        return min(self.part_bytes << (10 * part // self.max_parts), MAX_PART_BYTES // 2)

    def least_bytes(self, part: int) -> int:
        """How short a part may be that is not the last. `part` counts from 0."""
        return max(self.least_part_bytes, self.target_bytes(part) // 2)


def parse_s3_url(url: str) -> tuple[str, str, S3Options]:
    """Take `s3://bucket/prefix?name=value` apart.

    Args:
        url: Any field of S3Options may follow the "?"; the rest comes from the environment.

    Returns:
        Bucket, prefix ("" or without "/" at its ends), options.

    Raises:
        StorageError: It names no bucket, or an option is wrong.
    """
    parts = urlsplit(url)
    if not parts.netloc or parts.fragment or "@" in parts.netloc or ":" in parts.netloc:
        raise StorageError(f"cannot open {url}: write s3://bucket/prefix, with ? and # in the prefix as %3F and %23")
    try:
        options = S3Options(**_fields_of(parts.query))
    except (ValueError, TypeError) as exc:
        raise StorageError(f"cannot open {url}: {exc}") from exc
    return parts.netloc, unquote(parts.path).strip("/"), options


def s3_url(bucket: str, prefix: str) -> str:
    """Write the URL of a bucket and a prefix."""
    return f"s3://{bucket}/{quote(prefix)}" if prefix else f"s3://{bucket}"


def with_environment(options: S3Options, environment: Mapping[str, str] = os.environ) -> S3Options:
    """Fill in what boto3 does not look up by itself, or where we have to know what it finds. Raises nothing.

    The endpoint is such a thing: it may stand in AWS_ENDPOINT_URL_S3, in AWS_ENDPOINT_URL or in a configuration file.
    """
    endpoint_url = options.endpoint_url or _configured_endpoint_url(options.profile, environment)
    region = options.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or None
    checksum = options.checksum
    if checksum == "auto" and environment.get("AWS_REQUEST_CHECKSUM_CALCULATION", "").lower() == "when_required":
        checksum = "none"
    return dataclasses.replace(options, endpoint_url=endpoint_url, region=region, checksum=checksum)


def _configured_endpoint_url(profile: str | None, environment: Mapping[str, str]) -> str | None:
    """Where boto3 goes when nobody names an endpoint; None for AWS, without boto3, and where the files are wrong.

    The order is that of AWS: variables, the `services` section of the profile, the profile.
    """
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError:
        return None
    try:
        session = Session(profile=profile, include_builtin_handlers=False)
        scoped = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(scoped.get("services"), {})
    except BotoCoreError:  # no such profile, for instance: the client says so when it is made
        scoped, services = {}, {}
    ignored = scoped.get("ignore_configured_endpoint_urls", "")
    if environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", ignored).lower() == "true":
        return None
    of_s3 = services.get("s3")
    places = (
        environment.get("AWS_ENDPOINT_URL_S3"), environment.get("AWS_ENDPOINT_URL"),
        of_s3.get("endpoint_url") if isinstance(of_s3, Mapping) else None, scoped.get("endpoint_url"),
    )  # fmt: skip
    return next(filter(None, places), None)


def _fields_of(query: str) -> dict[str, typing.Any]:
    names = [field.name for field in dataclasses.fields(S3Options)]
    fields: dict[str, typing.Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
        if name not in names:
            raise ValueError(f"{name!r} is no option; there are {', '.join(names)}")
        fields[name] = _converted(name, text)
    return fields


def _hint(name: str) -> object:
    return typing.get_type_hints(S3Options)[name]


def _converted(name: str, text: str) -> object:
    kinds = _kinds(_hint(name))
    if bool in kinds:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{name} is {text!r}; give true or false")
        return text.lower() in ("true", "1")
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"{name} is {text!r}; give a number") from None
    return text


def _kinds(hint: object) -> tuple[object, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _check_choice(name: str, value: object, hint: object) -> None:
    for kind in _kinds(hint):
        choices = typing.get_args(kind)
        if choices and value is not None and value not in choices:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(str, choices))}")
