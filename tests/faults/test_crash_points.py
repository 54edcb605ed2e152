"""Crash points: whatever the first part of a save's writes that happened, a load gives the old or the new state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import tidegate
from tests.faults.rig import CHUNK, all_keys, collect_garbage, held_keys, state_of
from tests.kit.bits import assert_same_bits
from tests.kit.stores import RecordingStore
from tidegate.storage import LocalStore, MemoryStore, Store, open_store

NEXT = 9


@dataclass(frozen=True, slots=True)
class Recorded:
    """A scenario's writes.

    Attributes:
        store: Has recorded all of them.
        begin: How many belong to what was there before.
        old: The step before, and whose state it holds; None if there was none.
        new: The same for afterwards.
    """

    store: RecordingStore
    begin: int
    old: tuple[int, int] | None
    new: tuple[int, int]

    def crashes(self) -> Iterator[tuple[int, RecordingStore]]:
        """Yield every first part of the writes: with the last one whole and, if it is an append, cut in half."""
        operations = self.store.operations
        for count in range(self.begin, len(operations) + 1):
            last = operations[count - 1] if count else None
            if count > self.begin and last is not None and last.kind == "append" and len(last.content) > 1:
                torn = RecordingStore(MemoryStore())
                torn.operations = [
                    *operations[: count - 1],
                    replace(last, content=last.content[: len(last.content) // 2]),
                ]
                yield count, torn
            whole = RecordingStore(MemoryStore())
            whole.operations = operations[:count]
            yield count, whole

    def is_committed(self, count: int) -> bool:
        """Whether the new state's COMMIT is among the first writes."""
        return any(
            operation.kind == "compare_and_put" and operation.key.endswith("/COMMIT")
            for operation in self.store.operations[self.begin : count]
        )


def first_save() -> Recorded:
    store = RecordingStore(MemoryStore())
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK) as engine:
        engine.save_async(state_of(1), step=1).result(60)
    return Recorded(store, 0, None, (1, 1))


def second_save_with_retention() -> Recorded:
    store = RecordingStore(MemoryStore())
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, keep_last=1) as engine:
        engine.save_async(state_of(1), step=1)
        engine.wait()
        begin = len(store.operations)
        engine.save_async(state_of(2), step=2)
        engine.wait()
    return Recorded(store, begin, (1, 1), (2, 2))


def overwrite() -> Recorded:
    store = RecordingStore(MemoryStore())
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK) as engine:
        engine.save_async(state_of(1), step=5)
        engine.wait()
        begin = len(store.operations)
        engine.save_async(state_of(2), step=5, overwrite=True)
        engine.wait()
    return Recorded(store, begin, (5, 1), (5, 2))


SCENARIOS: dict[str, Callable[[], Recorded]] = {
    "first-save": first_save,
    "second-save-with-retention": second_save_with_retention,
    "overwrite": overwrite,
}


def check_crash(recorded: Recorded, count: int, store: Store) -> None:
    """What must hold of what a crash left: the newest checkpoint, each step, the next save, and the garbage."""
    expected = recorded.new if recorded.is_committed(count) else recorded.old
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK) as engine:
        if expected is None:
            assert engine.steps() == []
            with pytest.raises(tidegate.CheckpointNotFoundError):
                engine.load()
        else:
            step, content = expected
            assert_same_bits(engine.load(), state_of(content))
            assert_same_bits(engine.load(step), state_of(content))
        if recorded.old is not None and recorded.old[0] != recorded.new[0] and recorded.old[0] in engine.steps():
            assert_same_bits(engine.load(recorded.old[0]), state_of(recorded.old[1]))
        before = held_keys(store)
        collect_garbage(store)
        assert all_keys(store) == before
        engine.save_async(state_of(NEXT), step=NEXT)
        engine.wait()
        assert_same_bits(engine.load(), state_of(NEXT))
        assert_same_bits(engine.load(NEXT), state_of(NEXT))
        if expected is not None:
            assert_same_bits(engine.load(expected[0]), state_of(expected[1]))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_crash_point_gives_the_old_or_the_new_state(name: str) -> None:
    recorded = SCENARIOS[name]()
    num_appends = sum(operation.kind == "append" for operation in recorded.store.operations[recorded.begin :])
    assert num_appends >= 4, "too few chunks to be a test"
    assert not recorded.is_committed(recorded.begin)
    assert recorded.is_committed(len(recorded.store.operations))
    for count, crash in recorded.crashes():
        store = crash.replay(len(crash.operations))
        check_crash(recorded, count, store)


@pytest.mark.parametrize("name", SCENARIOS)
def test_crash_points_in_a_folder(name: str, tmp_path: Path) -> None:
    """The same in real files, at every third point and around the commit."""
    recorded = SCENARIOS[name]()
    operations = recorded.store.operations
    committed_at = next(n for n in range(len(operations) + 1) if recorded.is_committed(n))
    chosen = {*range(recorded.begin, len(operations) + 1, 3), committed_at - 1, committed_at, len(operations)}
    for number, (count, crash) in enumerate(recorded.crashes()):
        if count in chosen:
            with_folder = LocalStore(tmp_path / str(number), sync=False)
            crash.replay(len(crash.operations), into=with_folder)
            check_crash(recorded, count, with_folder)
            with_folder.close()


def test_nothing_of_an_old_checkpoint_is_touched_before_the_new_one_is_committed() -> None:
    for recorded in (second_save_with_retention(), overwrite()):
        operations = recorded.store.operations[recorded.begin :]
        committed_at = next(
            i for i, o in enumerate(operations) if o.kind == "compare_and_put" and o.key.endswith("COMMIT")
        )
        assert not [o for o in operations[:committed_at] if o.kind in ("delete", "abort")]
        assert [o for o in operations[committed_at:] if o.kind == "delete"]


def test_every_crash_point_of_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = RecordingStore(MemoryStore())
    with monkeypatch.context() as patched:
        patched.setattr("tidegate.oneshot.open_store", lambda root: recording)
        tidegate.save(state_of(1), "memory://record/model.tg", codec="raw")
        begin = len(recording.operations)
        tidegate.save(state_of(2), "memory://record/model.tg")
    recorded = Recorded(recording, begin, (1, 1), (2, 2))
    sealed_at = 1 + next(i for i, o in enumerate(recording.operations) if i >= begin and o.kind == "seal")
    seen = set()
    for number, (count, crash) in enumerate(recorded.crashes()):
        root = f"memory://one-file-{number}"
        crash.replay(len(crash.operations), into=open_store(root))
        content = 2 if count >= sealed_at else 1
        assert_same_bits(tidegate.load(f"{root}/model.tg"), state_of(content))
        tidegate.save(state_of(3), f"{root}/model.tg")
        assert_same_bits(tidegate.load(f"{root}/model.tg"), state_of(3))
        seen.add(content)
    assert seen == {1, 2}
