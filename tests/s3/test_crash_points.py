"""Killed before single requests of a save: the checkpoint of before, or the new one, and `gc` tidies up (A05).

TIDEGATE_S3_CRASH_STRIDE=1 tries every request of a save, about 25; by default it is every fourth.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import run_forked
from tests.kit.killing import die
from tests.kit.s3_campaign import uploads_at
from tests.kit.seaweed import Seaweed
from tests.kit.states import filled
from tidegate.cli import main
from tidegate.storage import S3Options, S3Store
from tidegate.storage.s3_client import make_client
from tidegate.storage.s3_options import with_environment

STRIDE = int(os.environ.get("TIDEGATE_S3_CRASH_STRIDE", "4"))
PART_BYTES = 5 << 20
STATE_BYTES = 3 << 19
"""Of one tensor; a state has four, and so an object has two parts."""


def mortal_store(prefix: str, nth: int) -> S3Store:
    """A store that kills its process before the nth request is sent."""
    options = with_environment(S3Options(part_bytes=PART_BYTES))
    client: Any = make_client(options)
    numbers = itertools.count(1)

    def hook(**_: object) -> None:
        if next(numbers) == nth:
            die()

    client.meta.events.register_first("before-send.s3", hook)
    return S3Store("bucket", prefix, options=options, client=client)


def save_step(environment: dict[str, str], prefix: str, nth: int, step: int) -> None:
    """Save over step 1, or after it, with all that follows."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with tidegate.CheckpointEngine(mortal_store(prefix, nth), codec="raw", chunk_bytes=4 << 20, keep_last=1) as engine:
        engine.save_async(filled(2.0, num_bytes=STATE_BYTES), step=step, overwrite=step == 1)


def save_plain(environment: dict[str, str], prefix: str, nth: int, step: int) -> None:
    """`tidegate.save` over an object."""
    import tidegate.oneshot

    os.environ.update(environment)
    torch.set_num_threads(1)
    tidegate.oneshot.open_store = lambda root: mortal_store(prefix, nth)  # type: ignore[assignment,attr-defined]
    tidegate.save(filled(2.0, num_bytes=STATE_BYTES), f"s3://bucket/{prefix}/model.tg", codec="raw")


def names(prefix: str) -> list[str]:
    """What is there, without the names that are drawn at random."""
    store = S3Store("bucket", prefix)
    found = [re.sub("[0-9a-f]{32}", "A", stat.key) for stat in store.list()]
    store.close()
    return sorted(found)


def value_of(state: object) -> float:
    """Which state it is, all of whose bits are checked."""
    assert isinstance(state, dict)
    value = float(state["t0"][0])
    assert_same_bits(state, filled(value, num_bytes=STATE_BYTES))
    return value


def kill_all(
    environment: dict[str, str], prefix: str, save: Callable[..., None], step: int, requests: Iterable[int]
) -> list[float]:
    """Kill saves at their requests; what was found after each, the last of one that lived."""
    found = []
    for nth in requests:
        folder = f"{prefix}/{nth}"
        begin(folder, save)
        code = run_forked(save, environment, folder, nth, step)
        found.append(value_now(folder, save))
        assert main(["gc", f"s3://bucket/{folder}", "--min-age-s", "0"]) == 0
        assert value_now(folder, save) == found[-1]
        assert_only_committed(names(folder))
        if code == 0:
            return found
        assert code == -9
    raise AssertionError("it cannot come here")


def assert_only_committed(names: list[str]) -> None:
    """Nothing but whole steps, or the one object."""
    folders = sorted({name.partition("/")[0] for name in names})
    whole = [f"{folder}/{name}" for folder in folders for name in ("A/manifest.json", "A/rank-00000.tg", "COMMIT")]
    assert names == ["model.tg"] or names == whole


def begin(folder: str, save: Callable[..., None]) -> None:
    """Save what is there before."""
    if save is save_plain:
        tidegate.save(filled(1.0, num_bytes=STATE_BYTES), f"s3://bucket/{folder}/model.tg", codec="raw")
    else:
        with tidegate.CheckpointEngine(f"s3://bucket/{folder}", codec="raw") as engine:
            engine.save_async(filled(1.0, num_bytes=STATE_BYTES), step=1).result(60)


def value_now(folder: str, save: Callable[..., None]) -> float:
    """Load what is there."""
    if save is save_plain:
        return value_of(tidegate.load(f"s3://bucket/{folder}/model.tg"))
    with tidegate.CheckpointEngine(f"s3://bucket/{folder}") as engine:
        return value_of(engine.load())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "step", "first"),
    [(save_step, 2, 1), (save_step, 1, 3), (save_plain, 0, 2)],
    ids=["new step", "same step", "object"],
)
def test_A05_killed_before_a_request(
    aws_environment: Seaweed, run_prefix: str, save: Callable[..., None], step: int, first: int
) -> None:
    requests = itertools.count(1 if STRIDE == 1 else first, STRIDE)
    found = kill_all(aws_environment.environment(), run_prefix, save, step, requests)
    assert found == sorted(found), "once committed it stays"
    assert set(found) == {1.0, 2.0}
    assert uploads_at(aws_environment, run_prefix) == []
