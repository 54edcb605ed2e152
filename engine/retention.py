"""Which checkpoints go after a commit, and how: safely beside other processes, and never what a living one needs."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tidegate.storage.base import Store
from tidegate.storage.errors import ObjectExistsError, StorageError

from .commit import (
    CommitRecord,
    commit_key,
    is_committed,
    read_commit_bytes,
    read_commits,
    read_manifest,
    step_folder,
)
from .errors import CheckpointError, ConfigError, CorruptCheckpointError
from .sharded_manifest import FEATURE as SHARDED
from .types import JSON


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the checkpoints with the best values of a metric.

    Attributes:
        metric: Its name in the `metadata` of the saves; those without it, or with no finite number, are never best.
        num: How many stay.
        mode: Whether the least or the greatest are best.
    """

    metric: str
    num: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if type(self.num) is not int or self.num < 1 or self.mode not in ("min", "max"):
            raise ConfigError(f"keep_best is {self!r}; give a number of at least 1, and the mode 'min' or 'max'")


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """What stays after a commit. The checkpoint that was committed last always does, and so does what one needs.

    Attributes:
        last: How many of the newest stay, in the order of commits; None: all.
        every: Steps that are multiples of it stay too.
        best: Those with the best metric stay too.
        parts: Of checkpoints that are not among the newest `full_last`, only these parts stay: keys of the state, such
            as "model".
        full_last: How many of the newest stay whole; None: all.
    """

    last: int | None = None
    every: int | None = None
    best: KeepBest | None = None
    parts: tuple[str, ...] = ()
    full_last: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "full_last"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"keep_{name} is {value!r}; give a whole number of at least 1")
        if not isinstance(self.best, KeepBest | None):
            raise ConfigError(f"keep_best is {self.best!r}; give a KeepBest, such as KeepBest('loss')")
        for name in ("every", "best"):
            if getattr(self, name) is not None and self.last is None:
                raise ConfigError(f"keep_{name} says which checkpoints outlive keep_last; give keep_last too")
        if bool(self.parts) != (self.full_last is not None) or not all(isinstance(part, str) for part in self.parts):
            raise ConfigError("keep_parts says what stays of checkpoints older than the last keep_full_last; give both")


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What a policy does to the checkpoints of a store.

    Attributes:
        delete: These go.
        reduce: Of these only the policy's parts stay.
        held: These would go or be reduced, but others are differences to them.
    """

    delete: tuple[CommitRecord, ...] = ()
    reduce: tuple[CommitRecord, ...] = ()
    held: tuple[CommitRecord, ...] = ()


def to_retire(
    commits: Sequence[CommitRecord], keep_last: int, keep_every: int | None, best: Collection[int] = ()
) -> list[int]:
    """Choose the steps to delete.

    The newest `keep_last` in the order of commits stay, whatever their steps or the clock say; so the checkpoint that
    was committed last is never deleted. So do steps that are multiples of `keep_every`, and what those that stay are
    differences to.

    Args:
        commits: All readable commits, oldest first by (sequence, step).
        keep_last: How many of the newest stay; at least 1.
        keep_every: Steps that are multiples of it stay too; None: no others.
        best: Steps that stay too.
    """
    going = [
        commit
        for commit in commits[: max(0, len(commits) - keep_last)]
        if (keep_every is None or commit.step % keep_every) and commit.step not in best
    ]
    steps = {commit.step for commit in going}
    held = held_attempts(commit for commit in commits if commit.step not in steps)
    return [commit.step for commit in going if (commit.step, commit.attempt) not in held]


def held_attempts(commits: Iterable[CommitRecord]) -> set[tuple[int, str]]:
    """Return step and attempt of all that these checkpoints are differences to."""
    return {base for commit in commits for base in commit.bases}


@dataclass(slots=True)
class Retention:
    """Carries a policy out; remembers metrics. Used by one thread at a time."""

    policy: KeepPolicy
    _metrics: dict[str, float | None] = field(default_factory=dict)
    _reducible: dict[str, bool] = field(default_factory=dict)

    def plan(self, store: Store) -> RetentionPlan:
        """Say what would go. Blocks; changes nothing.

        A checkpoint whose COMMIT record is damaged is left alone: it is evidence, and `gc` and people can look at it.
        """
        policy = self.policy
        if policy.last is None and policy.full_last is None:
            return RetentionPlan()
        commits, _ = read_commits(store)
        best = self._best(store, commits)
        last = policy.last or len(commits)
        asked = set(_ignoring_bases(commits, last, policy.every, best))
        gone = set(to_retire(commits, last, policy.every, best))
        held = held_attempts(commit for commit in commits if commit.step not in gone)
        stay = [commit for commit in commits if commit.step not in asked]
        old = stay[: max(0, len(stay) - policy.full_last)] if policy.full_last is not None else []
        large = [commit for commit in old if self._can_be_reduced(store, commit)]
        return RetentionPlan(
            delete=tuple(commit for commit in commits if commit.step in gone),
            reduce=tuple(commit for commit in large if (commit.step, commit.attempt) not in held),
            held=tuple(
                commit
                for commit in commits
                if (commit.step in asked - gone or commit in large) and (commit.step, commit.attempt) in held
            ),
        )

    def _best(self, store: Store, commits: Sequence[CommitRecord]) -> set[int]:
        best = self.policy.best
        if best is None:
            return set()
        values = {commit.step: self._metric(store, commit, best.metric) for commit in commits}
        known = sorted((value, step) for step, value in values.items() if value is not None)
        return {step for _, step in (known[: best.num] if best.mode == "min" else known[-best.num :])}

    def _metric(self, store: Store, commit: CommitRecord, name: str) -> float | None:
        if commit.attempt not in self._metrics:
            metadata = _line(store, commit, "metadata")
            value = metadata.get(name) if isinstance(metadata, dict) else None
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            self._metrics[commit.attempt] = float(value) if is_number else None  # type: ignore[arg-type]
        return self._metrics[commit.attempt]

    def _can_be_reduced(self, store: Store, commit: CommitRecord) -> bool:
        """Whether a checkpoint is whole still. What several ranks have written stays whole."""
        if commit.attempt not in self._reducible:
            features = _line(store, commit, "features")
            has_ranks = isinstance(features, list) and SHARDED in features
            self._reducible[commit.attempt] = not has_ranks and not _line(store, commit, "parts")
        return self._reducible[commit.attempt]


def apply_retention(store: Store, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Delete the checkpoints that a simple policy lets go. Blocks. Safe beside other processes doing the same.

    Returns:
        The steps that were deleted.
    """
    plan = Retention(KeepPolicy(last=keep_last, every=keep_every if keep_last else None)).plan(store)
    retire(store, *plan.delete)
    return [commit.step for commit in plan.delete]


def retire(store: Store, *records: CommitRecord) -> None:
    """Delete checkpoints: first their COMMIT records, so that no reader finds half of one. Blocks.

    Nothing happens to one whose step has been committed anew, or is gone. Other attempts at the step stay: another
    process may be about to commit one; those of killed processes are for `gc`. Where another process has committed a
    difference to one meanwhile, its COMMIT record is put back (commit.check_bases is the other half of this).
    """
    gone = []
    for record in sorted(records, key=lambda record: -record.sequence):  # differences before their bases
        if read_commit_bytes(store, record.step) == record.dump():
            store.delete(commit_key(record.step))
            gone.append(record)
    if not gone:
        return
    commits, _ = read_commits(store)
    held = held_attempts(commits)
    for record in gone:
        if (record.step, record.attempt) in held:
            _put_back(store, record)
        else:
            delete_attempt(store, record.step, record.attempt)
    _delete_orphans(store, gone, commits)


def drop_replaced(store: Store, record: CommitRecord) -> None:
    """Delete the objects of an attempt whose COMMIT record has been replaced, unless another needs them. Blocks."""
    commits, _ = read_commits(store)
    if (record.step, record.attempt) not in held_attempts(commits):
        delete_attempt(store, record.step, record.attempt)
    _delete_orphans(store, [record], commits)


def delete_attempt(store: Store, step: int, attempt: str) -> None:
    """Delete the objects of an attempt. Blocks."""
    for stat in list(store.list(f"{step_folder(step)}/{attempt}/")):
        store.delete(stat.key)


def _delete_orphans(store: Store, gone: Sequence[CommitRecord], commits: Sequence[CommitRecord]) -> None:
    """Delete replaced attempts that only stayed because what has gone was a difference to them."""
    held = held_attempts(commits)
    for step, attempt in held_attempts(gone) - held:
        if all((commit.step, commit.attempt) != (step, attempt) for commit in commits) and not _may_be_committed(
            store, step, attempt
        ):
            delete_attempt(store, step, attempt)


def _may_be_committed(store: Store, step: int, attempt: str) -> bool:
    try:
        return is_committed(store, step, attempt)
    except CorruptCheckpointError:
        return True  # what a damaged record names is unknown


def _put_back(store: Store, record: CommitRecord) -> None:
    try:
        store.compare_and_put(commit_key(record.step), record.dump(), expected=None)
    except ObjectExistsError:
        return  # the step has been committed anew; the difference holds the objects


def _ignoring_bases(
    commits: Sequence[CommitRecord], keep_last: int, keep_every: int | None, best: Collection[int]
) -> list[int]:
    return to_retire([replace(commit, bases=()) for commit in commits], keep_last, keep_every, best)


def _line(store: Store, commit: CommitRecord, name: str) -> JSON:
    """Read one key of a manifest, which has a line for each; None where it is not there or cannot be read."""
    try:
        text = read_manifest(store, commit)
    except (CheckpointError, StorageError):
        return None
    start = f'"{name}": '.encode()
    line = next((line for line in text.split(b"\n") if line.startswith(start)), None)
    try:
        found: JSON = json.loads(text).get(name) if line is None else json.loads(line[len(start) :].rstrip(b","))
    except (ValueError, AttributeError):
        return None
    return found
