"""The engine, the one-call functions and the command line on S3."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.chains import assert_all_load, bases_of, save_steps
from tests.kit.seaweed import READER, SAVER, Seaweed
from tests.kit.states import filled, random_state
from tidegate.cli import main
from tidegate.delta import DeltaPolicy
from tidegate.storage import S3Options, S3Store, StorePermissionError, open_store

SMALL: dict[str, Any] = {"codec": "zstd", "chunk_bytes": 1 << 20}


@pytest.fixture
def root(aws_environment: Seaweed, run_prefix: str) -> str:
    return f"s3://{aws_environment.bucket}/{run_prefix}"


def keys(root: str) -> list[str]:
    store = open_store(root)
    found = sorted(stat.key for stat in store.list())
    store.close()
    return found


def test_a_state_comes_back(root: str) -> None:
    state = random_state(40 << 20)
    with tidegate.CheckpointEngine(root, **SMALL) as engine:
        report = engine.save_async(state, step=7).result()
        assert report.url == f"{root}/step-0000000007"
        assert report.notes == ()
        assert_same_bits(engine.load(), state)
    with tidegate.CheckpointEngine(root, **SMALL) as engine:
        assert engine.steps() == [7]
        assert_same_bits(engine.load(7), state)
        assert_same_bits(engine.load(part="model"), state["model"])
    assert sorted(key.rpartition("/")[2] for key in keys(root)) == ["COMMIT", "manifest.json", "rank-00000.tg"]


def test_frames_larger_than_a_part_come_back(aws_environment: Seaweed, run_prefix: str) -> None:
    store = S3Store(aws_environment.bucket, run_prefix, options=S3Options(part_bytes=5 << 20))
    state = {"w": torch.randint(0, 256, (24 << 20,), dtype=torch.uint8)}
    with tidegate.CheckpointEngine(store, codec="raw", chunk_bytes=24 << 20) as engine:
        engine.save_async(state, step=1).result()
        assert_same_bits(engine.load(), state)
    store.close()


@pytest.mark.parametrize("keep_bytes", [None, 0], ids=["kept", "read-again"])
def test_chains_of_differences_come_back(root: str, keep_bytes: int | None) -> None:
    """The base is in memory, or read again from the bucket; retention spares it there too."""
    store = open_store(root)
    save_steps(store, [0, 1, 2, 3], DeltaPolicy(max_chain=2, keep_bytes=keep_bytes), keep_last=2)
    assert bases_of(store) == {0: [], 1: [0], 2: [1, 0], 3: []}
    assert_all_load(store)
    save_steps(store, [4], DeltaPolicy(max_chain=2, keep_bytes=keep_bytes), keep_last=2)
    assert bases_of(store) == {3: [], 4: [3]}
    assert_all_load(store)
    store.close()


def test_retention_keeps_the_newest(root: str) -> None:
    with tidegate.CheckpointEngine(root, keep_last=2, **SMALL) as engine:
        for step in (1, 2, 3, 4):
            engine.save_async(filled(step), step=step).result()
        engine.wait()
        assert engine.steps() == [3, 4]
        assert_same_bits(engine.load(), filled(4))
    assert {key.split("/")[0] for key in keys(root)} == {"step-0000000003", "step-0000000004"}


def test_a_step_is_replaced_only_when_asked(root: str) -> None:
    with tidegate.CheckpointEngine(root, **SMALL) as engine:
        engine.save_async(filled(1), step=1).result()
        with pytest.raises(tidegate.StepExistsError):
            engine.save_async(filled(2), step=1)
        engine.save_async(filled(2), step=1, overwrite=True).result()
        assert_same_bits(engine.load(), filled(2))
    assert len(keys(root)) == 3


def test_single_objects_are_saved_and_loaded(root: str) -> None:
    for value in (1.0, 2.0):
        report = tidegate.save(filled(value), f"{root}/model.tg")
        assert report.url == f"{root}/model.tg"
        assert_same_bits(tidegate.load(f"{root}/model.tg"), filled(value))
    assert keys(root) == ["model.tg"]
    with pytest.raises(tidegate.CheckpointError):
        tidegate.load(f"{root}/none.tg")


def test_gc_removes_uploads_and_uncommitted_objects(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    with tidegate.CheckpointEngine(root, **SMALL) as engine:
        engine.save_async(filled(1), step=1).result()
    committed = keys(root)
    store = open_store(root)
    attempt = "step-0000000002/" + "ab" * 16
    store.compare_and_put(f"{attempt}/manifest.json", b"{}", expected=None)
    for key in (f"{attempt}/rank-00000.tg", "model.tg"):
        store.create(key).append(memoryview(bytes(8 << 20))).result(60)
    assert len(keys(root)) == len(committed) + 3
    assert main(["gc", root]) == 0
    assert len(keys(root)) == len(committed) + 3  # too young
    assert main(["gc", root, "--min-age-s", "0", "--dry-run"]) == 0
    assert "16,777,218 bytes would be freed" in capsys.readouterr().out
    assert main(["gc", root, "--min-age-s", "0"]) == 0
    assert keys(root) == committed
    assert main(["list", root]) == main(["verify", root]) == 0
    store.close()


def test_a_saver_needs_no_more_than_its_bucket(
    root: str, aws_environment: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the right to make buckets nor to tag: it saves, retires, loads, gives up and tidies up."""
    for name, value in aws_environment.environment(SAVER).items():
        monkeypatch.setenv(name, value)
    with tidegate.CheckpointEngine(f"{root}?part_bytes={5 << 20}", codec="raw", keep_last=1) as engine:
        for step in (1, 2):
            engine.save_async({"x": torch.arange(12 << 20, dtype=torch.uint8)}, step=step).result()
        engine.load()
    store = open_store(root)
    writer = store.create("a")
    writer.append(memoryview(bytes(16 << 20))).result(60)
    assert main(["gc", root, "--min-age-s", "0"]) == 0
    writer.abort()
    assert len(list(store.list())) == 3
    with pytest.raises(StorePermissionError):
        S3Store("other-bucket", "x").stat("a")
    store.close()


def test_a_reader_can_load_and_not_save(root: str, aws_environment: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    with tidegate.CheckpointEngine(root, **SMALL) as engine:
        engine.save_async(filled(1), step=1).result()
    before = keys(root)
    for name, value in aws_environment.environment(READER).items():
        monkeypatch.setenv(name, value)
    with tidegate.CheckpointEngine(root, **SMALL) as engine:
        assert engine.steps() == [1]
        assert_same_bits(engine.load(), filled(1))
        with pytest.raises(tidegate.SaveError, match="AccessDenied"):
            engine.save_async(filled(2), step=2)
            engine.wait()
    for name, value in aws_environment.environment().items():
        monkeypatch.setenv(name, value)
    assert keys(root) == before
