"""Uploads of savers that were killed: `gc` aborts ours, and only those that are old enough (A22)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from tests.kit.children import FORKS, await_true, forked
from tests.kit.killing import die
from tests.kit.s3_campaign import uploads_at
from tests.kit.s3_faults import Faults
from tests.kit.seaweed import Seaweed
from tests.kit.states import filled
from tests.kit.wrapping import content
from tidegate import CheckpointEngine
from tidegate.cli import main
from tidegate.storage import S3Options, S3Store
from tidegate.storage.keys import is_reserved
from tidegate.storage.s3_client import make_client
from tidegate.storage.s3_options import with_environment

PART_BYTES = 5 << 20
NUM_KILLS = 5
STALE_S = 4.0


def upload_and_die(environment: dict[str, str], prefix: str, nth: int) -> None:
    """Upload ten parts one by one, and be killed when the fourth is to be sent."""
    os.environ.update(environment)
    options = with_environment(S3Options(part_bytes=PART_BYTES, concurrency=1))
    client = make_client(options)
    store = S3Store("bucket", prefix, options=options, client=client)
    Faults(client).change("UploadPart", lambda request: die(), nth=4)
    writer = store.create(f"step-0000000001/{nth:032x}/rank-00000.tg")
    for _ in range(10):
        writer.append(memoryview(bytes(PART_BYTES))).result()


def upload_slowly(environment: dict[str, str], prefix: str, pipe: Connection) -> None:
    """Begin an upload, and complete it when told."""
    os.environ.update(environment)
    store = S3Store("bucket", prefix, options=S3Options(part_bytes=PART_BYTES))
    writer = store.create("live.tg")
    writer.append(memoryview(b"live" * (PART_BYTES // 4))).result()
    pipe.send("begun")
    pipe.recv()
    writer.seal()
    store.close()


@pytest.fixture
def foreign_upload(aws_environment: Seaweed, run_prefix: str) -> Iterator[str]:
    """An upload beside the run: its prefix only begins like ours."""
    client = aws_environment.client()
    key = f"{run_prefix}-other/a"
    upload = client.create_multipart_upload(Bucket="bucket", Key=key)
    yield key
    client.abort_multipart_upload(Bucket="bucket", Key=key, UploadId=upload["UploadId"])
    client.close()


@pytest.mark.slow
def test_A22_gc_aborts_our_stale_uploads_and_no_others(
    aws_environment: Seaweed, run_prefix: str, foreign_upload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = f"s3://bucket/{run_prefix}"
    environment = aws_environment.environment()
    for nth in range(NUM_KILLS):
        with forked(upload_and_die, environment, run_prefix, nth) as child:
            child.join()
            assert child.exitcode == -9
    store = S3Store("bucket", run_prefix)
    stale = [stat.key for stat in store.list()]
    assert len(stale) == NUM_KILLS
    assert [store.stat(key).num_bytes for key in stale] == [3 * PART_BYTES] * NUM_KILLS
    with CheckpointEngine(root, codec="raw") as engine:
        assert engine.steps() == []
        engine.save_async(filled(1.0), step=2).result(60)
    assert await_true(lambda: all(stat.age_s > STALE_S for stat in store.list() if is_reserved(stat.key)))
    here, there = FORKS.Pipe()
    with forked(upload_slowly, environment, run_prefix, there) as child:
        assert here.recv() == "begun"
        ages_s = {stat.key: stat.age_s for stat in store.list() if is_reserved(stat.key)}
        (live,) = set(ages_s) - set(stale)
        min_age_s = min(ages_s[key] for key in stale)
        assert min_age_s > ages_s[live] + STALE_S - 1.0, "it stays the younger one while `gc` looks"
        capsys.readouterr()
        assert main(["gc", root, "--min-age-s", str(min_age_s), "--dry-run"]) == 0
        told = capsys.readouterr().out
        assert all(f"would delete {key} ({3 * PART_BYTES:,} bytes)" in told for key in stale)
        assert live not in told
        assert len(list(store.list())) == NUM_KILLS + 1 + 3
        assert main(["gc", root, "--min-age-s", str(min_age_s)]) == 0
        told = capsys.readouterr().out
        assert all(f"deleted {key} ({3 * PART_BYTES:,} bytes)" in told for key in stale)
        assert live not in told
        assert foreign_upload not in told
        assert set(uploads_at(aws_environment, run_prefix)) == {foreign_upload, f"{run_prefix}/live.tg"}
        here.send("go on")
        child.join()
        assert child.exitcode == 0
    assert content(store, "live.tg") == b"live" * (PART_BYTES // 4)
    with CheckpointEngine(root) as engine:
        assert engine.steps() == [2]
    store.close()
