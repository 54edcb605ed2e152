"""COMMIT records, their order, retention, and what counts as a leftover."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.wrapping import put
from tidegate.commit import (
    CommitRecord,
    attempt_key,
    commit_key,
    committed_steps,
    leftovers,
    parse_commit,
    publish,
    read_commit_bytes,
    read_commits,
    step_folder,
)
from tidegate.errors import CorruptCheckpointError
from tidegate.retention import apply_retention, retire, to_retire
from tidegate.storage.errors import ObjectExistsError
from tidegate.storage.local import LocalStore
from tidegate.storage.memory import MemoryStore


def record(step: int, sequence: int = 1, attempt: str = "ab" * 16) -> CommitRecord:
    return CommitRecord(step, sequence, attempt, 10, 20)


def test_a_record_comes_back() -> None:
    assert parse_commit(record(7).dump(), 7) == record(7)


@pytest.mark.parametrize("position", range(len(record(7).dump()) - 1))
def test_every_changed_byte_of_a_record_is_seen(position: int) -> None:
    text = bytearray(record(7).dump())
    text[position] ^= 1
    try:
        assert parse_commit(bytes(text), 7) == record(7)
    except CorruptCheckpointError as exc:
        assert "step 7" in str(exc)


def test_a_record_of_another_step_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="another step"):
        parse_commit(record(7).dump(), 8)


def test_a_hostile_attempt_name_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError):
        parse_commit(record(7, attempt="../../etc").dump(), 7)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", b'{"tidegate-commit": 3}'])
def test_garbage_is_refused(text: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        parse_commit(text, 7)


def test_only_one_attempt_wins() -> None:
    store = MemoryStore()
    publish(store, record(7, attempt="aa" * 16), None)
    with pytest.raises(ObjectExistsError):
        publish(store, record(7, attempt="bb" * 16), None)
    assert read_commits(store)[0][0].attempt == "aa" * 16


def test_order_is_the_sequence_not_the_step() -> None:
    store = MemoryStore()
    for step, sequence in ((300, 1), (200, 2), (100, 3)):
        publish(store, record(step, sequence), None)
    assert [r.step for r in read_commits(store)[0]] == [300, 200, 100]
    assert committed_steps(store) == [100, 200, 300]


def test_to_read_the_records_is_to_look_at_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at a folder is a dozen calls that give up the GIL; beside busy Python each may wait 5 ms for it."""
    with closing(LocalStore(tmp_path)) as store:
        for step in range(30):
            put(store, attempt_key(step, "ab" * 16, "rank-00000.tg"), b"frames")
            if step % 3:
                publish(store, record(step, step), None)
        scans: list[object] = []
        scandir = os.scandir
        monkeypatch.setattr(os, "scandir", lambda of: scans.append(of) or scandir(of))  # type: ignore[func-returns-value]
        found, damaged = read_commits(store)
        assert ([r.step for r in found], damaged) == ([step for step in range(30) if step % 3], {})
        assert len(scans) == 1
        assert committed_steps(store) == [r.step for r in found]


def test_what_is_no_step_is_no_commit(tmp_path: Path) -> None:
    with closing(LocalStore(tmp_path / "root")) as store:
        assert read_commits(store) == ([], {})
        publish(store, record(7), None)
        for name in ("step-7", "step-00000000070", "other", "step-0000000008x"):
            put(store, f"{name}/COMMIT", record(7).dump())
        (tmp_path / "root" / "step-0000000009").symlink_to(tmp_path / "root" / "step-0000000007")
        (tmp_path / "root" / "step-0000000010").write_bytes(b"a file")
        (tmp_path / "root" / "step-0000000011").mkdir()
        (tmp_path / "root" / "step-0000000012" / "COMMIT").mkdir(parents=True)
        (tmp_path / "root" / "step-0000000013").mkdir()
        (tmp_path / "root" / "step-0000000013" / "COMMIT").symlink_to(tmp_path / "root" / "step-0000000007" / "COMMIT")
        (tmp_path / "root" / "step-0000000014").mkdir()
        os.mkfifo(tmp_path / "root" / "step-0000000014" / "COMMIT")
        found, damaged = read_commits(store)
        assert ([r.step for r in found], damaged) == ([7], {})
        assert committed_steps(store) == [7]


def test_a_damaged_record_is_reported_and_kept() -> None:
    store = MemoryStore()
    publish(store, record(1, 1), None)
    store.compare_and_put(commit_key(2), b"garbage", expected=None)
    good, damaged = read_commits(store)
    assert [r.step for r in good] == [1]
    assert list(damaged) == [2]
    apply_retention(store, 1, None)
    assert read_commit_bytes(store, 2) == b"garbage"


def test_retire_removes_commit_and_objects() -> None:
    store = MemoryStore()
    publish(store, record(1), None)
    store.compare_and_put(f"{step_folder(1)}/{'ab' * 16}/manifest.json", b"x", expected=None)
    retire(store, record(1))
    assert list(store.list()) == []


def test_leftovers_are_what_no_commit_holds() -> None:
    store = MemoryStore()
    publish(store, record(1), None)
    store.compare_and_put(f"{step_folder(1)}/{'ab' * 16}/manifest.json", b"held", expected=None)
    store.compare_and_put(f"{step_folder(1)}/{'cd' * 16}/manifest.json", b"old attempt", expected=None)
    store.compare_and_put(f"{step_folder(2)}/{'ef' * 16}/rank-00000.tg", b"no commit", expected=None)
    store.compare_and_put("notes.txt", b"not ours", expected=None)
    found = sorted(stat.key for stat in leftovers(store, min_age_s=0.0))
    assert found == [f"{step_folder(1)}/{'cd' * 16}/manifest.json", f"{step_folder(2)}/{'ef' * 16}/rank-00000.tg"]
    assert list(leftovers(store, min_age_s=3600.0)) == []


@given(st.lists(st.integers(0, 50), unique=True, max_size=20), st.integers(1, 5), st.none() | st.integers(1, 7))
def test_retention_keeps_the_newest_and_every_nth(steps: list[int], keep_last: int, keep_every: int | None) -> None:
    commits = [record(step, sequence) for sequence, step in enumerate(steps)]
    gone = to_retire(commits, keep_last, keep_every)
    kept = [step for step in steps if step not in gone]
    assert kept[-keep_last:] == steps[-keep_last:]
    for step in gone:
        assert keep_every is None or step % keep_every
    assert len(kept) <= keep_last or (keep_every is not None)


def test_the_record_is_readable_json() -> None:
    fields = json.loads(record(7).dump())
    assert fields["tidegate-commit"]["step"] == 7
