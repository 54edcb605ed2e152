"""Killed at any moment: a whole checkpoint is always there, and an old one goes only after the new one (A04, A05)."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import FORKS, await_true, command_line, forked, run_forked
from tests.kit.killing import KillMoment, KillStore, die_before_file_change
from tests.kit.states import filled
from tests.kit.stores import RecordingStore, SlowStore, WrappedStore
from tidegate import cli
from tidegate.storage import ObjectStat, Store
from tidegate.storage.local import LocalStore

CHUNK = 1 << 17


def state_of(step: int) -> dict[str, object]:
    """A state of some 700 KB that no other step has."""
    numbers = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(150_000, generator=numbers),
        "small": [torch.randint(0, 255, (n,), generator=numbers, dtype=torch.uint8) for n in (0, 1, 7, 4097)],
        "step": step,
    }


def local(root: Path) -> LocalStore:
    """A store that leaves out the syncs: SIGKILL ends a process, not the machine."""
    return LocalStore(root, sync=False)


def save_steps(store: Store, steps: list[int], **options: object) -> None:
    """Save steps one after the other."""
    torch.set_num_threads(1)
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, **options) as engine:  # type: ignore[arg-type]
        for step in steps:
            engine.save_async(state_of(step), step=step)


def check_newest(root: Path, allowed: set[int]) -> int:
    """Load the newest checkpoint and everything that is listed, and compare the bits; return the newest step."""
    with tidegate.CheckpointEngine(local(root)) as engine:
        newest = engine.load()
        assert isinstance(newest, dict)
        assert newest["step"] in allowed
        assert newest["step"] == engine.steps()[-1]
        for step in engine.steps():
            assert step in allowed
            assert_same_bits(engine.load(step), state_of(step))
        return int(newest["step"])


def files(root: Path) -> list[str]:
    """Everything below the root, folders too."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def assert_only_checkpoints(root: Path, steps: list[int]) -> None:
    """Assert that nothing but whole checkpoints of these steps is left."""
    names = sorted(re.sub("[0-9a-f]{32}", "A", name) for name in files(root) if (root / name).is_file())
    assert names == [
        name
        for step in steps
        for folder in [f"step-{step:010d}"]
        for name in (f"{folder}/A/manifest.json", f"{folder}/A/rank-00000.tg", f"{folder}/COMMIT")
    ]


# A05: killed in mid-write


Moment = Literal["torn append", "store change", "file change"]


def save_second(root: Path, nth: int, moment: Moment, overwrite: bool, host_budget_bytes: int | None) -> None:
    """Save over an existing checkpoint, and die at the nth moment of that kind."""
    store: Store = local(root)
    if moment == "file change":
        die_before_file_change(nth)
    else:
        store = KillStore(store, nth, "torn" if moment == "torn append" else "after")
    step = 1 if overwrite else 2
    with tidegate.CheckpointEngine(
        store, chunk_bytes=CHUNK, keep_last=1, codec="raw", host_budget_bytes=host_budget_bytes
    ) as engine:
        engine.save_async(state_of(2), step=step, overwrite=overwrite)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["torn append", "file change"])
def test_A05_killed_at_every_failpoint(tmp_path: Path, moment: Moment, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of each append, and before each create, link, rename and removal, until a run comes to its end."""
    newest = []
    for nth in itertools.count(1):
        root = tmp_path / str(nth)
        save_steps(local(root), [1])
        code = run_forked(save_second, root, nth, moment, False, None)
        newest.append(check_newest(root, {1, 2}))
        if code == 0:
            break
        assert code == -9
        check_listing(root, capsys)
        assert cli.main(["gc", str(root), "--min-age-s", "0"]) == 0
        assert check_newest(root, {1, 2}) == newest[-1]
        with tidegate.CheckpointEngine(local(root)) as engine:
            assert_only_checkpoints(root, engine.steps())
    assert len(newest) > 5
    assert newest == sorted(newest), "once committed it stays"
    assert set(newest) == {1, 2}


def check_listing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`list` and `verify` take no leftover for a checkpoint."""
    capsys.readouterr()
    assert cli.main(["list", str(root)]) == 0
    listed = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert listed == [step for step in (1, 2) if list(root.glob(f"step-{step:010d}/COMMIT"))]
    assert cli.main(["verify", str(root)]) == 0


def test_A05_killed_while_the_state_is_still_being_staged(tmp_path: Path) -> None:
    """The budget holds a part of the state, so the call itself is still copying when the first chunks are written."""
    for nth in (2, 3, 5):
        root = tmp_path / str(nth)
        save_steps(local(root), [1])
        assert run_forked(save_second, root, nth, "store change", False, 512 << 10) == -9
        assert check_newest(root, {1}) == 1


def test_A05_killed_while_a_step_is_replaced(tmp_path: Path) -> None:
    seen = set()
    for nth in itertools.count(1):
        root = tmp_path / str(nth)
        save_steps(local(root), [1])
        code = run_forked(save_second, root, nth, "file change", True, None)
        with tidegate.CheckpointEngine(local(root)) as engine:
            assert engine.steps() == [1]
            state = engine.load()
        assert isinstance(state, dict)
        assert_same_bits(state, state_of(state["step"]))
        seen.add(state["step"])
        if code == 0:
            break
        assert cli.main(["gc", str(root), "--min-age-s", "0"]) == 0
        assert_only_checkpoints(root, [1])
    assert seen == {1, 2}


def save_plain(path: Path, nth: int, moment: KillMoment) -> None:
    """`tidegate.save` over an existing file, and die at a change of the store."""
    import tidegate.oneshot

    tidegate.oneshot.open_store = lambda root: KillStore(local(Path(root)), nth, moment)  # type: ignore[assignment,attr-defined]
    tidegate.save(state_of(2), path)


@pytest.mark.parametrize("moment", ["torn", "after"])
def test_A05_a_plain_save_is_killed(tmp_path: Path, moment: KillMoment) -> None:
    path = tmp_path / "model.tg"
    tidegate.save(state_of(1), path)
    code, steps = -9, []
    for nth in itertools.count(1):
        code = run_forked(save_plain, path, nth, moment)
        state = tidegate.load(path)
        assert isinstance(state, dict)
        assert_same_bits(state, state_of(state["step"]))
        steps.append(state["step"])
        if code == 0:
            break
        assert code == -9
    assert len(steps) > 3
    assert steps == sorted(steps)
    assert steps[0] == 1
    assert steps[-1] == 2
    assert len(files(tmp_path)) > 1
    assert cli.main(["gc", str(tmp_path), "--min-age-s", "0"]) == 0
    assert files(tmp_path) == ["model.tg"]


def save_on(root: Path, ready: Connection, first: int, last: int, bytes_per_s: float | None) -> None:
    """Save step after step to a store of that speed, the older ones retired."""
    torch.set_num_threads(1)
    store = SlowStore(local(root), bytes_per_s)
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec="raw", keep_last=1) as engine:
        states = {step: state_of(step) for step in range(first, last)}
        ready.send("saving")
        for step, state in states.items():
            engine.save_async(state, step=step)


@pytest.mark.slow
def test_A05_killed_at_random_times(tmp_path: Path) -> None:
    first, killed_in = 1, set()
    save_steps(local(tmp_path), [0])
    for i in range(30):
        here, there = FORKS.Pipe()
        before = set(files(tmp_path))
        with forked(save_on, tmp_path, there, first, first + 20, 20e6 if i % 2 else None) as process:
            assert here.recv() == "saving"
            process.join(random.uniform(0.0, 0.12))
            process.kill()
            process.join()
        killed_in.add(what_was_under_way(set(files(tmp_path)) - before))
        newest = check_newest(tmp_path, set(range(first + 20)))
        assert newest >= first - 1
        first = newest + 1
    assert len(killed_in) > 1, f"all kills came in one phase: {killed_in}"
    done = command_line("gc", tmp_path, "--min-age-s", "0")
    assert done.returncode == 0, done.stderr
    with tidegate.CheckpointEngine(local(tmp_path)) as engine:
        assert_only_checkpoints(tmp_path, engine.steps())


def what_was_under_way(new: set[str]) -> str:
    """Tell from the new files in which phase of a save their process was killed."""
    if any(re.search(r"/\.rank.*\.partial$", name) for name in new):
        return "writing frames"
    return "between saves" if sum(name.endswith("COMMIT") for name in new) == 1 else "publishing or retiring"


# A04: `latest` and retention


def test_A04_latest_always_loads_while_old_ones_go(tmp_path: Path) -> None:
    """A reader polls while a writer saves with keep_last=1 and is killed at random times."""
    save_steps(local(tmp_path), [0])
    newest, num_loads = 0, 0
    with tidegate.CheckpointEngine(local(tmp_path)) as reader:
        for _ in range(15):
            here, there = FORKS.Pipe()
            with forked(save_on, tmp_path, there, newest + 1, newest + 50, 10e6) as process:
                assert here.recv() == "saving"
                end_s = time.monotonic() + random.uniform(0.0, 0.4)
                while time.monotonic() < end_s or num_loads == 0:
                    newest = check_load(reader, newest)
                    num_loads += 1
                process.kill()
            newest = check_load(reader, newest)
    assert newest > 10
    assert num_loads > 10


def check_load(reader: tidegate.CheckpointEngine, at_least: int) -> int:
    """Load the newest: whole, and no older than one that was seen before."""
    state = reader.load()
    assert isinstance(state, dict)
    assert state["step"] >= at_least
    assert_same_bits(state, state_of(state["step"]))
    return int(state["step"])


class BusyStore(WrappedStore):
    """Lets something happen while a listing is under way: once the names of the root's folders are known."""

    def __init__(self, inner: Store, events: list[threading.Thread]) -> None:
        super().__init__(inner)
        self.events = events

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        stats = list(self.inner.list(prefix))
        if self.events:
            thread = self.events.pop()
            thread.start()
            thread.join()
        return iter([stat for stat in stats if self._is_there(stat)])

    def _is_there(self, stat: ObjectStat) -> bool:
        return bool(list(self.inner.list(stat.key.rpartition("/")[0] + "/")))


def test_A04_a_listing_that_misses_both_is_done_again(tmp_path: Path) -> None:
    """The new step's folder is made, and the old step retired, after the names in the root were read."""
    save_steps(local(tmp_path), [1])
    event = threading.Thread(target=save_steps, args=(local(tmp_path), [2]), kwargs={"keep_last": 1})
    with tidegate.CheckpointEngine(BusyStore(local(tmp_path), [event])) as engine:
        assert_same_bits(engine.load(), state_of(2))


Role = Literal["same steps", "own steps"]


def finalise_and_prune(root: Path, ready: Connection, number: int, role: Role) -> None:
    """Save some steps as another process does, with retention after each; losing a race is no failure."""
    torch.set_num_threads(1)
    with tidegate.CheckpointEngine(local(root), chunk_bytes=CHUNK, keep_last=1) as engine:
        ready.recv()
        for i in range(8):
            step = i if role == "same steps" else 10 * i + number
            with contextlib.suppress(tidegate.StepExistsError):
                engine.save_async(filled(step + number / 10), step=step)
                engine.wait()


@pytest.mark.parametrize("role", ["same steps", "own steps"])
def test_A04_four_processes_finalise_and_prune_one_root(tmp_path: Path, role: Role) -> None:
    pipes = [FORKS.Pipe() for _ in range(4)]
    children = [
        FORKS.Process(target=finalise_and_prune, args=(tmp_path, there, i, role)) for i, (_, there) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    try:
        for here, _ in pipes:
            here.send("go")
        with tidegate.CheckpointEngine(local(tmp_path)) as reader:
            await_true(lambda: bool(reader.steps()), children[0])
            while any(child.is_alive() for child in children):
                assert_one_writer(reader.load())
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0] * 4
    finally:
        for child in children:
            child.kill()
            child.join()
    with tidegate.CheckpointEngine(local(tmp_path)) as engine:
        assert_one_writer(engine.load())
        for step in engine.steps():
            assert_one_writer(engine.load(step))
        assert cli.main(["gc", str(tmp_path), "--min-age-s", "0"]) == 0
        assert_only_checkpoints(tmp_path, engine.steps())


def assert_one_writer(state: object) -> None:
    """Assert that a checkpoint is of one process alone."""
    assert isinstance(state, dict)
    assert_same_bits(state, filled(float(state["t0"][0])))


class HeldStore(WrappedStore):
    """Holds its manifests back until told."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_at_the_manifest = threading.Event()
        self.go_on = threading.Event()

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        if key.endswith("manifest.json"):
            self.is_at_the_manifest.set()
            assert self.go_on.wait(60)
        super().compare_and_put(key, data, expected=expected)


def test_A04_retention_leaves_an_attempt_alone_that_is_being_written(tmp_path: Path) -> None:
    """A process commits and retires a step while another is about to commit its own attempt at that step."""
    held = HeldStore(local(tmp_path))
    with tidegate.CheckpointEngine(held, keep_last=1) as slow:
        future = slow.save_async(state_of(1), step=1)
        assert held.is_at_the_manifest.wait(60)
        save_steps(local(tmp_path), [1, 2], keep_last=1)
        held.go_on.set()
        future.result(60)
    check_newest_is_whole(tmp_path)


def check_newest_is_whole(root: Path) -> None:
    """Every listed step loads, and without a warning."""
    with tidegate.CheckpointEngine(local(root)) as engine:
        assert engine.steps()
        for step in engine.steps():
            assert_same_bits(engine.load(step), state_of(step))
        engine.load()


def test_A04_nothing_is_deleted_before_the_commit(tmp_path: Path) -> None:
    """In the order of a save's changes, every deletion comes after the new COMMIT."""
    store = RecordingStore(local(tmp_path))
    save_steps(store, [1, 2, 3], keep_last=1)
    kinds = [(op.kind, op.key.rpartition("/")[2], int(op.key[5:15])) for op in store.operations]
    for step in (1, 2):
        first_deletion = next(i for i, (kind, _, of) in enumerate(kinds) if kind == "delete" and of == step)
        assert kinds.index(("compare_and_put", "COMMIT", step + 1)) < first_deletion
        assert kinds[first_deletion] == ("delete", "COMMIT", step), "so that no reader finds half of it"
