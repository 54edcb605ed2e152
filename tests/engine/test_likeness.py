"""What a likeness must see, in whichever of its blocks: each shortcut has a change here that it could miss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine.test_describer import assert_same_tables
from tidegate import likeness
from tidegate.likeness import Likeness
from tidegate.measure import measure
from tidegate.sources import bytes_at
from tidegate.state import Describer, describe

NUM_TENSORS = 3 * likeness._BLOCK_TENSORS + 5
PLACES = [0, likeness._BLOCK_TENSORS - 1, likeness._BLOCK_TENSORS, NUM_TENSORS - 1]


def many() -> list[torch.Tensor]:
    """Of one kind; each of a storage of its own."""
    return [torch.full((4, 4), float(i)) for i in range(NUM_TENSORS)]


def window(x: torch.Tensor, num_bytes: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor at the address of another, in a storage of its own length."""
    storage = bytes_at(x.data_ptr(), num_bytes, x).untyped_storage()
    return torch.empty(0).set_(storage, 0, shape, torch.empty(shape).stride())


def known(x: torch.Tensor) -> tuple[object, ...]:
    """What decides whether a tensor is as it was."""
    kind = (type(x), x.dtype, x.shape, x.stride(), x.requires_grad)
    return (*kind, x.data_ptr(), x.storage_offset(), x.untyped_storage().nbytes())


Change = Callable[[torch.Tensor], torch.Tensor]


def data_of_another(x: torch.Tensor) -> torch.Tensor:
    x.data = torch.zeros(4, 4)
    return x


def data_transposed(x: torch.Tensor) -> torch.Tensor:
    x.data = x.data.t()
    return x


def data_of_other_dtype(x: torch.Tensor) -> torch.Tensor:
    x.data = x.data.view(torch.int32)
    return x


def data_in_a_longer_storage(x: torch.Tensor) -> torch.Tensor:
    x.data = torch.zeros(20)[:16].view(4, 4)
    return x


def storage_grown(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(100)
    return x


def storage_freed_and_back(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(64)
    return x.fill_(1.0)


def set_to_another(x: torch.Tensor) -> torch.Tensor:
    return x.set_(torch.zeros(4, 4))


def set_to_an_offset(x: torch.Tensor) -> torch.Tensor:
    return x.set_(torch.zeros(20).untyped_storage(), 4, (4, 4), (4, 1))


def set_to_other_strides(x: torch.Tensor) -> torch.Tensor:
    return x.set_(x.untyped_storage(), 0, (4, 4), (1, 4))


def resized_and_back(x: torch.Tensor) -> torch.Tensor:
    return x.resize_(8, 8).resize_(4, 4)


def same_address_other_shape(x: torch.Tensor) -> torch.Tensor:
    return window(x, 64, (2, 4))


def same_address_other_storage(x: torch.Tensor) -> torch.Tensor:
    return window(x, 64, (4, 4))


CHANGES: list[Change] = [
    data_of_another, data_transposed, data_of_other_dtype, data_in_a_longer_storage, storage_grown,
    storage_freed_and_back, set_to_another, set_to_an_offset, set_to_other_strides, resized_and_back,
    same_address_other_shape, same_address_other_storage,
    torch.Tensor.requires_grad_, torch.nn.Parameter, torch.Tensor.clone,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_among_many_is_seen(change: Change, place: int) -> None:
    describer, state = Describer(), many()
    before = describer.describe(state)
    assert describer.describe(state).layout_id == before.layout_id
    was = known(state[place])
    state[place] = change(state[place])
    now = known(state[place])
    table = describer.describe(state)
    assert_same_tables(table, describe(state))
    assert (table.layout_id == before.layout_id) == (now == was)
    assert_same_tables(describer.describe(state), describe(state))


@pytest.mark.parametrize("place", PLACES)
def test_a_storage_of_another_length_at_the_same_address_is_seen(place: int) -> None:
    tensors, memory = many(), torch.zeros(20)
    tensors[place] = window(memory, 64, (4, 4))
    before = Likeness(tensors, measure(tensors))
    assert before.compare(tensors) is not None
    tensors[place] = window(memory, 64, (4, 4))
    assert before.compare(tensors) is not None
    tensors[place] = window(memory, 80, (4, 4))
    assert before.compare(tensors) is None


@pytest.mark.parametrize("one", PLACES)
@pytest.mark.parametrize("other", PLACES)
def test_an_object_that_is_there_twice_is_seen(one: int, other: int) -> None:
    if one == other:
        return
    tensors = many()
    before = Likeness(tensors, measure(tensors))
    assert before.compare(tensors) is not None
    tensors[one] = tensors[other]
    assert before.compare(tensors) is None
    empty = [torch.empty(0) for _ in range(NUM_TENSORS)]
    of_empty = Likeness(empty, measure(empty))
    assert of_empty.compare(empty) is not None
    empty[one] = empty[other]
    assert of_empty.compare(empty) is None
    tied = many()
    tied[one] = tied[other].detach()
    of_tied = Likeness(tied, measure(tied))
    assert of_tied.compare(tied) is not None
    tied[one] = tied[other]
    assert of_tied.compare(tied) is None
    tied[one] = tied[other].detach()
    assert of_tied.compare(tied) is not None
    tied[one] = tied[other].clone()
    assert of_tied.compare(tied) is None


@pytest.mark.parametrize("num_moved", [1, likeness._NUM_FEW, likeness._NUM_FEW + 1, NUM_TENSORS])
def test_tensors_that_move_are_told_and_remembered(num_moved: int) -> None:
    tensors = many()
    before = Likeness(tensors, measure(tensors))
    indices = range(0, NUM_TENSORS, NUM_TENSORS // num_moved)[:num_moved]
    kept = [tensors[i] for i in indices]
    for i in indices:
        tensors[i] = tensors[i].clone()
    alike = before.compare(tensors)
    assert alike is not None and alike.moved == {i: tensors[i].data_ptr() for i in indices}
    again = alike.likeness.compare(tensors)
    assert again is not None and not again.moved and again.likeness is alike.likeness
    for i, tensor in zip(indices, kept, strict=True):
        tensors[i] = tensor
    back = before.compare(tensors)
    assert back is not None and not back.moved, "what is remembered was not changed"


@pytest.mark.parametrize("num_moved", [2, likeness._NUM_FEW + 2])
def test_tensors_that_move_to_one_place_or_into_another_are_seen(num_moved: int) -> None:
    tensors = many()
    before = Likeness(tensors, measure(tensors))
    for i in range(num_moved):
        tensors[i] = tensors[i].clone()
    assert before.compare(tensors) is not None
    together = list(tensors)
    together[0] = window(together[1], 64, (4, 4))
    assert before.compare(together) is None
    into = list(tensors)
    into[0] = window(into[NUM_TENSORS - 1], 64, (4, 4))
    assert before.compare(into) is None
