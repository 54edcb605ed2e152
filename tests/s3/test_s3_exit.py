"""The end of an interpreter, and forks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import run_forked
from tests.kit.seaweed import Seaweed
from tests.kit.states import random_state
from tests.kit.twins import run_twins
from tidegate.storage import S3Options, S3Store, StorageError

PART_BYTES = 5 << 20


_UNENDED = f"""
import sys
from tidegate.storage import S3Options, S3Store
store = S3Store("bucket", sys.argv[1], options=S3Options(part_bytes={PART_BYTES}))
writer = store.create("a")
writer.append(memoryview(bytes({PART_BYTES}))).result(60)
assert [stat.num_bytes for stat in store.list()] == [{PART_BYTES}]
print("begun")
exec(sys.argv[2])
"""
_ENDS = {"sys.exit(3)": 3, "1 / 0": 1, "pass": 0}


@pytest.mark.slow
def test_an_upload_that_nobody_ends_is_aborted_at_exit(
    aws_environment: Seaweed, run_prefix: str, tmp_path: Path
) -> None:
    """A save that is in flight then: test_saves.py."""
    arguments = [(f"{run_prefix}/{code}", end) for end, code in _ENDS.items()]
    twins = run_twins(_UNENDED, arguments, tmp_path, environment=aws_environment.environment())
    for code, done in zip(_ENDS.values(), twins, strict=True):
        assert done.stdout == "begun\n", done.stderr
        assert done.returncode == code
    store = S3Store("bucket", run_prefix)
    assert list(store.list()) == []
    store.close()


def fork_with_a_store(environment: dict[str, str], prefix: str) -> None:
    """End with 7 if a child is told to open the store anew, and the parent can go on with its own."""
    os.environ.update(environment)
    store = S3Store("bucket", prefix)
    store.compare_and_put("a", b"x", expected=None)
    child = os.fork()
    if child == 0:
        try:
            store.stat("a")
        except StorageError as exc:
            os._exit(7 if "before a fork" in str(exc) else 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert store.stat("a").num_bytes == 1
    store.close()
    sys.exit(code)


def test_a_fork_is_told_to_open_the_store_anew(aws_environment: Seaweed, run_prefix: str) -> None:
    assert run_forked(fork_with_a_store, aws_environment.environment(), run_prefix) == 7


def test_states_come_back_through_the_pool_of_another_save(aws_environment: Seaweed, run_prefix: str) -> None:
    """A load while a save is in flight."""
    state = random_state(30 << 20)
    store = S3Store("bucket", run_prefix, options=S3Options(part_bytes=PART_BYTES, concurrency=2))
    with tidegate.CheckpointEngine(store, codec="raw", chunk_bytes=20 << 20) as engine:
        engine.save_async(state, step=1).result()
        engine.save_async(state, step=2)
        assert_same_bits(engine.load(1), state)
    store.close()
