"""Who reads which frame for its host: each once, evenly, in the order of all, and no more than there is room for."""

from __future__ import annotations

import random

import pytest

from tidegate.frame_plan import FrameNeed, FramePart, decide

FRAMES = [("a", i * 4096, 1000 + i) for i in range(40)] + [("b", i * 4096, 2000) for i in range(20)]


def needs_of(seed: int, num_ranks: int, num_hosts: int) -> list[FrameNeed]:
    rng = random.Random(seed)
    picked = [sorted(rng.sample(range(len(FRAMES)), rng.randint(0, len(FRAMES)))) for _ in range(num_ranks)]
    return [
        FrameNeed(f"host {rank % num_hosts}", 1 << 20, tuple(FRAMES[i] for i in rows))
        for rank, rows in enumerate(picked)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_each_frame_is_read_once_a_host(seed: int) -> None:
    needs = needs_of(seed, 6, 2)
    parts = decide(needs)
    for host in (0, 1):
        ranks = [rank for rank in range(6) if rank % 2 == host]
        for frame in FRAMES:
            takers = {rank for rank in ranks if frame in needs[rank].frames}
            readers = [
                (rank, row[1], set(row[2]))
                for rank in ranks
                if (part := parts[rank]) is not None
                for row in part.read
                if needs[rank].frames[row[0]] == frame
            ]
            if len(takers) < 2:
                assert not readers
                continue
            ((reader, number, told),) = readers
            assert told == takers and reader in takers
            for rank in takers:
                index = needs[rank].frames.index(frame)
                assert (index, number, reader) in _part(parts[rank]).take


@pytest.mark.parametrize("seed", range(5))
def test_frames_are_read_in_the_order_in_which_they_are_taken(seed: int) -> None:
    """Else a small window could make two ranks wait for each other."""
    for part in decide(needs_of(seed, 5, 1)):
        if part is not None:
            indices = [row[0] for row in part.read]
            assert indices == sorted(indices)


def test_the_work_is_shared_evenly() -> None:
    parts = [_part(part) for part in decide([FrameNeed("h", 1 << 30, tuple(FRAMES))] * 4)]
    read_bytes = [sum(FRAMES[row[0]][2] for row in part.read) for part in parts]
    assert sum(read_bytes) == sum(frame[2] for frame in FRAMES)
    assert max(read_bytes) - min(read_bytes) <= 2000
    assert len({part.token for part in parts}) == 1


def test_what_finds_no_room_is_not_shared() -> None:
    parts = decide([FrameNeed("h", 2 * 1020, tuple(FRAMES))] * 2)
    for part in parts:
        assert _part(part).window_bytes == 1020
        assert all(FRAMES[index][2] <= 1020 for index, _, _ in _part(part).take)
    assert decide([FrameNeed("h", 0, tuple(FRAMES))] * 2) == [None, None]


def test_ranks_that_share_nothing_have_no_part() -> None:
    alone = FrameNeed("h", 1 << 30, (("c", 0, 10),))
    both = FrameNeed("h", 1 << 30, (("d", 0, 10),))
    nowhere = FrameNeed("", 1 << 30, both.frames)
    parts = decide([alone, both, None, nowhere, both, FrameNeed("other", 1 << 30, both.frames)])
    assert [part is not None for part in parts] == [False, True, False, False, True, False]
    assert _part(parts[1]).peers == (1, 4)


def test_they_travel_as_json() -> None:
    needs = needs_of(1, 4, 1)
    assert [FrameNeed.from_json(need.to_json()) for need in needs] == needs
    for part in decide(needs):
        assert FramePart.from_json(_part(part).to_json()) == part


def _part(part: FramePart | None) -> FramePart:
    assert part is not None
    return part
