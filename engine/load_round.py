"""A load of several ranks: all load one checkpoint, or none does."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tidegate.storage.base import Store

from .commit import CommitRecord
from .council import Council
from .errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    LoadError,
    RankFailedError,
)
from .frame_share import FrameShare
from .json_fields import as_dict, as_str
from .locate import MapLocation
from .parts import PartPaths
from .plan_round import failure_text
from .sharded_load import committed, load_sharded, open_sharded
from .types import JSON

_DAMAGED = "damaged"


@dataclass(slots=True)
class LoadRound:
    """One load.

    Args:
        council: The ranks.
        topic: What they call it.
        timeout_s: How long it may take.
        grace_s: How much longer a rank waits for the coordinator than the coordinator for the ranks.
    """

    council: Council
    topic: str
    timeout_s: float
    grace_s: float

    def run(
        self,
        store: Store,
        step: int | Literal["latest"],
        *,
        map_location: MapLocation,
        into: object | None,
        part: PartPaths,
    ) -> tuple[object, str]:
        """Load. Blocks for all ranks.

        Returns:
            The state, and the attempt that it is.

        Raises:
            CheckpointNotFoundError: There is none.
            LoadError: It failed on some rank, and so on all.
        """
        records: list[CommitRecord] = []
        if self.council.is_coordinator:
            records = [record for record in committed(store) if step in ("latest", record.step)]
        for number in range(1 << 30):
            record = self._choose(f"{self.topic}/{number}", records)
            if record is None:
                raise CheckpointNotFoundError(f"no checkpoint is committed at {store.url} that was asked for: {step}")
            is_last = not records or step != "latest"
            state, failure, is_loaded = self._try(
                f"{self.topic}/{number}",
                store,
                record,
                is_last=is_last,
                map_location=map_location,
                into=into,
                part=part,
            )
            if is_loaded:
                return state, record.attempt
            warnings.warn(
                f"checkpoint of step {record.step} is damaged and was passed over: {failure or 'another rank says so'}",
                CheckpointWarning,
                stacklevel=5,
            )
        return None, ""

    def _try(
        self,
        topic: str,
        store: Store,
        record: CommitRecord,
        *,
        is_last: bool,
        map_location: MapLocation,
        into: object | None,
        part: PartPaths,
    ) -> tuple[object, CheckpointError | None, bool]:
        """Load one checkpoint. Returns the state, what this rank has failed of, and whether all have loaded."""
        state, failure = None, None
        share = FrameShare(self.council, f"{topic}/frames", time.monotonic() + self.timeout_s, self.grace_s)
        try:
            try:
                manifest = open_sharded(store, record)
                state = load_sharded(store, manifest, map_location=map_location, into=into, part=part, share=share)
            except CheckpointError as exc:
                failure = exc
            share.skip()
            return state, failure, self._all_loaded(f"{topic}/loaded", failure, is_last=is_last)
        finally:
            share.close()

    def _choose(self, topic: str, records: list[CommitRecord]) -> CommitRecord | None:
        """Let the coordinator say which checkpoint comes next, when all ranks have come."""
        deadline_s = time.monotonic() + self.timeout_s
        self.council.say(topic)
        if self.council.is_coordinator:
            try:
                self.council.gather(topic, deadline_s)
            except RankFailedError as exc:
                self.council.reply_failure(topic, exc.failures)
            else:
                node: JSON = records.pop().to_json() if records else None
                self.council.reply(topic, dict.fromkeys(range(self.council.num_ranks), node))
        try:
            heard = self.council.hear(topic, deadline_s + self.grace_s)
        except RankFailedError as exc:
            raise LoadError(f"{self.topic}: not all ranks take part: {_causes(exc.failures)}", stage="open") from exc
        return None if heard is None else CommitRecord.from_json(heard)

    def _all_loaded(self, topic: str, failure: CheckpointError | None, *, is_last: bool) -> bool:
        """Tell the others how it went. Returns whether all have loaded; False if another checkpoint is to be tried."""
        deadline_s = time.monotonic() + self.timeout_s
        kind = "" if failure is None else _DAMAGED if isinstance(failure, CorruptCheckpointError) else "failed"
        self.council.say(topic, {"kind": kind, "text": "" if failure is None else failure_text(failure)})
        if self.council.is_coordinator:
            self._preside(topic, deadline_s, is_last=is_last)
        try:
            heard = as_dict(self.council.hear(topic, deadline_s + self.grace_s))
        except RankFailedError as exc:
            if failure is not None:
                raise failure from None
            raise LoadError(f"{self.topic} failed on another rank: {_causes(exc.failures)}", stage="read") from exc
        return heard["is_loaded"] is True

    def _preside(self, topic: str, deadline_s: float, *, is_last: bool) -> None:
        try:
            said = [as_dict(message) for message in self.council.gather(topic, deadline_s)]
        except RankFailedError as exc:
            self.council.reply_failure(topic, exc.failures)
            return
        failures = {rank: as_str(message["text"]) for rank, message in enumerate(said) if message["kind"]}
        is_damaged = bool(failures) and all(message["kind"] in ("", _DAMAGED) for message in said)
        if failures and (is_last or not is_damaged):
            self.council.reply_failure(topic, failures)
        else:
            self.council.reply(topic, {rank: {"is_loaded": not failures} for rank in range(self.council.num_ranks)})


def _causes(failures: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank} {text}" for rank, text in sorted(failures.items())[:8])
