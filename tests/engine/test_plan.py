"""Chunks cover every extent once, never mix words, roles or devices, and never pass their limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.chunk_sizes import ChunkSizes
from tidegate.codec.words import WordType
from tidegate.plan import plan_save

CHUNK = 1 << 16
SIZES = ChunkSizes(CHUNK, CHUNK)

extents = st.lists(
    st.tuples(
        st.integers(0, 3 * CHUNK),
        st.sampled_from([WordType.F32, WordType.BF16]),
        st.sampled_from(["cpu", "cuda:0"]),
        st.sampled_from(["", "exp_avg"]),
    ),
    max_size=40,
)


@given(extents)
def test_chunks_cover_every_byte_once(items: list[tuple[int, WordType, str, str]]) -> None:
    items.sort(key=lambda item: (item[2], item[1], item[3]))
    sizes = [item[0] for item in items]
    words, devices, roles = ([item[column] for item in items] for column in (1, 2, 3))
    plan = plan_save(sizes, words, devices, roles, SIZES)
    covered: list[tuple[int, int, int]] = []
    for chunk in plan.chunks:
        assert 0 < chunk.num_bytes <= CHUNK
        span = items[chunk.first_extent : chunk.end_extent]
        assert {item[1] for item in span} == {chunk.word}
        assert len({item[2:] for item in span}) == 1
        if chunk.is_piece:
            covered.append((chunk.first_extent, chunk.offset, chunk.num_bytes))
        else:
            assert chunk.offset == 0
            assert chunk.num_bytes == sum(item[0] for item in span)
            covered += [(i, 0, sizes[i]) for i in range(chunk.first_extent, chunk.end_extent) if sizes[i]]
    expected = [0] * len(sizes)
    for extent, offset, num_bytes in covered:
        assert offset == expected[extent]
        expected[extent] += num_bytes
    assert expected == sizes
    assert [chunk.index for chunk in plan.chunks] == list(range(len(plan.chunks)))
    assert plan.raw_bytes == sum(sizes)


def test_small_extents_share_chunks() -> None:
    plan = plan_save([100] * 1000, [WordType.F32] * 1000, ["cpu"] * 1000, [""] * 1000, SIZES)
    assert len(plan.chunks) == 2


def test_each_role_has_chunks_of_its_own() -> None:
    roles = [""] * 3 + ["exp_avg"] * 2 + ["exp_avg_sq"] * 4
    plan = plan_save([100] * 9, [WordType.F32] * 9, ["cpu"] * 9, roles, SIZES)
    assert [(chunk.first_extent, chunk.end_extent) for chunk in plan.chunks] == [(0, 3), (3, 5), (5, 9)]


def test_an_empty_state_has_no_chunks() -> None:
    assert plan_save([], [], [], [], SIZES).chunks == ()
    assert plan_save([0, 0], [WordType.F32] * 2, ["cpu"] * 2, [""] * 2, SIZES).chunks == ()
