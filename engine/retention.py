"""Which checkpoints go after a commit."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.storage.base import Store

from .commit import CommitRecord, read_commits, retire


def to_retire(commits: Sequence[CommitRecord], keep_last: int, keep_every: int | None) -> list[int]:
    """Choose the steps to delete.

    The newest `keep_last` in the order of commits stay, whatever their steps or the clock say; so the checkpoint that
    was committed last is never deleted. So do steps that are multiples of `keep_every`.

    Args:
        commits: All readable commits, oldest first by (sequence, step).
        keep_last: How many of the newest stay; at least 1.
        keep_every: Steps that are multiples of it stay too; None: no others.
    """
    return [
        commit.step
        for commit in commits[: max(0, len(commits) - keep_last)]
        if keep_every is None or commit.step % keep_every
    ]


def apply_retention(store: Store, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Delete the checkpoints that the policy lets go. Blocks. Safe beside other processes doing the same.

    A checkpoint whose COMMIT record is damaged is left alone: it is evidence, and `gc` and people can look at it.

    Returns:
        The steps that were deleted.
    """
    if keep_last is None:
        return []
    commits, _ = read_commits(store)
    steps = to_retire(commits, keep_last, keep_every)
    for commit in commits:
        if commit.step in steps:
            retire(store, commit)
    return steps
