"""Boxes of stored tensors go where they were asked for, however frames cut them."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.bits import physical_bytes
from tests.kit.states import odd_values
from tidegate.boxes import Boxes, BoxRequest, intersection, range_boxes
from tidegate.chunk_sizes import ChunkSizes
from tidegate.plan import Chunk, plan_save
from tidegate.state import describe

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(SHAPES, st.data())
def test_boxes_of_a_range_are_the_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(first, numel))
    whole = torch.arange(numel).view(shape)
    found: list[int] = []
    boxes = list(range_boxes(shape, first, end))
    for at, (starts, sizes) in boxes:
        part = whole[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))].reshape(-1)
        assert part[0] == at
        found += part.tolist()
    assert found == list(range(first, end))
    assert len(boxes) <= 2 * len(shape) + 1


def test_intersection() -> None:
    assert intersection(((0, 0), (4, 4)), ((2, 3), (4, 4))) == ((2, 3), (2, 1))
    assert intersection(((0,), (2,)), ((2,), (2,))) is None
    assert intersection(((), ()), ((), ())) == ((), ())


def chunks_of(table: object, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Small chunks, and so many pieces."""
    chunks: list[Chunk] = []
    for extent, num_bytes in enumerate(table.extent_bytes):
        for offset in range(0, num_bytes, chunk_bytes):
            size = min(chunk_bytes, num_bytes - offset)
            chunks.append(Chunk(len(chunks), table.extent_words[extent], extent, extent + 1, offset, size))
    return tuple(chunks)


def content_of(table: object, chunk: Chunk) -> torch.Tensor:
    parts = []
    for extent in range(chunk.first_extent, chunk.end_extent):
        part = torch.empty(table.extent_bytes[extent], dtype=torch.uint8)
        table.sources[extent].copy_to(part)
        parts.append(part)
    return torch.cat(parts)[chunk.offset : chunk.offset + chunk.num_bytes]


TENSORS = {
    "plain": torch.randn(9, 7, 5),
    "odd": odd_values(torch.bfloat16, 9 * 7 * 5).view(9, 7, 5),
    "turned": torch.randn(5, 7, 9).permute(2, 1, 0),
    "gappy": torch.randn(18, 14, 5)[::2, ::2],
    "complex": torch.randn(9, 7, 5, dtype=torch.complex128),
    "conjugate": torch.randn(9, 7, 5, dtype=torch.complex64).conj(),
    "flags": torch.rand(9, 7, 5) > 0.5,
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("chunk_bytes", [16, 48, 1 << 20])
def test_any_box_of_any_tensor(name: str, chunk_bytes: int) -> None:
    tensor = TENSORS[name]
    table = describe([torch.zeros(3), tensor])
    boxes = [((0, 0, 0), (9, 7, 5)), ((2, 3, 1), (4, 2, 3)), ((8, 0, 0), (1, 7, 5)), ((1, 6, 4), (5, 1, 1))]
    for starts, sizes in boxes:
        goal = torch.zeros(sizes[::-1], dtype=tensor.dtype).permute(2, 1, 0)
        places = Boxes(table, [BoxRequest(1, (starts, sizes), goal)])
        for chunk in chunks_of(table, chunk_bytes):
            direct = places.direct(chunk)
            if direct is not None:
                direct.copy_(content_of(table, chunk))
            else:
                places.place(chunk, content_of(table, chunk))
        places.finish()
        expected = tensor[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
        assert physical_bytes(goal.resolve_conj()) == physical_bytes(expected.resolve_conj()), (starts, sizes)


def test_small_tensors_that_share_a_chunk() -> None:
    tensors = [torch.full((3, i + 1), float(i)) for i in range(6)]
    table = describe(tensors)
    sizes = ChunkSizes(1 << 20, 1 << 20)
    plan = plan_save(table.extent_bytes, table.extent_words, ["cpu"] * 6, table.extent_roles, sizes)
    goals = [torch.zeros(2, i + 1) for i in range(6)]
    places = Boxes(table, [BoxRequest(i, ((1, 0), (2, i + 1)), goal) for i, goal in enumerate(goals) if i % 2])
    for chunk in plan.chunks:
        places.place(chunk, content_of(table, chunk))
    assert [goal.unique().tolist() for goal in goals] == [[0.0] if i % 2 == 0 else [float(i)] for i in range(6)]


def test_values_are_converted_to_another_dtype() -> None:
    table = describe([torch.arange(6.0)])
    goal = torch.zeros(2, dtype=torch.int64)
    places = Boxes(table, [BoxRequest(0, ((3,), (2,)), goal)])
    for chunk in chunks_of(table, 8):
        places.place(chunk, content_of(table, chunk))
    assert goal.tolist() == [3, 4]


class _Item:
    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk


def test_only_frames_that_meet_a_box_are_needed() -> None:
    table = describe([torch.zeros(100, 8)])
    chunks = chunks_of(table, 320)  # ten rows each
    for first, num in product((0, 25, 99), (1, 11)):
        num = min(num, 100 - first)
        places = Boxes(table, [BoxRequest(0, ((first, 0), (num, 8)), torch.zeros(num, 8))])
        needed = {item.chunk.index for item in places.needed([_Item(chunk) for chunk in chunks])}
        assert needed == set(range(first // 10, (first + num - 1) // 10 + 1))
