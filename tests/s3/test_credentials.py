"""Credentials that expire in mid-upload, and who may do what (A21)."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.s3_campaign import uploads_at
from tests.kit.scripted_s3 import Reply, Request, ScriptedS3, refusal
from tests.kit.seaweed import ADMIN, RENEWED, Identity, Seaweed
from tests.kit.states import filled, random_state
from tests.kit.wrapping import content, put
from tidegate.storage import S3Options, S3Store, StorePermissionError

PART_BYTES = 5 << 20
ENGINE: dict[str, Any] = {"codec": "raw", "chunk_bytes": 6 << 20}


class KeysFile:
    """A credentials file of AWS."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, identity: Identity) -> None:
        lines = (
            "[default]",
            f"aws_access_key_id={identity.access_key}",
            f"aws_secret_access_key={identity.secret_key}",
        )
        self._path.write_text("\n".join(lines) + "\n")


class Expiry:
    """Answers ExpiredToken to the admin's key from the fifth part on; other keys are good."""

    def __init__(self, keys: KeysFile, *, is_renewed: bool) -> None:
        self.taken: Counter[str] = Counter()
        self._keys = keys
        self._is_renewed = is_renewed
        self._num_parts = itertools.count(1)
        self._is_over = False

    def __call__(self, request: Request) -> Reply | None:
        if request.operation == "UploadPart" and next(self._num_parts) == 5:
            self._is_over = True
            if self._is_renewed:
                self._keys.write(RENEWED)
        if self._is_over and request.access_key == ADMIN.access_key:
            return refusal(400, "ExpiredToken")
        if request.operation == "UploadPart":
            self.taken[request.query["partNumber"]] += 1
        return None


@pytest.fixture
def keys(aws_environment: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeysFile]:
    """The admin's keys come from a file, not from the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    keys = KeysFile(tmp_path / "credentials")
    keys.write(ADMIN)
    yield keys


def opened(front: ScriptedS3, prefix: str) -> S3Store:
    options = S3Options(endpoint_url=front.endpoint_url, part_bytes=PART_BYTES, concurrency=3)
    return S3Store("bucket", prefix, options=options)


def test_A21_new_keys_in_the_file_are_taken_up(aws_environment: Seaweed, run_prefix: str, keys: KeysFile) -> None:
    """And no part that has arrived is sent again."""
    state = random_state(50 << 20)
    script = Expiry(keys, is_renewed=True)
    with ScriptedS3(script, aws_environment.endpoint_url) as front:
        store = opened(front, run_prefix)
        with tidegate.CheckpointEngine(store, **ENGINE) as engine:
            engine.save_async(state, step=1).result(60)
            assert_same_bits(engine.load(), state)
        store.close()
        used = {request.access_key for request in front.requests}
    assert used == {ADMIN.access_key, RENEWED.access_key}
    assert len(script.taken) > 5, "some were sent after the keys had expired"
    assert set(script.taken.values()) == {1}
    assert uploads_at(aws_environment, run_prefix) == []


def test_A21_keys_that_nobody_renews_fail_soon(aws_environment: Seaweed, run_prefix: str, keys: KeysFile) -> None:
    """Nothing is committed. The upload, which may not even be aborted, goes once there are new keys."""
    script = Expiry(keys, is_renewed=False)
    with ScriptedS3(script, aws_environment.endpoint_url) as front:
        store = opened(front, run_prefix)
        with tidegate.CheckpointEngine(store, **ENGINE) as engine:
            start_s = time.monotonic()
            future = engine.save_async(random_state(50 << 20), step=1)
            with pytest.raises(tidegate.SaveError, match=r"ExpiredToken.*the credentials have expired: renew them"):
                future.result(60)
            assert time.monotonic() - start_s < 20
            with pytest.raises(tidegate.SaveError):
                engine.wait()
            assert len(uploads_at(aws_environment, run_prefix)) == 1
            keys.write(RENEWED)
            assert engine.steps() == []
            engine.save_async(filled(2.0), step=2).result(60)
            assert uploads_at(aws_environment, run_prefix) == []
            assert engine.steps() == [2]
        store.close()


def test_A21_a_provider_is_asked_in_mid_upload(
    aws_environment: Seaweed, run_prefix: str, keys: KeysFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys are so short-lived that it is asked before every call."""
    expires = datetime.now(UTC) + timedelta(seconds=90)
    text = {"Version": 1, "AccessKeyId": ADMIN.access_key, "SecretAccessKey": ADMIN.secret_key}
    (tmp_path / "keys.json").write_text(json.dumps({**text, "Expiration": expires.isoformat()}))
    (tmp_path / "provider.sh").write_text(f"echo asked >> {tmp_path}/asked\ncat {tmp_path}/keys.json\n")
    (tmp_path / "config").write_text(f"[profile brief]\ncredential_process = sh {tmp_path}/provider.sh\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    store = S3Store("bucket", run_prefix, options=S3Options(profile="brief", part_bytes=PART_BYTES))
    pieces = [bytes([i]) * PART_BYTES for i in range(3)]
    put(store, "a", *pieces)
    assert content(store, "a") == b"".join(pieces)
    assert len((tmp_path / "asked").read_text().splitlines()) > 3
    store.close()


@pytest.mark.parametrize(("hours", "says"), [(-2, r"7[12]\d\d s behind"), (2, r"7[12]\d\d s ahead of")])
def test_a_clock_that_is_wrong_is_named(
    aws_environment: Seaweed, run_prefix: str, monkeypatch: pytest.MonkeyPatch, hours: int, says: str
) -> None:
    """The server refuses what was signed more than 15 minutes ago, or to come, as AWS does."""
    import botocore.auth

    from tidegate.storage import s3_errors

    skew = timedelta(hours=hours)

    class Wrong(datetime):
        """Our clock; not the server's."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + skew

    def script(request: Request) -> Reply | None:
        signed = datetime.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        return refusal(403, "RequestTimeTooSkewed") if abs(datetime.now(UTC) - signed) > timedelta(minutes=15) else None

    with ScriptedS3(script, aws_environment.endpoint_url) as front:
        store = opened(front, run_prefix)
        put(store, "a", b"x")
        monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: Wrong.now(UTC).replace(tzinfo=None))
        monkeypatch.setattr(s3_errors.datetime, "datetime", Wrong)
        with pytest.raises(
            StorePermissionError, match=f"RequestTimeTooSkewed.*this machine's clock is {says} the server's"
        ):
            store.compare_and_put("b", b"x", expected=None)
        store.close()
