"""The round in which ranks agree who writes what, on both sides of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .collector import collector_at_rest
from .council import Council, failed
from .errors import RankFailedError
from .json_fields import as_dict, as_str
from .local_part import LocalPart
from .save import new_attempt
from .shard_map import ShardMap
from .shard_plan import RankNames, RankPart, Share, share_out
from .sharded_manifest import dump_shards
from .types import JSON


class PlanRound:
    """What the ranks have said, and on the coordinator what came of it; the same answer as long as they say the same.

    Attributes:
        shards: On the coordinator: who holds what.
        shards_text: On the coordinator: the same, as the manifest has it.
        num_items: On the coordinator: how many tensors and values each rank writes.
    """

    def __init__(self, council: Council) -> None:
        self.shards: ShardMap | None = None
        self.shards_text = b""
        self.num_items: list[int] = []
        self._council = council
        self._names: dict[str, RankNames] = {}
        self._parts: list[RankPart] = []
        self._digests: list[str] = []
        self._shares: list[Share] = []

    def run(
        self,
        topic: str,
        step: int,
        lineage: str,
        local: LocalPart,
        staged: Share | None,
        deadline_s: float,
        hear_deadline_s: float,
    ) -> tuple[Share, str]:
        """Agree. Blocks.

        Args:
            topic: What the ranks call this.
            step: The step that this rank saves.
            lineage: The attempt of the checkpoint that this rank has resumed from; "" if it started fresh.
            local: What it has.
            staged: What it has staged already, so that it cannot write more; None: nothing yet.
            deadline_s: By when the coordinator must have heard from all.
            hear_deadline_s: By when this rank must have heard from the coordinator.

        Returns:
            What this rank writes, and under which attempt.

        Raises:
            RankFailedError: They do not agree.
        """
        council = self._council
        part = None if staged is not None else local.part.to_json()
        council.say(topic, {"step": step, "lineage": lineage, "digest": local.part.digest(), "part": part})
        if council.is_coordinator:
            self._preside(topic, local, deadline_s)
        reply = as_dict(council.hear(topic, hear_deadline_s))
        if reply.get("ask"):
            council.say(f"{topic}/names", local.names.to_json())
            reply = as_dict(council.hear(topic, hear_deadline_s))
        share = reply["share"]
        return Share.from_json(share) if share is not None or staged is None else staged, as_str(reply["attempt"])

    def fail(self, topic: str, failure: BaseException, deadline_s: float) -> None:
        """Say that this rank has failed. The coordinator tells the others at once."""
        text = failure_text(failure)
        if self._council.is_coordinator:
            self._council.reply_failure(topic, {0: text})
        else:
            self._council.say(topic, failure=text)

    def _preside(self, topic: str, local: LocalPart, deadline_s: float) -> None:
        try:
            replies = self._decide(topic, local, deadline_s)
        except BaseException as exc:
            failures = exc.failures if isinstance(exc, RankFailedError) else {0: failure_text(exc)}
            self._council.reply_failure(topic, failures)
            self._council.clear(topic)
            self._parts, self._digests = [], []
            if isinstance(exc, RankFailedError) or not isinstance(exc, Exception):
                raise
            raise failed(topic, failures) from exc
        self._council.reply(topic, replies)

    def _decide(self, topic: str, local: LocalPart, deadline_s: float) -> dict[int, JSON]:
        said = [as_dict(message) for message in self._council.gather(topic, deadline_s)]
        _refuse_strangers(topic, [(message["step"], message["lineage"]) for message in said])
        are_staged = [message["part"] is None for message in said]
        digests = [as_str(message["digest"]) for message in said]
        known = dict(enumerate(self._digests))
        if any(is_staged and known.get(rank) != digests[rank] for rank, is_staged in enumerate(are_staged)):
            self._refuse_change(topic, are_staged)
        with collector_at_rest():
            parts = [
                self._parts[rank] if known.get(rank) == digests[rank] else RankPart.from_json(message["part"])
                for rank, message in enumerate(said)
            ]
        self._learn_names(topic, local, parts, deadline_s)
        before = self._shares if self._parts else []
        if digests != self._digests:
            with collector_at_rest():
                self._share_out(parts, digests)
        attempt = new_attempt()
        replies: dict[int, JSON] = {}
        for rank, (is_staged, share) in enumerate(zip(are_staged, self._shares, strict=True)):
            if is_staged and before[rank] != share:
                self._refuse_change(topic, are_staged)
            replies[rank] = {"attempt": attempt, "share": None if is_staged else share.to_json()}
        return replies

    def _share_out(self, parts: list[RankPart], digests: list[str]) -> None:
        """Decide anew who writes what."""
        self.shards, self._shares, self.num_items = share_out(parts, self._names)
        self.shards_text = dump_shards(self.shards)
        self._parts, self._digests = parts, digests
        used = {part.names for part in parts}
        self._names = {digest: names for digest, names in self._names.items() if digest in used}

    def _learn_names(self, topic: str, local: LocalPart, parts: Sequence[RankPart], deadline_s: float) -> None:
        self._names.setdefault(local.part.names, local.names)
        first = {part.names: rank for rank, part in reversed(list(enumerate(parts)))}
        asked = sorted(rank for digest, rank in first.items() if digest not in self._names)
        self._council.reply(topic, {rank: {"ask": True} for rank in asked})
        for rank, names in zip(asked, self._council.gather(f"{topic}/names", deadline_s, asked), strict=True):
            self._names[parts[rank].names] = RankNames.from_json(names)

    @staticmethod
    def _refuse_change(topic: str, are_staged: Sequence[bool]) -> None:
        changed = [rank for rank, is_staged in enumerate(are_staged) if not is_staged]
        raise RankFailedError(
            f"{topic}: the state has another structure on ranks {changed} and the old one elsewhere, so who writes "
            "what changes; the others have staged their old share already. Nothing was committed. Save again",
            stage="plan",
            failures=dict.fromkeys(changed, "has a state of another structure; save again"),
        )


def _refuse_strangers(topic: str, told: Sequence[tuple[JSON, JSON]]) -> None:
    """Refuse ranks that save another step, or go on from another checkpoint, than most; and those that started fresh
    while others have resumed."""
    step = Counter(step for step, _ in told).most_common(1)[0][0]
    lineage = max(Counter(lineage for _, lineage in told).items(), key=lambda item: (item[0] != "", item[1]))[0]
    failures = {}
    for rank, (its_step, its_lineage) in enumerate(told):
        if its_step != step:
            failures[rank] = f"saves step {its_step}, the others step {step}"
        elif its_lineage != lineage:
            failures[rank] = (
                f"{_origin(its_lineage)}, and the others {_origin(lineage)}; load the same checkpoint on all ranks, or "
                "on none"
            )
    if failures:
        text = "; ".join(f"rank {rank} {failure}" for rank, failure in sorted(failures.items())[:8])
        raise RankFailedError(f"{topic}: refused, nothing was committed: {text}", stage="plan", failures=failures)


def _origin(lineage: JSON) -> str:
    return f"resumed from {lineage}" if lineage else "started fresh"


def failure_text(failure: BaseException) -> str:
    """Say what a rank has failed of, for the others."""
    return f"raised {type(failure).__name__}: {failure}"
