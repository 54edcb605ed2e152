"""The background half of a save of several ranks: each writes its object, the coordinator commits, or nobody does.

    every rank:   agree who writes what ─▶ write and seal its object ─▶ say so ─────────────────────▶ hear the outcome
    coordinator:                                        hear all ─▶ manifest ─▶ decision ─▶ COMMIT ─▶ tell all

The decision is one word that is set once: "commit" by the coordinator before it puts COMMIT, or "abort" by a rank that
has waited too long. So no rank deletes its object while the coordinator commits it, and none commits what is deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.storage.base import Store
from tidegate.storage.errors import StorageError

from .commit import read_commit_bytes, step_folder
from .container import ObjectRecord
from .council import Council, failed
from .errors import RankFailedError, SaveError, StepExistsError
from .job import SaveJob
from .json_fields import as_dict, as_int, as_list, as_str
from .plan_round import failure_text
from .rank_object import rank_object_key, write_rank_object
from .ranks import Ranks, RankSave
from .report import CodecTotals, SaveReport
from .resources import Resources
from .save import (
    check_absent,
    commit_attempt,
    give_up,
    made_by,
    make_report,
    replaced_record,
    unconfirmed,
)
from .sharded_manifest import ShardedManifest, dump_sharded
from .types import JSON

_AGREE_BY_S = 0.25
"""The ranks agree when this one has staged, as messages are Python and would take the GIL from the training thread's
copies; but no later than this, for the others wait."""


def write_sharded(job: SaveJob, save: RankSave, ranks: Ranks, store: Store, resources: Resources) -> SaveReport:
    """Write this rank's part of a save and take part in its commit. Blocks until the outcome is known.

    Raises:
        RankFailedError: Some rank has failed. What this rank has written is deleted, unless the coordinator may have
            committed it without being able to say so.
    """
    return _Writing(job, save, ranks, store, resources).run()


@dataclass(slots=True)
class _Writing:
    job: SaveJob
    save: RankSave
    ranks: Ranks
    store: Store
    resources: Resources
    has_said: bool = False

    @property
    def _topic(self) -> str:
        return f"{self.save.topic}/written"

    @property
    def _council(self) -> Council:
        return self.ranks.council

    def run(self) -> SaveReport:
        self.job.await_start(_AGREE_BY_S)
        self.ranks.agree(self.save)
        try:
            record, totals = self._write()
            self._say(_record_node(record, self.job))
            stored_bytes = self._preside() if self.ranks.is_coordinator else 0
            heard = as_dict(self._council.hear(self._topic, self.save.deadline_s + self.ranks.grace_s()))
        except BaseException:
            self.ranks.forget()
            self._delete_mine()
            raise
        self.job.notes.append(
            f"{self._council.num_ranks} ranks: {as_int(heard['raw_bytes']):,} bytes, "
            f"stored in {as_int(heard['stored_bytes']):,}"
        )
        url = f"{self.store.url}/{step_folder(self.save.step)}"
        return make_report(self.job, self.resources, url, record.num_bytes + stored_bytes, totals)

    def _write(self) -> tuple[ObjectRecord, dict[int, CodecTotals]]:
        """Write the object; a failure is told to the others, and heard back as theirs too."""
        try:
            return write_rank_object(self.job, self.store, self.resources, self.save.attempt, self._council.rank)
        except BaseException as exc:
            text = failure_text(exc)
            if self.ranks.is_coordinator:
                self._fail_all({0: text})
                raise failed(self._topic, {0: text}) from exc
            self._council.say(self._topic, failure=text)
            try:
                self._council.hear(self._topic, self.save.deadline_s + self.ranks.grace_s())
            except RankFailedError as told:
                raise told from exc
            raise

    def _say(self, message: JSON) -> None:
        self.has_said = True
        self._council.say(self._topic, message)

    def _preside(self) -> int:
        """Hear all ranks, and commit. Returns the length of manifest and COMMIT record."""
        save, council = self.save, self._council
        try:
            said = [as_dict(message) for message in council.gather(self._topic, save.deadline_s)]
            manifest = self._manifest(said)
            replaces = self._replaced_bytes()
            if not council.may_commit(self._topic):
                raise SaveError("a rank has given the save up, as no word came in time", stage="commit")
            text = dump_sharded(manifest, self.ranks.rounds.shards_text)
            commit = commit_attempt(self.store, save.step, save.attempt, text, replaces)
        except BaseException as exc:
            failures = exc.failures if isinstance(exc, RankFailedError) else {0: failure_text(exc)}
            if self._fail_all(failures):
                raise unconfirmed(save.step, exc) from exc
            if isinstance(exc, RankFailedError) or not isinstance(exc, Exception):
                raise
            raise failed(self._topic, failures) from exc
        self.job.replaced = replaced_record(replaces, save.step)
        outcome: JSON = {
            "raw_bytes": sum(as_int(message["raw_bytes"]) for message in said),
            "stored_bytes": sum(item.num_bytes for item in manifest.objects) + len(text),
        }
        council.reply(self._topic, dict.fromkeys(range(council.num_ranks), outcome))
        council.clear(self._topic)
        council.clear(f"{save.topic}/plan")
        return len(text) + len(commit.dump())

    def _manifest(self, said: list[dict[str, JSON]]) -> ShardedManifest:
        rounds = self.ranks.rounds
        shards = rounds.shards
        written = [as_int(message["num_items"]) for message in said]
        if shards is None or written != rounds.num_items:
            wrong = [
                rank for rank, pair in enumerate(zip(written, rounds.num_items, strict=True)) if len(set(pair)) > 1
            ]
            raise SaveError(
                f"ranks {wrong} have not written what was planned; this is a bug, report it", stage="commit"
            )
        objects = tuple(_parse_record(message["object"]) for message in said)
        return ShardedManifest(self.save.step, self.save.attempt, made_by(), dict(self.job.metadata), objects, shards)

    def _replaced_bytes(self) -> bytes | None:
        check_absent(self.store, self.save.step, self.save.overwrite)
        return read_commit_bytes(self.store, self.save.step)

    def _fail_all(self, failures: Mapping[int, str]) -> bool:
        """Delete what is there and tell every rank. Returns whether the step is committed after all."""
        is_committed = give_up(self.store, self.save.step, self.save.attempt)
        if is_committed:
            failures = {0: f"has committed the save, but the store has not confirmed it: {failures.get(0, '')}"}
        self._council.reply_failure(self._topic, failures)
        self._council.clear(self._topic)
        return is_committed

    def _delete_mine(self) -> None:
        """Delete this rank's object, unless the coordinator may still commit it."""
        if self.has_said and not self.ranks.is_coordinator and not self._council.may_abort(self._topic):
            return
        with contextlib.suppress(StorageError, StepExistsError):
            text = read_commit_bytes(self.store, self.save.step)
            if text is None or self.save.attempt.encode() not in text:
                self.store.delete(rank_object_key(self.save.step, self.save.attempt, self._council.rank))


def _record_node(record: ObjectRecord, job: SaveJob) -> JSON:
    nodes = job.table.skeleton
    return {
        "object": [record.key, record.num_bytes, f"{record.tail_digest:016x}"],
        "num_items": len(nodes) if isinstance(nodes, dict) else 0,
        "raw_bytes": job.plan.raw_bytes,
    }


def _parse_record(node: JSON) -> ObjectRecord:
    key, num_bytes, tail_digest = as_list(node)
    return ObjectRecord(as_str(key), as_int(num_bytes), int(as_str(tail_digest), 16))
