"""Page-locked memory that is used again: what is sent and fetched is what it was, and there is never more of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidegate.codec.host_rooms import HostRooms
from tidegate.codec.kernels import Kernels, kernels_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels(device: torch.device) -> Kernels:
    return kernels_of(device)


@pytest.fixture
def rooms(kernels: Kernels, stream: torch.cuda.Stream) -> HostRooms:
    return HostRooms(kernels, stream)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("size", [0, 1, 7, 4096, 100_003])
def test_small_arrays_arrive_and_come_back(
    rooms: HostRooms, kernels: Kernels, stream: torch.cuda.Stream, dtype: type[np.generic], size: int
) -> None:
    array = np.arange(size).astype(dtype)
    with torch.cuda.stream(stream), kernels.on(stream):
        sent = rooms.send(array.reshape(1, -1))
        room = rooms.fetch(sent.data_ptr(), array.nbytes)
    room.done.synchronize()
    assert np.array_equal(room.octets[: array.nbytes].view(dtype), array)


def test_small_arrays_do_not_mix_while_the_stream_is_behind(
    rooms: HostRooms, kernels: Kernels, stream: torch.cuda.Stream
) -> None:
    arrays = [np.full(1000 + 517 * i, i, dtype=np.int64) for i in range(100)]
    with torch.cuda.stream(stream), kernels.on(stream):
        torch.cuda._sleep(20_000_000)
        sent = [rooms.send(array) for array in arrays]
    stream.synchronize()
    for tensor, array in zip(sent, arrays, strict=True):
        assert np.array_equal(tensor.cpu().numpy().view(np.int64), array)


def test_small_rooms_are_used_again(rooms: HostRooms, kernels: Kernels, stream: torch.cuda.Stream) -> None:
    seen = set()
    with torch.cuda.stream(stream), kernels.on(stream):
        for i in range(200):
            sent = rooms.send(np.full(2000, i, dtype=np.int64))
            room = rooms.fetch(sent.data_ptr(), sent.numel())
            room.done.synchronize()
            assert (room.octets[:16_000].view(np.int64) == i).all()
            seen.add(room.address)
            rooms.give_back(room)
    assert len(seen) <= 3


def test_small_rooms_may_be_dropped_under_a_copy(kernels: Kernels, stream: torch.cuda.Stream) -> None:
    array = np.arange(100_000)
    for _ in range(20):
        rooms = HostRooms(kernels, stream)
        with torch.cuda.stream(stream), kernels.on(stream):
            torch.cuda._sleep(1_000_000)
            sent = rooms.send(array)
        del rooms
        taken = torch.zeros(array.nbytes, dtype=torch.uint8, pin_memory=True)  # the same memory, most likely
        stream.synchronize()
        assert np.array_equal(sent.cpu().numpy().view(np.int64), array)
        del taken
