"""Options come from code, from the URL, and from the AWS environment."""

from __future__ import annotations

import sys

import pytest

from tests.kit.processes import run_script
from tests.kit.seaweed import Seaweed
from tests.kit.wrapping import content, put
from tidegate.storage import S3Options, S3Store, StorageError, open_store
from tidegate.storage.open import split_url
from tidegate.storage.s3_client import object_arguments, request_arguments
from tidegate.storage.s3_options import parse_s3_url, with_environment


def test_a_url_names_bucket_prefix_and_options() -> None:
    bucket, prefix, options = parse_s3_url(
        "s3://bucket/runs/a%20b/?endpoint_url=http%3A%2F%2Flocalhost%3A1&concurrency=16&timeout_s=2.5&requester_pays=true"
        "&addressing=path&encryption=aws:kms&budget_bytes=100"
    )
    assert (bucket, prefix) == ("bucket", "runs/a b")
    assert options == S3Options(
        endpoint_url="http://localhost:1", concurrency=16, timeout_s=2.5, requester_pays=True, addressing="path",
        encryption="aws:kms", budget_bytes=100,
    )  # fmt: skip
    assert parse_s3_url("s3://bucket") == ("bucket", "", S3Options())


def test_the_url_of_an_object_is_split_before_its_options() -> None:
    assert split_url("s3://b/runs/x%20y.tg?region=eu") == ("s3://b/runs?region=eu", "x y.tg")
    assert split_url("s3://b/x.tg") == ("s3://b", "x.tg")
    assert split_url("memory://name/x.tg") == ("memory://name", "x.tg")


def test_the_environment_fills_in_what_is_left_open() -> None:
    environment = {
        "AWS_ENDPOINT_URL": "http://a",
        "AWS_REGION": "r",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    assert with_environment(S3Options(), environment) == S3Options(endpoint_url="http://a", region="r", checksum="none")
    mine = S3Options(endpoint_url="http://b", region="q", checksum="crc32")
    assert with_environment(mine, environment) == mine
    environment["AWS_ENDPOINT_URL_S3"] = "http://c"
    assert with_environment(S3Options(), environment).endpoint_url == "http://c"
    environment["AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"] = "true"
    assert with_environment(S3Options(), environment).endpoint_url is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"part_bytes": 1}, "part_bytes"),
        ({"max_parts": 10_001}, "max_parts"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"encryption": "rot13"}, "AES256"),
        ({"kms_key_id": "k"}, "aws:kms"),
    ],
)
def test_wrong_options_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        S3Options(**fields)  # type: ignore[arg-type]


def test_options_become_arguments() -> None:
    options = S3Options(
        encryption="aws:kms", kms_key_id="key", storage_class="STANDARD_IA", tagging="a=b", requester_pays=True
    )
    assert request_arguments(options) == {"RequestPayer": "requester"}
    assert object_arguments(options) == {
        "RequestPayer": "requester", "ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key", "BucketKeyEnabled": True,
        "StorageClass": "STANDARD_IA", "Tagging": "a=b",
    }  # fmt: skip
    assert object_arguments(S3Options()) == {}


def test_tags_and_storage_class_arrive(aws_environment: Seaweed, run_prefix: str) -> None:
    store = open_store(f"s3://bucket/{run_prefix}?tagging=team%3Da%26kind%3Db&storage_class=STANDARD_IA")
    put(store, "a", b"x")
    store.close()
    client = aws_environment.client()
    tags = client.get_object_tagging(Bucket="bucket", Key=f"{run_prefix}/a")["TagSet"]
    assert {tag["Key"]: tag["Value"] for tag in tags} == {"team": "a", "kind": "b"}
    assert client.head_object(Bucket="bucket", Key=f"{run_prefix}/a")["StorageClass"] == "STANDARD_IA"
    client.close()


def test_everything_may_stand_in_the_url(seaweed: Seaweed, run_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, seaweed.environment()[name])
    store = open_store(f"S3://bucket/{run_prefix}?endpoint_url={seaweed.endpoint_url}&region=us-east-1")
    assert isinstance(store, S3Store)
    assert store.url == f"s3://bucket/{run_prefix}"
    put(store, "a", b"x")
    assert content(store, "a") == b"x"
    store.close()


def test_a_missing_boto3_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StorageError, match=r"pip install 'tidegate\[s3\]'"):
        open_store("s3://bucket/run")


def test_opening_other_stores_imports_no_boto3() -> None:
    done = run_script("import tidegate.storage; assert not {'boto3', 'botocore', 'awscrt'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr
