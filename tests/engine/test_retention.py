"""What stays: the newest, the best, what others need; and, of older ones, only some parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.chains import CHUNK, assert_all_load, bases_of, records_of, save_steps, state_at
from tests.kit.children import FORKS
from tidegate import cli
from tidegate.commit import CommitRecord
from tidegate.delta import DeltaPolicy
from tidegate.load import open_checkpoint
from tidegate.retention import KeepBest, KeepPolicy, Retention, to_retire
from tidegate.storage.local import LocalStore
from tidegate.storage.memory import MemoryStore


def steps_of(store: Any) -> list[int]:
    return sorted(records_of(store))


def test_bases_of_living_differences_stay() -> None:
    store = MemoryStore()
    save_steps(store, list(range(8)), DeltaPolicy(max_chain=3), keep_last=1)
    assert steps_of(store) == [4, 5, 6, 7]
    assert_all_load(store)
    save_steps(store, [8], DeltaPolicy(max_chain=3), keep_last=1)
    assert steps_of(store) == [8], "a full one needs nobody"
    assert {stat.key[:15] for stat in store.list()} == {"step-0000000008"}


def test_a_retired_chain_leaves_nothing() -> None:
    store = MemoryStore()
    save_steps(store, [0, 1, 2, 3, 4], DeltaPolicy(max_chain=2), keep_last=2)
    assert bases_of(store) == {3: [], 4: [3]}
    assert {stat.key[:15] for stat in store.list()} == {"step-0000000003", "step-0000000004"}


def attempt(number: int) -> str:
    return f"{number:032x}"


@st.composite
def histories(draw: st.DrawFn) -> list[CommitRecord]:
    """Commits in their order, each full or a difference to the one before; steps in any order."""
    steps = draw(st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=20))
    commits: list[CommitRecord] = []
    for i, step in enumerate(steps):
        is_full = not commits or draw(st.booleans())
        before = commits[-1] if commits else None
        bases = () if is_full or before is None else ((before.step, before.attempt), *before.bases)
        commits.append(CommitRecord(step, i, attempt(i), 10, 20, bases))
    return commits


@settings(deadline=None)
@given(histories(), st.integers(1, 5), st.none() | st.integers(1, 7), st.sets(st.integers(0, 60), max_size=3))
def test_nothing_that_stays_lacks_a_base(
    commits: list[CommitRecord], keep_last: int, keep_every: int | None, best: set[int]
) -> None:
    gone = to_retire(commits, keep_last, keep_every, best)
    kept = [commit for commit in commits if commit.step not in gone]
    there = {(commit.step, commit.attempt) for commit in kept}
    assert all(base in there for commit in kept for base in commit.bases)
    assert kept[-1] == commits[-1]
    asked = {commit.step for commit in commits[-keep_last:]} | best
    asked |= {commit.step for commit in commits if keep_every is not None and commit.step % keep_every == 0}
    needed = {step for commit in commits if commit.step in asked for step, _ in commit.bases}
    assert {commit.step for commit in kept} == {c.step for c in commits if c.step in asked | needed}, (
        "and no more stays"
    )


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_random_policies_over_many_saves(data: st.DataObject) -> None:
    """Engines of random policies on one root, steps that go back, replacements, restarts: all that is listed loads."""
    store = MemoryStore()
    step = 0
    for _ in range(data.draw(st.integers(2, 4))):
        policy = data.draw(st.none() | st.builds(DeltaPolicy, st.integers(1, 4), st.sampled_from([None, 0, 100_000])))
        options: dict[str, Any] = {"keep_last": data.draw(st.none() | st.integers(1, 3))}
        if options["keep_last"] is not None:
            options["keep_every"] = data.draw(st.none() | st.integers(2, 5))
            options["keep_best"] = data.draw(st.none() | st.builds(KeepBest, st.just("loss"), st.integers(1, 2)))
        with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, delta=policy, **options) as engine:
            for _ in range(data.draw(st.integers(1, 5))):
                step = max(0, step + data.draw(st.sampled_from([1, 1, 1, 2, -2])))
                loss = data.draw(st.sampled_from([0.5, 1.0, 2.0]))
                state = state_at(step, numel=9000)
                engine.save_async(state, step=step, overwrite=True, metadata={"loss": loss})
                engine.wait()
                assert step in engine.steps()
        with tidegate.CheckpointEngine(store) as engine:
            for listed in engine.steps():
                assert_same_bits(engine.load(listed), state_at(listed, numel=9000))
            assert_same_bits(engine.load(), state_at(step, numel=9000))


LOSSES = {0: 3.0, 1: 1.0, 2: 2.0, 3: 1.5, 4: float("inf"), 5: None, 6: "low", 7: 9.0}


@pytest.mark.parametrize(("best", "kept"), [(("loss", 2, "min"), [1, 3, 7]), (("loss", 1, "max"), [7]), (("x",), [7])])
def test_the_best_stay(best: tuple[Any, ...], kept: list[int]) -> None:
    store = MemoryStore()
    with tidegate.CheckpointEngine(store, keep_last=1, keep_best=KeepBest(*best)) as engine:
        for step, loss in LOSSES.items():
            metadata = {} if loss is None or loss == float("inf") else {"loss": loss}
            engine.save_async({"x": torch.zeros(3)}, step=step, metadata=metadata)
        engine.wait()
        assert engine.steps() == kept


def parts_state(step: int) -> dict[str, Any]:
    state = state_at(step)
    return {
        "model": state["model"],
        "optimizer": {"master": state["master"], "exp_avg": state["noise"]},
        "a b": [step, None],
        "step": step,
    }


@pytest.mark.parametrize("delta", [None, DeltaPolicy(max_chain=2)])
def test_of_older_checkpoints_only_parts_stay(tmp_path: Path, delta: DeltaPolicy | None) -> None:
    """The weights of all, the optimizer of the last two: also where a weight follows from the optimizer's master."""
    store = LocalStore(tmp_path, sync=False)
    options: dict[str, Any] = {"keep_parts": ["model", "step", "a b"], "keep_full_last": 2, "chunk_bytes": CHUNK}
    with tidegate.CheckpointEngine(store, delta=delta, **options) as engine:
        for step in range(8):
            engine.save_async(parts_state(step), step=step, metadata={"n": step})
            engine.wait()
            assert_same_bits(engine.load(), parts_state(step))
        reduced = []
        for step in range(8):
            whole = parts_state(step)
            found = engine.load(step)
            if "optimizer" in found:  # type: ignore[operator]
                assert_same_bits(found, whole)
            else:
                assert_same_bits(found, {name: whole[name] for name in ("model", "step", "a b")})
                reduced.append(step)
    # One a save, and none that others are differences to: 3 and 4 wait for 5, which was reduced last.
    assert reduced == ([0, 1, 2, 3, 4, 5] if delta is None else [0, 1, 2, 5])
    assert [record.step for record in sorted(records_of(store).values(), key=lambda r: r.sequence)] == list(range(8))
    manifest, _ = open_checkpoint(store, records_of(store)[0])
    assert manifest.metadata == {"n": 0}
    assert manifest.parts == ("model", "step", "a b")
    assert (
        cli.main(["gc", str(tmp_path), "--min-age-s", "0"]) == cli.main(["inspect", str(tmp_path), "--step", "0"]) == 0
    )
    assert len(list(tmp_path.rglob("*.tg"))) == 8, "the attempts that were replaced are gone"


def test_what_has_no_such_parts_stays_whole_and_says_so() -> None:
    store = MemoryStore()
    with tidegate.CheckpointEngine(store, keep_parts=["model"], keep_full_last=1) as engine:
        engine.save_async([torch.zeros(3)], step=0)
        engine.save_async({"x": torch.zeros(3)}, step=1)
        with pytest.warns(tidegate.CheckpointWarning, match="could not be reduced: step 0 holds no dict"):
            engine.wait()
        assert_same_bits(engine.load(0), [torch.zeros(3)])


@pytest.mark.parametrize(
    "options",
    [
        {"keep_best": KeepBest("loss")},
        {"keep_parts": ["model"]},
        {"keep_full_last": 2},
        {"keep_full_last": 0, "keep_parts": ["model"]},
        {"keep_last": True},
        {"keep_parts": "model", "keep_full_last": 1},
        {"keep_last": 1, "keep_best": "loss"},
    ],
)
def test_policies_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(tidegate.ConfigError):
        tidegate.CheckpointEngine(MemoryStore(), **options)
    with pytest.raises(tidegate.ConfigError):
        KeepBest("loss", mode="least")  # type: ignore[arg-type]


def test_a_root_without_checkpoints_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prune", str(tmp_path / "misspelt"), "--keep-last", "1"]) == 1
    assert "no checkpoint is committed at" in capsys.readouterr().err


def test_a_dry_run_says_what_would_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(tmp_path, sync=False)
    save_steps(store, list(range(6)), DeltaPolicy(max_chain=2))
    policy = KeepPolicy(last=1, every=None)
    plan = Retention(policy).plan(store)
    assert [record.step for record in plan.delete] == [0, 1, 2]
    assert [record.step for record in plan.held] == [3, 4]
    assert cli.main(["prune", str(tmp_path), "--keep-last", "1", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "would delete step 2 " in said
    assert "keeps step 4, which newer ones are differences to" in said
    assert steps_of(store) == list(range(6)), "nothing has gone"
    assert cli.main(["list", str(tmp_path)]) == 0
    assert "difference to step 4" in capsys.readouterr().out
    assert cli.main(["prune", str(tmp_path), "--keep-last", "1", "--keep-best", "loss:2:max"]) == 0
    assert steps_of(store) == [3, 4, 5]
    assert_all_load(store)
    assert cli.main(["prune", str(tmp_path), "--keep-last", "0"]) == 1
    assert cli.main(["prune", str(tmp_path), "--keep-last", "1", "--keep-best", "loss:x"]) == 1


def prune_and_save(root: Path, number: int) -> None:
    torch.set_num_threads(1)
    store = LocalStore(root, sync=False)
    with tidegate.CheckpointEngine(store, chunk_bytes=1 << 20, delta=DeltaPolicy(max_chain=2), keep_last=2) as engine:
        for i in range(6):
            try:
                engine.save_async(state_at(10 * i + number), step=10 * i + number)
                engine.wait()
            except tidegate.SaveError as exc:
                assert "another process has deleted" in str(exc)


def test_several_processes_save_chains_and_prune_one_root(tmp_path: Path) -> None:
    children = [FORKS.Process(target=prune_and_save, args=(tmp_path, number)) for number in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 3
    store = LocalStore(tmp_path, sync=False)
    assert len(steps_of(store)) >= 2
    assert_all_load(store)
    assert cli.main(["gc", str(tmp_path), "--min-age-s", "0"]) == 0
    assert_all_load(store)
