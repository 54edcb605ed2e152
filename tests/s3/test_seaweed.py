"""The server that the other tests use does what they rely on."""

from __future__ import annotations

import pytest

from tests.kit.seaweed import ADMIN, READER, Identity, Seaweed


def test_conditional_puts_are_honoured(seaweed: Seaweed, run_prefix: str) -> None:
    client = seaweed.client()
    put = {"Bucket": seaweed.bucket, "Key": f"{run_prefix}/a", "Body": b"x"}
    etag = client.put_object(**put, IfNoneMatch="*")["ETag"]
    for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"0123456789abcdef0123456789abcdef"'}):
        with pytest.raises(client.exceptions.ClientError) as caught:
            client.put_object(**put, **condition)
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    client.put_object(**put, IfMatch=etag)
    client.close()


@pytest.mark.parametrize(
    ("identity", "code"),
    [
        (Identity("", ADMIN.access_key, "wrong", ()), "SignatureDoesNotMatch"),
        (Identity("", "nobody", "wrong", ()), "InvalidAccessKeyId"),
        (READER, "AccessDenied"),
    ],
)
def test_signatures_and_rights_are_checked(seaweed: Seaweed, run_prefix: str, identity: Identity, code: str) -> None:
    client = seaweed.client(identity)
    with pytest.raises(client.exceptions.ClientError) as caught:
        client.put_object(Bucket=seaweed.bucket, Key=f"{run_prefix}/a", Body=b"x")
    assert caught.value.response["Error"]["Code"] == code
    client.close()


def test_checksums_are_checked(seaweed: Seaweed, run_prefix: str) -> None:
    client = seaweed.client()
    with pytest.raises(client.exceptions.ClientError):
        client.put_object(Bucket=seaweed.bucket, Key=f"{run_prefix}/a", Body=b"x", ChecksumCRC32="AAAAAA==")
    client.close()
