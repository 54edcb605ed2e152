"""Loads whose frames the store reads right into GPU memory, by the real KvikIO: every bit, every error, no leak."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tidegate
from tests.gpu.test_restore_on_gpu import (
    CHUNK,
    HOME,
    check_targets_of_any_alignment,
    check_that_queued_work_comes_first,
    copy_of,
    mixed_state,
    no_reader_is_left,
)
from tests.kit.bits import assert_same_bits
from tests.kit.gds import gds_store
from tests.kit.loading import load, object_of, saved
from tidegate.container import read_index
from tidegate.lane_frames import BODIES_BYTES
from tidegate.storage import LocalStore
from tidegate.storage.device_input import PendingRead

pytestmark = pytest.mark.gpu

SCRATCH_BYTES = 256 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with gds_store(tmp_path) as store:
        yield store


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[PendingRead]:
    """The reads that KvikIO was given, in order."""
    found: list[PendingRead] = []
    real = PendingRead.__init__

    def noting(self: PendingRead, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        found.append(self)

    monkeypatch.setattr(PendingRead, "__init__", noting)
    return found


def test_small_states_come_back(
    codec: str, device: torch.device, store: LocalStore, reads: list[PendingRead]
) -> None:
    state = mixed_state(device)
    saved(state, codec, store, chunk_bytes=CHUNK)
    for _ in range(3):
        assert_same_bits(load(store, map_location=HOME), state)
    assert reads and all(read.is_done() for read in reads)
    assert no_reader_is_left()
    for name in ("large", "half", "noise", "small", "transposed", "empty", "host", "step"):
        assert_same_bits(load(store, part=name, map_location=HOME), state[name])


def test_small_states_are_filled_in_place(codec: str, device: torch.device, store: LocalStore) -> None:
    state = mixed_state(device)
    saved(state, codec, store, chunk_bytes=CHUNK)
    target = copy_of(state)
    for tensor in (target["large"], target["half"], *target["small"], target["noise"]):  # type: ignore[misc]
        tensor.zero_()
    assert_same_bits(load(store, into=target), state)


@pytest.mark.parametrize("shift", [0, 1, 3, 8])
def test_small_targets_of_any_alignment_and_strides(
    codec: str, device: torch.device, store: LocalStore, shift: int
) -> None:
    check_targets_of_any_alignment(codec, device, store, shift)


def test_work_queued_on_the_callers_stream_comes_first(codec: str, device: torch.device, store: LocalStore) -> None:
    """A store waits for no stream: the load must, before memory is written that queued work still uses."""
    check_that_queued_work_comes_first(codec, device, store)


def flipped(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (octet,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([octet ^ 1 << bit % 8]))


def test_small_damage_is_always_told_and_nothing_else_is(
    codec: str, device: torch.device, store: LocalStore, tmp_path: Path, reads: list[PendingRead]
) -> None:
    state = mixed_state(device)
    saved(state, codec, store, chunk_bytes=CHUNK)
    key, num_bytes = object_of(store)
    path = tmp_path / "root" / key
    headers = [8 * entry.offset + random.randrange(8 * 64) for entry in read_index(store, key).entries]
    bits = [*random.sample(headers, min(10, len(headers))), *(random.randrange(8 * num_bytes) for _ in range(30))]
    num_found = 0
    for bit in bits:
        flipped(path, bit)
        try:
            loaded = load(store, map_location=HOME)
        except tidegate.CorruptCheckpointError:
            num_found += 1
        else:
            assert_same_bits(loaded, state)  # the bit is in padding
        assert no_reader_is_left()
        assert all(read.is_done() for read in reads)
        flipped(path, bit)
    assert num_found > 20
    assert_same_bits(load(store, map_location=HOME), state)


@pytest.mark.parametrize("nth", [0, 1, 5])
def test_what_kvikio_cannot_read_comes_through_host_memory(
    codec: str, device: torch.device, store: LocalStore, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = mixed_state(device)
    saved(state, codec, store, chunk_bytes=CHUNK)
    real, num_waits = PendingRead.wait, 0

    def failing(self: PendingRead) -> None:
        nonlocal num_waits
        num_waits += 1
        real(self)
        if num_waits == nth + 1:
            raise OSError(5, "the disk is on fire")

    monkeypatch.setattr(PendingRead, "wait", failing)
    with pytest.warns(tidegate.CheckpointWarning, match="came through host memory.*on fire"):
        loaded = load(store, map_location=HOME)
    assert_same_bits(loaded, state)
    assert num_waits > nth


def test_a_file_that_was_cut_short_is_told(codec: str, device: torch.device, store: LocalStore, tmp_path: Path) -> None:
    """While it is read: what was opened had all its bytes."""
    saved(mixed_state(device), codec, store, chunk_bytes=CHUNK)
    key, _ = object_of(store)
    path = tmp_path / "root" / key
    whole = path.read_bytes()
    entry = read_index(store, key).entries[2]
    path.write_bytes(whole[: entry.offset + 100] + whole[entry.offset + entry.header.padded_bytes :])
    with pytest.raises(tidegate.CheckpointError):
        load(store, map_location=HOME)
    assert no_reader_is_left()
    path.write_bytes(whole)
    load(store, map_location=HOME)


@pytest.mark.parametrize("is_new", [True, False])
def test_memory_stays_within_its_bounds(codec: str, device: torch.device, store: LocalStore, is_new: bool) -> None:
    chunk_bytes = 16 << 20
    state = {f"x{i}": torch.randn(24 << 20, device=device).mul_(0.02).bfloat16() for i in range(16)}
    state_bytes = sum(tensor.nbytes for tensor in state.values())
    saved(state, codec, store, chunk_bytes=chunk_bytes)
    target = None if is_new else {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(store, map_location=device, into=target)
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    loaded = load(store, map_location=device, into=target)
    extra_bytes = torch.cuda.max_memory_allocated() - before_bytes - (state_bytes if is_new else 0)
    assert extra_bytes <= BODIES_BYTES + 4 * chunk_bytes + SCRATCH_BYTES
    assert_same_bits(loaded, state)
