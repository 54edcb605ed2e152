"""How the ranks of a load settle which of them reads what for its host: over their council."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .council import Council
from .frame_plan import Frame, FrameNeed, FramePart, decide
from .meeting import free_bytes, host_name
from .open_objects import FrameSource
from .shared_frames import SharedFrames

PATIENCE_S = 30.0
"""How long a rank waits for a frame that another reads, before it reads it itself."""


class Sharing(Protocol):
    """What stands between a load and the store, where ranks share what they read."""

    def around(self, source: FrameSource, frames: Sequence[Frame]) -> FrameSource:
        """Return what the frames are read from, which is asked for them in this order."""
        ...


def need_of(frames: Sequence[Frame]) -> FrameNeed:
    """Say what this rank needs, and where it is."""
    host = host_name()
    return FrameNeed(host, free_bytes() // 2 if host else 0, tuple(frames) if host else ())


class FrameShare:
    """What the ranks of one load share.

    Args:
        council: The ranks.
        topic: What they call it.
        deadline_s: By when all must have said what they need, by `time.monotonic`.
        grace_s: How much longer a rank waits for the coordinator than the coordinator for the ranks.
    """

    def __init__(self, council: Council, topic: str, deadline_s: float, grace_s: float) -> None:
        self._council = council
        self._topic = topic
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        self._is_settled = False
        self._shared: SharedFrames | None = None

    def around(self, source: FrameSource, frames: Sequence[Frame]) -> FrameSource:
        """Settle who reads what. Blocks for all ranks.

        Returns:
            A source that has the shared frames from the host's memory and all others from `source`.
        """
        part = self._settle(need_of(frames))
        if part is None:
            return source
        try:
            self._shared = SharedFrames(source, frames, part, PATIENCE_S)
        except OSError:
            return source
        return self._shared

    def skip(self) -> None:
        """Take part without needing anything, if this rank has failed before it knew what it needs."""
        if not self._is_settled:
            self._settle(FrameNeed("", 0, ()))

    def close(self) -> None:
        """Free the shared memory. Not before all ranks have loaded."""
        if self._shared is not None:
            self._shared.close()

    def _settle(self, need: FrameNeed) -> FramePart | None:
        self._is_settled = True
        self._council.say(self._topic, need.to_json())
        if self._council.is_coordinator:
            needs = [FrameNeed.from_json(node) for node in self._council.gather(self._topic, self._deadline_s)]
            parts = [None if part is None else part.to_json() for part in decide(needs)]
            self._council.reply(self._topic, dict(enumerate(parts)))
        heard = self._council.hear(self._topic, self._deadline_s + self._grace_s)
        return None if heard is None else FramePart.from_json(heard)
