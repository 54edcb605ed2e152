"""Chains under fire: bases deleted, damaged or swapped, killed runs, and other processes that delete."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.chains import CHUNK, assert_all_load, bases_of, records_of, save_steps, state_at
from tests.kit.children import forked, run_forked
from tests.kit.forging import attempt_folder, edit_manifest, record_of, sign
from tests.kit.killing import KillMoment, KillStore
from tests.kit.stores import WrappedStore
from tidegate import cli
from tidegate.commit import CommitRecord
from tidegate.delta import DeltaPolicy
from tidegate.errors import SaveError
from tidegate.retention import retire
from tidegate.storage import Store
from tidegate.storage.local import LocalStore
from tidegate.storage.memory import MemoryStore

POLICY = DeltaPolicy(max_chain=2)
STEPS = list(range(6))
# Two chains: 0 ← 1 ← 2 and 3 ← 4 ← 5.


OPENED: list[LocalStore] = []


def local(root: Path) -> LocalStore:
    """A store of a folder; it is closed when the test has ended."""
    OPENED.append(LocalStore(root, sync=False))
    return OPENED[-1]


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_steps(local(tmp_path), STEPS, POLICY)
    assert bases_of(local(tmp_path)) == {0: [], 1: [0], 2: [1, 0], 3: [], 4: [3], 5: [4, 3]}
    return tmp_path


def flip(path: Path, at: int) -> None:
    octets = bytearray(path.read_bytes())
    octets[at] ^= 1
    path.write_bytes(octets)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "object deleted": lambda folder: (folder / "rank-00000.tg").unlink(),
    "manifest deleted": lambda folder: (folder / "manifest.json").unlink(),
    "all deleted": lambda folder: shutil.rmtree(folder),
    "a frame damaged": lambda folder: flip(folder / "rank-00000.tg", 5000),
    "the manifest damaged": lambda folder: flip(folder / "manifest.json", 100),
    "the trailer damaged": lambda folder: flip(folder / "rank-00000.tg", -30),
    "cut short": lambda folder: (folder / "rank-00000.tg").write_bytes((folder / "rank-00000.tg").read_bytes()[:8192]),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("base", [3, 4])
def test_a_damaged_base_is_named_with_the_step_and_the_other_chain_loads(root: Path, base: int, damage: str) -> None:
    DAMAGES[damage](attempt_folder(root, base))
    with tidegate.CheckpointEngine(root) as engine:
        for step in range(base + 1, 6):
            with pytest.raises(tidegate.CorruptCheckpointError) as caught:
                engine.load(step)
            assert f"step {step} " in str(caught.value), "the step that was asked for"
            assert f"step {base}" in str(caught.value), "the one that it needs"
        with pytest.raises(tidegate.CorruptCheckpointError):
            engine.load(base)
        for step in (0, 1, 2, *range(3, base)):
            assert_same_bits(engine.load(step), state_at(step))
        with pytest.warns(tidegate.CheckpointWarning) as passed_over:
            newest = engine.load()
        assert len(passed_over) == 6 - base
        assert_same_bits(newest, state_at(base - 1))


def test_commit_records_of_bases_do_not_matter_to_a_load(root: Path) -> None:
    """What a difference needs are its base's objects; whoever deletes the record only makes that step no step."""
    (root / "step-0000000003" / "COMMIT").unlink()
    flip(root / "step-0000000004" / "COMMIT", 40)
    with tidegate.CheckpointEngine(root) as engine:
        assert_same_bits(engine.load(5), state_at(5))
        with pytest.raises(tidegate.CorruptCheckpointError, match="COMMIT of step 4"):
            engine.load(4)


def swap_base(root: Path, tmp_path: Path) -> None:
    """Put a whole and rightly signed checkpoint of another state in step 3's place, and sign step 4 and 5 anew."""
    other = tmp_path / "other"
    with tidegate.CheckpointEngine(local(other), chunk_bytes=CHUNK) as engine:
        state = state_at(3)
        state["master"].view(torch.int32)[100] ^= 1  # type: ignore[attr-defined]
        state["model"]["w"].copy_(state["master"])  # type: ignore[index]
        engine.save_async(state, step=3)
    old, new = record_of(root, 3), record_of(other, 3)
    text = (other / new.manifest_key).read_text().replace(new.attempt, old.attempt).encode()
    shutil.copy(attempt_folder(other, 3) / "rank-00000.tg", attempt_folder(root, 3))
    sign(root, 3, text)
    for step in (4, 5):
        base = record_of(root, step - 1)
        edit_manifest(root, step, lambda fields, base=base: fields["delta"].update(base=base.to_json()))


def test_a_swapped_base_does_not_pass(root: Path, tmp_path: Path) -> None:
    """Every signature holds, all structures fit, one bit of the base is another: the chunk's own digest says so."""
    swap_base(root, tmp_path)
    with tidegate.CheckpointEngine(root) as engine:
        engine.load(3)
        for step, names in ((4, ("step 4", "step 3")), (5, ("step 5", "step 4"))):
            with pytest.raises(tidegate.CorruptCheckpointError, match="digest") as caught:
                engine.load(step)
            assert all(name in str(caught.value) for name in names)
            assert_same_bits(engine.load(step, part="noise"), state_at(step)["noise"])


FORGERIES: dict[str, Callable[[dict], object]] = {
    "no base": lambda f: f["delta"].pop("base"),
    "another version": lambda f: f["delta"].update(version=2),
    "no list": lambda f: f["delta"].update(chunks=3),
    "an unknown kind": lambda f: f["delta"]["chunks"][0].__setitem__(1, "sum"),
    "a chunk that is not there": lambda f: f["delta"]["chunks"].append([999, "xor", "0" * 16]),
    "a chunk twice": lambda f: f["delta"]["chunks"].append(f["delta"]["chunks"][0]),
    "no digest": lambda f: f["delta"]["chunks"][0].__setitem__(2, "xyz"),
    "a digest that is no number": lambda f: f["delta"]["chunks"][0].__setitem__(2, "g" * 16),
    "no delta": lambda f: f.pop("delta"),
    "itself": lambda f: f["delta"]["base"].update(step=5, sequence=6),
    "a newer base": lambda f: f["delta"]["base"].update(sequence=99),
    "a path as an attempt": lambda f: f["delta"]["base"].update(attempt="../../../etc"),
    "another base": lambda f: f["delta"]["base"].update(step=0),
    "other bases": lambda f: f["delta"]["base"].update(bases=[[0, "ab" * 16]]),
    "null": lambda f: f.update(delta=None),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_chains_are_refused(root: Path, forgery: str) -> None:
    edit_manifest(root, 5, FORGERIES[forgery])
    with tidegate.CheckpointEngine(root) as engine:
        with pytest.raises(tidegate.CorruptCheckpointError):
            engine.load(5)
        assert_same_bits(engine.load(4), state_at(4))


def test_a_chain_that_bites_its_tail_ends(root: Path) -> None:
    """Step 4 names step 5 as its base, and step 5 step 4: the order of commits forbids it."""
    one, two = record_of(root, 4), record_of(root, 5)
    fields = json.loads((root / one.manifest_key).read_text())
    fields["delta"]["base"] = dataclasses.replace(two, bases=((4, one.attempt),)).to_json()
    text = json.dumps(fields).encode()
    (root / one.manifest_key).write_bytes(text)
    forged = dataclasses.replace(
        one, manifest_bytes=len(text), manifest_digest=xxhash.xxh3_64_intdigest(text),
        bases=((5, two.attempt), (4, one.attempt)),
    )  # fmt: skip
    (root / "step-0000000004" / "COMMIT").write_bytes(forged.dump())
    with tidegate.CheckpointEngine(root) as engine, pytest.raises(tidegate.CorruptCheckpointError, match="not older"):
        engine.load(4)


def save_and_die(root: Path, first: int, nth: int, moment: KillMoment) -> None:
    torch.set_num_threads(1)
    steps = [first, first + 1, first + 2]
    save_steps(KillStore(local(root), nth, moment), steps, POLICY, chunk_bytes=1 << 20, keep_last=1)


def check_survivors(root: Path, at_least: int) -> None:
    """Every listed step loads without a warning, and the newest is not older than it must be."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_all_load(local(root))
        with tidegate.CheckpointEngine(local(root)) as engine:
            newest = engine.load()
    assert isinstance(newest, dict)
    assert newest["step"] >= at_least


@pytest.mark.parametrize("moment", ["torn", "after"])
def test_killed_at_every_change_of_a_store(tmp_path: Path, moment: KillMoment) -> None:
    """One run after the other in one root, each killed at a later change, retention and rebasing included."""
    save_steps(local(tmp_path), [0], POLICY, chunk_bytes=1 << 20)
    first = 1
    for nth in range(1 if moment == "torn" else 2, 80, 2):
        code = run_forked(save_and_die, tmp_path, first, nth, moment)
        check_survivors(tmp_path, first - 1)
        first = max(records_of(local(tmp_path))) + 1
        if code == 0:
            break
    else:
        pytest.fail("no run came to its end")
    assert nth > 20
    assert cli.main(["gc", str(tmp_path), "--min-age-s", "0"]) == 0
    check_survivors(tmp_path, first - 1)


def save_for_ever(root: Path, first: int) -> None:
    torch.set_num_threads(1)
    save_steps(local(root), list(range(first, first + 1000)), DeltaPolicy(max_chain=3), keep_last=2)


@pytest.mark.slow
def test_killed_at_random_instants(tmp_path: Path) -> None:
    first, rng = 0, random.Random(1)
    for _ in range(12):
        with forked(save_for_ever, tmp_path, first) as child:
            child.join(0.25 + 0.35 * rng.random())
            assert child.is_alive()
        if any(tmp_path.rglob("COMMIT")):
            check_survivors(tmp_path, first - 1)
            first = max(records_of(local(tmp_path))) + 1
    assert first > 5
    save_steps(local(tmp_path), [first], POLICY, keep_last=1)
    check_survivors(tmp_path, first)


class Meddling(WrappedStore):
    """Does something right before, or right after, a COMMIT record is put or deleted."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.before_put: Callable[[], object] | None = None
        self.after_put: Callable[[], object] | None = None
        self.after_delete: Callable[[], object] | None = None

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        is_commit = key.endswith("COMMIT")
        self._do("before_put", is_commit)
        super().compare_and_put(key, data, expected=expected)
        self._do("after_put", is_commit)

    def delete(self, key: str) -> None:
        super().delete(key)
        self._do("after_delete", key.endswith("COMMIT"))

    def _do(self, when: str, is_commit: bool) -> None:
        action = getattr(self, when)
        if is_commit and action is not None:
            setattr(self, when, None)
            action()


@pytest.mark.parametrize("when", ["before_put", "after_put"])
def test_another_process_deletes_the_base_while_a_difference_to_it_is_committed(when: str) -> None:
    """Before the record is put, the base is gone, and the save fails; after it, the base is found to be needed."""
    inner = MemoryStore()
    store = Meddling(inner)
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, delta=POLICY) as engine:
        engine.save_async(state_at(0), step=0)
        engine.wait()
        setattr(store, when, lambda: retire(inner, records_of(inner)[0]))
        engine.save_async(state_at(1), step=1)
        if when == "before_put":
            with pytest.raises(SaveError, match="difference to step 0, which another process has deleted"):
                engine.wait()
            assert records_of(inner) == {}
        else:
            engine.wait()
            assert bases_of(inner) == {0: [], 1: [0]}
        assert_all_load(inner)
        engine.save_async(state_at(2), step=2)
        engine.wait()
    assert bases_of(inner)[2] == ([] if when == "before_put" else [1, 0])
    assert_all_load(inner)


def test_a_difference_is_committed_while_another_process_deletes_its_base() -> None:
    """It is seen right after the base's record has gone; so that comes back, and no object is touched."""
    inner = MemoryStore()
    save_steps(inner, [0], POLICY)
    base = records_of(inner)[0]
    store = Meddling(inner)
    store.after_delete = lambda: inner.compare_and_put(
        "step-0000000001/COMMIT", CommitRecord(1, 2, "ab" * 16, 10, 20, ((0, base.attempt),)).dump(), expected=None
    )
    retire(store, base)
    assert records_of(inner)[0] == base
    with tidegate.CheckpointEngine(inner) as engine:
        assert_same_bits(engine.load(0), state_at(0))


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_of_a_chain_is_replaced(tmp_path: Path, step: int) -> None:
    """The new attempt is a full one; the old one stays as long as a difference needs it, and then goes."""
    store = local(tmp_path)
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, delta=POLICY) as engine:
        for i in range(3):
            engine.save_async(state_at(i), step=i)
        engine.save_async(state_at(step), step=step, overwrite=True)
        engine.wait()
        assert bases_of(store)[step] == []
        assert_all_load(store, [0, 1, 2])
        assert cli.main(["gc", str(tmp_path), "--min-age-s", "0"]) == 0
        assert_all_load(store, [0, 1, 2])
        assert len(list(tmp_path.rglob("*.tg"))) == (4 if step < 2 else 3)
    save_steps(store, [9], POLICY, keep_last=1)
    remaining = {record.attempt for record in records_of(store).values()}
    assert {path.parent.name for path in tmp_path.rglob("*.tg")} == remaining
    assert_all_load(store)
