"""Decide which rank of a host reads which stored frame for the others there. Pure data."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .json_fields import as_int, as_ints, as_list, as_str
from .types import JSON

WINDOW_BYTES = 512 << 20
"""The most that one rank keeps in the host's shared memory for others."""

Frame = tuple[str, int, int]
"""Key of the object, where the frame begins, and how long it is."""


@dataclass(frozen=True, slots=True)
class FrameNeed:
    """What a rank tells of itself.

    Attributes:
        host: What it shares memory with, see `meeting.host_name`; "" if it shares with nobody.
        room_bytes: How much of that memory may be used.
        frames: What it reads, in the order in which it does; ranks that read the same have the same order.
    """

    host: str
    room_bytes: int
    frames: tuple[Frame, ...]

    def to_json(self) -> JSON:
        """Write it for the coordinator."""
        keys = list(dict.fromkeys(key for key, _, _ in self.frames))
        number = {key: i for i, key in enumerate(keys)}
        rows: list[JSON] = [[number[key], offset, num_bytes] for key, offset, num_bytes in self.frames]
        return [self.host, self.room_bytes, list(keys), rows]

    @classmethod
    def from_json(cls, node: JSON) -> FrameNeed:
        """Read what a rank has sent."""
        host, room_bytes, keys, rows = as_list(node)
        names = [as_str(key) for key in as_list(keys)]
        triples = [as_ints(row) for row in as_list(rows)]
        frames = tuple((names[key], offset, num_bytes) for key, offset, num_bytes in triples)
        return cls(as_str(host), as_int(room_bytes), frames)


@dataclass(frozen=True, slots=True)
class FramePart:
    """What one rank reads for the others of its host, and has from them.

    Attributes:
        token: Names this load on this host; nobody else has it.
        rank: The rank.
        peers: The ranks of the host that share something, this one among them.
        window_bytes: The most that it may keep in shared memory at one time.
        read: For each frame that it reads, in its own order: its index in the rank's list, its number, and the ranks
            that take it, this one among them.
        take: For each frame that it takes: its index, its number, and the rank that reads it.
    """

    token: str
    rank: int
    peers: tuple[int, ...]
    window_bytes: int
    read: tuple[tuple[int, int, tuple[int, ...]], ...]
    take: tuple[tuple[int, int, int], ...]

    def to_json(self) -> JSON:
        """Write it for the rank."""
        read: list[JSON] = [[index, number, list(takers)] for index, number, takers in self.read]
        take: list[JSON] = [list(row) for row in self.take]
        return [self.token, self.rank, list(self.peers), self.window_bytes, read, take]

    @classmethod
    def from_json(cls, node: JSON) -> FramePart:
        """Read what the coordinator has sent."""
        token, rank, peers, window_bytes, read, take = as_list(node)
        readings = [as_list(row) for row in as_list(read)]
        takings = [as_ints(row) for row in as_list(take)]
        return cls(
            as_str(token),
            as_int(rank),
            as_ints(peers),
            as_int(window_bytes),
            tuple((as_int(index), as_int(number), as_ints(takers)) for index, number, takers in readings),
            tuple((index, number, reader) for index, number, reader in takings),
        )


def decide(needs: Sequence[FrameNeed | None]) -> list[FramePart | None]:
    """Of the frames that several ranks of a host need, give each to one of them, by turns.

    Args:
        needs: What each rank has said; None: nothing.

    Returns:
        The part of each rank; None: it shares nothing.
    """
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, need in enumerate(needs):
        if need is not None and need.host and need.frames:
            ranks_of[need.host].append(rank)
    parts: list[FramePart | None] = [None] * len(needs)
    for ranks in ranks_of.values():
        if len(ranks) > 1:
            for part in _decide_host({rank: need for rank in ranks if (need := needs[rank]) is not None}):
                parts[part.rank] = part
    return parts


def _decide_host(needs: dict[int, FrameNeed]) -> list[FramePart]:
    window_bytes = min(WINDOW_BYTES, min(need.room_bytes for need in needs.values()) // len(needs))
    takers: dict[Frame, list[tuple[int, int]]] = defaultdict(list)
    for rank, need in needs.items():
        for index, frame in enumerate(need.frames):
            takers[frame].append((rank, index))
    read: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {rank: [] for rank in needs}
    take: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in needs}
    load_bytes = dict.fromkeys(needs, 0)
    shared = [frame for frame, rows in takers.items() if len(rows) > 1 and frame[2] <= window_bytes]
    for number, frame in enumerate(shared):
        index_of = dict(takers[frame])
        reader = min(index_of, key=lambda rank: load_bytes[rank])
        load_bytes[reader] += frame[2]
        read[reader].append((index_of[reader], number, tuple(index_of)))
        for rank, index in index_of.items():
            take[rank].append((index, number, reader))
    token = uuid.uuid4().hex
    peers = tuple(rank for rank in needs if take[rank])
    return [FramePart(token, rank, peers, window_bytes, tuple(sorted(read[rank])), tuple(take[rank])) for rank in peers]
