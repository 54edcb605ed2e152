"""The end of an interpreter, and forks."""

from __future__ import annotations

import pytest

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import ended, run, script
from tests.kit.seaweed import Seaweed
from tests.kit.states import filled, random_state
from tidegate.storage import S3Options, S3Store

PART_BYTES = 5 << 20


def test_a_save_in_flight_ends_before_the_interpreter(aws_environment: Seaweed, run_prefix: str) -> None:
    root = f"s3://bucket/{run_prefix}"
    run(
        """
        import sys, tidegate
        from tests.kit.states import filled
        engine = tidegate.CheckpointEngine(sys.argv[1], codec="raw")
        engine.save_async(filled(3.0, 4, 8 << 20), step=1)
        """,
        root,
        environment=aws_environment.environment(),
    )
    with tidegate.CheckpointEngine(root) as engine:
        assert_same_bits(engine.load(), filled(3.0, 4, 8 << 20))


@pytest.mark.parametrize("end", ["sys.exit(3)", "1 / 0", "pass"])
def test_an_upload_that_nobody_ends_is_aborted_at_exit(aws_environment: Seaweed, run_prefix: str, end: str) -> None:
    text = f"""
        import sys
        from tidegate.storage import S3Options, S3Store
        store = S3Store("bucket", sys.argv[1], options=S3Options(part_bytes={PART_BYTES}))
        writer = store.create("a")
        writer.append(memoryview(bytes({PART_BYTES}))).result(60)
        assert [stat.num_bytes for stat in store.list()] == [{PART_BYTES}]
        print("begun")
        {end}
    """
    done = ended(script(text, run_prefix, environment=aws_environment.environment()))
    assert done.stdout == "begun\n", done.stderr
    assert done.returncode == {"sys.exit(3)": 3, "1 / 0": 1, "pass": 0}[end]
    store = S3Store("bucket", run_prefix)
    assert list(store.list()) == []
    store.close()


def test_a_fork_is_told_to_open_the_store_anew(aws_environment: Seaweed, run_prefix: str) -> None:
    text = """
        import os, sys
        from tidegate.storage import S3Store, StorageError
        store = S3Store("bucket", sys.argv[1])
        store.compare_and_put("a", b"x", expected=None)
        child = os.fork()
        if child == 0:
            try:
                store.stat("a")
            except StorageError as exc:
                os._exit(7 if "before a fork" in str(exc) else 1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        store.close()
    """
    assert run(text, run_prefix, environment=aws_environment.environment()) == "7\n"


def test_states_come_back_through_the_pool_of_another_save(aws_environment: Seaweed, run_prefix: str) -> None:
    """A load while a save is in flight."""
    state = random_state(30 << 20)
    store = S3Store("bucket", run_prefix, options=S3Options(part_bytes=PART_BYTES, concurrency=2))
    with tidegate.CheckpointEngine(store, codec="raw", chunk_bytes=20 << 20) as engine:
        engine.save_async(state, step=1).result()
        engine.save_async(state, step=2)
        assert_same_bits(engine.load(1), state)
    store.close()
