"""Failed saves, last saves, full stores, retention: what holds for files holds on S3 (A02, A03, A04, A06)."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.s3_campaign import uploads_at
from tests.kit.scripted_s3 import Reply, Request, ScriptedS3, refusal
from tests.kit.seaweed import READER, Seaweed
from tests.kit.states import filled, random_state
from tests.kit.stores import RecordingStore
from tests.kit.twins import run_twins
from tidegate.errors import SaveOSError
from tidegate.storage import S3Options, S3Store

PART_BYTES = 5 << 20
ENGINE: dict[str, Any] = {"codec": "raw", "chunk_bytes": 6 << 20}


class Front:
    """A real server behind one that refuses what a test says."""

    def __init__(self, server: Seaweed, prefix: str) -> None:
        self.refuses: Callable[[Request], Reply | None] = lambda request: None
        self.server = server
        self.prefix = prefix
        self.scripted = ScriptedS3(lambda request: self.refuses(request), server.endpoint_url)

    def opened(self, **fields: Any) -> S3Store:
        """A new store, of parts of 5 MiB and with a deadline of 4 s."""
        options = S3Options(
            endpoint_url=self.scripted.endpoint_url,
            **{"part_bytes": PART_BYTES, "timeout_s": 2.0, "deadline_s": 4.0, **fields},
        )
        return S3Store("bucket", self.prefix, options=options)

    def keys(self) -> list[str]:
        """All that is there, uploads included."""
        store = S3Store("bucket", self.prefix)
        keys = [stat.key for stat in store.list()]
        store.close()
        return keys


@pytest.fixture
def front(aws_environment: Seaweed, run_prefix: str) -> Iterator[Front]:
    front = Front(aws_environment, run_prefix)
    with front.scripted:
        yield front


def refusal_of(nth: int, operation: str, reply: Reply) -> Callable[[Request], Reply | None]:
    """Refuse the nth call of an operation and all after it."""
    numbers = iter(range(1, 1_000_000))

    def refuses(request: Request) -> Reply | None:
        return reply if request.operation == operation and next(numbers) >= nth else None

    return refuses


@pytest.mark.parametrize(
    ("reply", "says"),
    [(refusal(403, "AccessDenied"), "AccessDenied"), (refusal(500, "InternalError"), "InternalError")],
)
def test_A02_a_failed_save_is_told_once_and_harms_no_other(front: Front, reply: Reply, says: str) -> None:
    store = front.opened(deadline_s=2.0)
    with tidegate.CheckpointEngine(store, **ENGINE) as engine:
        engine.save_async(filled(1.0), step=1).result(60)
        before = front.keys()
        front.refuses = refusal_of(2, "UploadPart", reply)
        caught = engine.save_async(random_state(30 << 20), step=2).exception(60)
        assert isinstance(caught, tidegate.SaveError)
        assert says in str(caught)
        assert "step 2" in str(caught)
        assert_same_bits(engine.load(), filled(1.0))
        with pytest.raises(tidegate.SaveError, match="step 2"):
            engine.wait()
        assert engine.wait() is None, "it is told once"
        assert front.keys() == before
        with pytest.raises(tidegate.UnsupportedStateError, match=r"cfg\.f"):
            engine.save_async({"cfg": {"f": lambda: 1}}, step=3)
        front.refuses = lambda request: None
        engine.save_async(filled(4.0), step=4)
        report = engine.wait()
        assert report is not None
        assert report.step == 4
        assert engine.steps() == [1, 4]
        assert_same_bits(engine.load(1), filled(1.0))
        assert_same_bits(engine.load(4), filled(4.0))
    store.close()


def test_A02_a_plain_save_that_is_refused_leaves_the_object(front: Front) -> None:
    url = f"s3://bucket/{front.prefix}/model.tg"
    tidegate.save(filled(1.0), url)
    with pytest.raises(tidegate.UnsupportedStateError, match=r"cfg\.f"):
        tidegate.save({"cfg": {"f": lambda: 1}}, url)
    front.refuses = refusal_of(1, "CompleteMultipartUpload", refusal(403, "AccessDenied"))
    with pytest.raises(tidegate.SaveError, match="AccessDenied"):
        tidegate.save(
            random_state(20 << 20), f"{url}?endpoint_url={front.scripted.endpoint_url}&part_bytes={PART_BYTES}"
        )
    assert_same_bits(tidegate.load(url), filled(1.0))
    assert front.keys() == ["model.tg"]


_SCRIPT = """
import os, sys, threading, tidegate
from tests.kit.states import filled
from tests.kit.stores import WrappedStore
from tidegate.storage import S3Options, S3Store

prefix, ending = sys.argv[1:]
if ending == "refused":
    os.environ.update(AWS_ACCESS_KEY_ID=os.environ["READER_KEY"], AWS_SECRET_ACCESS_KEY=os.environ["READER_SECRET"])

class Held(WrappedStore):
    # Nothing is written before the script's last line.
    def create(self, key, **options):
        at_the_end.wait()
        return super().create(key, **options)

at_the_end = threading.Event()
def train():
    store = Held(S3Store("bucket", prefix, options=S3Options(part_bytes=5 << 20)))
    engine = tidegate.CheckpointEngine(store, codec="raw", chunk_bytes=1 << 20)
    future = engine.save_async(filled(7.0, num_bytes=3 << 20), step=7)
    print("saved" if future.done() else "in flight", flush=True)
    return engine
engine = train()
if ending == "drop":
    import gc
    del engine
    gc.collect()
at_the_end.set()
if ending in ("exit", "refused"):
    sys.exit(3)
if ending == "raise":
    raise ValueError("the training failed")
if ending == "close":
    engine.close()
"""
_ENDINGS = {"fall off": 0, "exit": 3, "raise": 1, "close": 0, "drop": 0, "refused": 3}


@pytest.mark.slow
def test_A03_the_last_save_is_drained_however_the_script_ends(
    aws_environment: Seaweed, run_prefix: str, tmp_path: Path
) -> None:
    """And told on stderr where the server refuses it."""
    reader = {"READER_KEY": READER.access_key, "READER_SECRET": READER.secret_key}
    arguments = [(f"{run_prefix}/{ending}", ending) for ending in _ENDINGS]
    twins = run_twins(_SCRIPT, arguments, tmp_path, environment={**aws_environment.environment(), **reader})
    for (ending, code), done in zip(_ENDINGS.items(), twins, strict=True):
        assert done.returncode == code, done.stderr
        assert done.stdout == "in flight\n"
        if ending == "refused":
            continue
        assert ("the training failed" in done.stderr) == (ending == "raise")
        assert "lost" not in done.stderr
        with tidegate.CheckpointEngine(f"s3://bucket/{run_prefix}/{ending}") as engine:
            assert engine.steps() == [7]
            assert_same_bits(engine.load(), filled(7.0, num_bytes=3 << 20))
    done = twins[-1]
    assert "tidegate: the last save was lost: save of step 7 failed" in done.stderr
    assert "AccessDenied" in done.stderr
    with tidegate.CheckpointEngine(f"s3://bucket/{run_prefix}/refused") as engine:
        assert engine.steps() == []
    assert uploads_at(aws_environment, run_prefix) == []


def test_A04_latest_always_loads_while_old_ones_go(aws_environment: Seaweed, run_prefix: str) -> None:
    """Readers poll while a writer saves with keep_last=1."""
    root = f"s3://bucket/{run_prefix}"
    num_steps = 12

    def save() -> None:
        with tidegate.CheckpointEngine(root, codec="raw", keep_last=1) as engine:
            for step in range(1, num_steps):
                engine.save_async(filled(float(step)), step=step)

    with tidegate.CheckpointEngine(root) as reader:
        reader.save_async(filled(0.0), step=0).result(60)
        writer = threading.Thread(target=save)
        writer.start()
        seen = [0.0]
        while writer.is_alive():
            state = reader.load()
            assert isinstance(state, dict)
            assert state["t0"][0] >= seen[-1]
            seen.append(float(state["t0"][0]))
            assert_same_bits(state, filled(seen[-1]))
        writer.join()
        assert_same_bits(reader.load(), filled(num_steps - 1.0))
        assert reader.steps() == [num_steps - 1]
    assert len(set(seen)) > 2


@pytest.mark.parametrize("role", ["same steps", "own steps"])
def test_A04_four_writers_finalise_and_prune_one_root(aws_environment: Seaweed, run_prefix: str, role: str) -> None:
    """One of them commits a step, the others are told that it is there, and nobody fails."""
    root = f"s3://bucket/{run_prefix}"
    num_committed: list[int] = []
    failures: list[BaseException] = []

    def save(number: int) -> None:
        try:
            with tidegate.CheckpointEngine(root, codec="raw", keep_last=2) as engine:
                for i in range(4):
                    step = i if role == "same steps" else 10 * i + number
                    try:
                        engine.save_async(filled(step + number / 10), step=step)
                        engine.wait()
                        num_committed.append(step)
                    except tidegate.StepExistsError:
                        pass
        except BaseException as exc:  # noqa: BLE001 - raised below
            failures.append(exc)

    writers = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failures == []
    assert len(num_committed) == 16 if role == "own steps" else 4 <= len(num_committed) < 16
    with tidegate.CheckpointEngine(root) as engine:
        for step in engine.steps():
            state = engine.load(step)
            assert isinstance(state, dict)
            assert_same_bits(state, filled(float(state["t0"][0])))


def test_A04_nothing_is_deleted_before_the_commit(aws_environment: Seaweed, run_prefix: str) -> None:
    store = RecordingStore(S3Store("bucket", run_prefix))
    with tidegate.CheckpointEngine(store, codec="raw", keep_last=1) as engine:
        for step in (1, 2, 3):
            engine.save_async(filled(float(step)), step=step)
    kinds = [(op.kind, op.key.rpartition("/")[2], int(op.key[5:15])) for op in store.operations]
    for step in (1, 2):
        first_deletion = next(i for i, (kind, _, of) in enumerate(kinds) if kind == "delete" and of == step)
        assert kinds.index(("compare_and_put", "COMMIT", step + 1)) < first_deletion
        assert kinds[first_deletion] == ("delete", "COMMIT", step), "so that no reader finds half of it"
    store.close()


@pytest.mark.parametrize(
    ("operation", "nth"),
    [
        ("CreateMultipartUpload", 1),
        ("UploadPart", 2),
        ("CompleteMultipartUpload", 1),
        ("PutObject", 1),
        ("PutObject", 2),
    ],
)
@pytest.mark.parametrize(("status", "code"), [(507, "InsufficientStorage"), (403, "QuotaExceeded")])
def test_A06_a_full_store(front: Front, operation: str, nth: int, status: int, code: str) -> None:
    """Of the two puts of a save one is the manifest, the other COMMIT."""
    state = {"w": torch.arange(12 << 20, dtype=torch.uint8)}
    store = front.opened()
    with tidegate.CheckpointEngine(store, **ENGINE) as engine:
        engine.save_async(filled(1.0), step=1).result(60)
        before = front.keys()
        front.refuses = refusal_of(nth, operation, refusal(status, code))
        with pytest.raises(SaveOSError) as caught:
            engine.save_async(state, step=2).result(60)
        assert caught.value.errno == errno.ENOSPC
        message = str(caught.value)
        assert code in message
        assert "step 2" in message
        assert f"s3://bucket/{front.prefix}/step-0000000002/" in message, "it says where"
        with pytest.raises(tidegate.SaveError):
            engine.wait()
        assert front.keys() == before, "what was written is gone"
        assert_same_bits(engine.load(), filled(1.0))
        front.refuses = lambda request: None
        engine.save_async(state, step=2).result(60)
        assert_same_bits(engine.load(), state)
        assert engine.steps() == [1, 2]
    store.close()
