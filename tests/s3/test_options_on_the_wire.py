"""What options and the AWS environment make of the requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.s3_faults import Faults
from tests.kit.scripted_s3 import Reply, Request, ScriptedS3
from tests.kit.seaweed import ADMIN, Seaweed
from tests.kit.states import random_state
from tests.kit.wrapping import content, put
from tidegate.storage import S3Options, S3Store, open_store
from tidegate.storage.s3_client import make_client
from tidegate.storage.s3_options import with_environment

PART_BYTES = 5 << 20
KEY_ID = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
SIZES = pytest.mark.parametrize("num_bytes", [3, PART_BYTES + 7], ids=["one put", "parts"])


@pytest.fixture
def kms_bucket(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a simulated AWS, for what SeaweedFS does not have: keys of KMS. Nothing leaves this process."""
    moto = pytest.importorskip("moto", reason="needs moto: pip install 'tidegate[dev]'")
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with moto.mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield client
        client.close()


def as_bytes(request: Any) -> None:
    """The simulation takes no views."""
    if hasattr(request.body, "read"):
        request.body = b"".join(iter(lambda: bytes(request.body.read(PART_BYTES)), b""))


@SIZES
@pytest.mark.parametrize("bucket_key", [True, False])
def test_sse_kms(kms_bucket: Any, bucket_key: bool, num_bytes: int) -> None:
    options = S3Options(encryption="aws:kms", kms_key_id=KEY_ID, bucket_key=bucket_key, part_bytes=PART_BYTES)
    client: Any = make_client(options)
    asked: list[bytes | str] = []

    def note(request: Any, event_name: str, **_: object) -> None:
        as_bytes(request)
        if event_name.endswith((".PutObject", ".CreateMultipartUpload")):
            asked.append(request.headers["x-amz-server-side-encryption-bucket-key-enabled"])

    client.meta.events.register_first("before-send.s3", note)
    store = S3Store("bucket", "run", options=options, client=client)
    put(store, "a", bytes(num_bytes))
    store.compare_and_put("b", b"x", expected=None)
    for key in ("a", "b"):
        head = kms_bucket.head_object(Bucket="bucket", Key=f"run/{key}")
        assert head["ServerSideEncryption"] == "aws:kms"
        assert head["SSEKMSKeyId"] == KEY_ID
    assert asked == [b"true" if bucket_key else b"false"] * 2
    assert content(store, "a") == bytes(num_bytes)
    store.close()
    client.close()


@SIZES
def test_sse_s3_tags_and_class_reach_the_object(aws_environment: Seaweed, run_prefix: str, num_bytes: int) -> None:
    url = f"s3://bucket/{run_prefix}?encryption=AES256&tagging=team%3Da%26kind%3Db&storage_class=STANDARD_IA"
    store = open_store(f"{url}&part_bytes={PART_BYTES}")
    text = b"secret!" * num_bytes
    put(store, "a", text[:num_bytes])
    store.compare_and_put("b", b"x", expected=None)
    assert content(store, "a") == text[:num_bytes]
    store.close()
    client = aws_environment.client()
    for key in ("a", "b"):
        head = client.head_object(Bucket="bucket", Key=f"{run_prefix}/{key}")
        assert head["ServerSideEncryption"] == "AES256"
        assert head["StorageClass"] == "STANDARD_IA"
        tags = client.get_object_tagging(Bucket="bucket", Key=f"{run_prefix}/{key}")["TagSet"]
        assert {tag["Key"]: tag["Value"] for tag in tags} == {"team": "a", "kind": "b"}
    client.close()


def use_all(store: S3Store) -> None:
    """Make every call that a store makes."""
    put(store, "a", bytes(PART_BYTES), b"b")
    assert content(store, "a")[-1:] == b"b"
    store.compare_and_put("b", b"x", expected=None)
    store.compare_and_put("b", b"y", expected=b"x")
    writer = store.create("c")
    writer.append(memoryview(bytes(PART_BYTES))).result(60)
    assert len(list(store.list())) == 3
    writer.abort()
    store.delete("b")


@pytest.fixture
def front(aws_environment: Seaweed) -> Iterator[ScriptedS3]:
    with ScriptedS3(lambda request: None, aws_environment.endpoint_url) as front:
        yield front


@pytest.mark.parametrize("pays", [True, False])
def test_requester_pays_for_every_call(front: ScriptedS3, run_prefix: str, pays: bool) -> None:
    options = S3Options(endpoint_url=front.endpoint_url, requester_pays=pays, part_bytes=PART_BYTES)
    store = S3Store("bucket", run_prefix, options=options)
    use_all(store)
    store.close()
    assert len({request.operation for request in front.requests}) == 11
    told = {request.operation: request.headers.get("x-amz-request-payer") for request in front.requests}
    assert set(told.values()) == ({"requester"} if pays else {None}), told


def region_of(request: Request) -> str:
    match = re.search(r"Credential=[^/]+/\d+/([^/]+)/s3/", request.headers["authorization"])
    assert match is not None
    return match[1]


def by_option(monkeypatch: pytest.MonkeyPatch, folder: Path) -> S3Options:
    return S3Options(region="eu-west-1")


def by_variable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> S3Options:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    return S3Options()


def by_default_variable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> S3Options:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    return S3Options()


def by_profile(monkeypatch: pytest.MonkeyPatch, folder: Path) -> S3Options:
    """A profile with a region and keys of its own."""
    for name in ("AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (folder / "config").write_text("[profile lab]\nregion = eu-west-1\n")
    keys = f"aws_access_key_id = {ADMIN.access_key}\naws_secret_access_key = {ADMIN.secret_key}\n"
    (folder / "credentials").write_text(f"[lab]\n{keys}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    return S3Options(profile="lab")


def by_profile_variable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> S3Options:
    by_profile(monkeypatch, folder)
    monkeypatch.setenv("AWS_PROFILE", "lab")
    return S3Options()


@pytest.mark.parametrize("say", [by_option, by_variable, by_default_variable, by_profile, by_profile_variable])
def test_the_region_is_signed_for(
    front: ScriptedS3,
    run_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    say: Callable[[pytest.MonkeyPatch, Path], S3Options],
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", front.endpoint_url)
    store = S3Store("bucket", run_prefix, options=say(monkeypatch, tmp_path))
    put(store, "a", b"x")
    store.close()
    assert {region_of(request) for request in front.requests} == {"eu-west-1"}
    assert {request.access_key for request in front.requests} == {ADMIN.access_key}
    assert all(request.path.startswith("/bucket/") for request in front.requests), "a server of one's own: by path"


def test_a_session_token_is_sent(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, name.lower())
    with ScriptedS3(lambda request: Reply(200, headers={"Last-Modified": "Mon, 01 Jan 2001 00:00:00 GMT"})) as server:
        store = S3Store("bucket", options=S3Options(endpoint_url=server.endpoint_url))
        store.stat("a")
        store.close()
    (request,) = server.requests
    assert request.headers["x-amz-security-token"] == "aws_session_token"
    assert request.access_key == "aws_access_key_id"


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"region": "eu-west-1"}, "https://bucket.s3.eu-west-1.amazonaws.com/a"),
        ({"region": "eu-west-1", "addressing": "path"}, "https://s3.eu-west-1.amazonaws.com/bucket/a"),
        ({"endpoint_url": "http://store.lan:1"}, "http://store.lan:1/bucket/a"),
        ({"endpoint_url": "http://store.lan:1", "addressing": "virtual"}, "http://bucket.store.lan:1/a"),
    ],
)
def test_buckets_stand_in_the_path_or_the_host(
    clean_environment: None, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], url: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    client: Any = make_client(with_environment(S3Options(**fields)))
    signed = client.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "a"})
    assert signed.partition("?")[0] == url
    client.close()


CHECKSUMS = pytest.mark.parametrize("checksum", ["auto", "crc64nvme", "crc32c", "crc32"])


def corrupt(request: Any) -> None:
    """Change a bit of what is sent, after it was signed and summed up."""
    as_bytes(request)
    changed = bytearray(request.body)
    changed[len(changed) // 2] ^= 1
    request.body = bytes(changed)
    request.headers["X-Amz-Content-SHA256"] = "UNSIGNED-PAYLOAD"


@CHECKSUMS
@SIZES
def test_the_server_verifies_checksums(
    aws_environment: Seaweed, run_prefix: str, checksum: str, num_bytes: int
) -> None:
    pytest.importorskip("awscrt", reason="needs awscrt: pip install 'tidegate[dev]'")
    options = with_environment(S3Options(checksum=checksum, part_bytes=PART_BYTES))  # type: ignore[arg-type]
    client: Any = make_client(options)
    faults = Faults(client)
    store = S3Store("bucket", run_prefix, options=options, client=client)
    store.prepare()
    operation = "PutObject" if num_bytes < PART_BYTES else "UploadPart"
    before = faults.num_calls[operation]
    faults.change(operation, corrupt)
    put(store, "a", bytes(num_bytes))
    assert content(store, "a") == bytes(num_bytes)
    assert faults.num_calls[operation] - before == 2, "it was refused once, and sent again"
    store.close()
    client.close()


@pytest.mark.parametrize("checksum", ["auto", "crc64nvme", "crc32c", "crc32", "none"])
def test_what_changes_on_its_way_down_is_noticed(aws_environment: Seaweed, run_prefix: str, checksum: str) -> None:
    """By the digests of the frames, whatever the server was asked to verify."""
    state = random_state(20 << 20)
    store = S3Store("bucket", run_prefix, options=S3Options(checksum=checksum, part_bytes=PART_BYTES))  # type: ignore[arg-type]
    with tidegate.CheckpointEngine(store, codec="raw", chunk_bytes=6 << 20) as engine:
        engine.save_async(state, step=1).result(60)
    store.close()
    flipped: list[str] = []

    def flip(request: Request) -> Reply | None:
        if request.operation != "GetObject" or ".tg" not in request.path or flipped:
            return None
        reply = front.forward(request)
        if len(reply.body) < 1 << 20:
            return reply
        flipped.append(request.path)
        body = bytearray(reply.body)
        body[len(body) // 2] ^= 1
        return Reply(reply.status, bytes(body), reply.headers)

    with ScriptedS3(flip, aws_environment.endpoint_url) as front:
        store = S3Store("bucket", run_prefix, options=S3Options(endpoint_url=front.endpoint_url))
        with tidegate.CheckpointEngine(store) as engine:
            with pytest.raises(tidegate.CorruptCheckpointError):
                engine.load(1)
            assert flipped
            assert_same_bits(engine.load(1), state)
        store.close()
