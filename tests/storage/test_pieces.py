"""How an append is cut."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.store_checks import TIMEOUT_S
from tidegate.storage import ALIGNMENT_BYTES, StorageError
from tidegate.storage.pieces import MAX_PIECE_BYTES, MIN_PIECE_BYTES, Pieces, piece_bytes
from tidegate.storage.workers import WorkerPool

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "num_idle", "wanted"),
    [
        (64 * MIB, 8, 8 * MIB),
        (64 * MIB, 1, MAX_PIECE_BYTES),
        (64 * MIB, 0, MAX_PIECE_BYTES),
        (16 * MIB, 8, MIN_PIECE_BYTES),
        (16 * MIB, 0, 16 * MIB),
        (1 << 40, 8, MAX_PIECE_BYTES),
        (33 * MIB + 1, 3, 11 * MIB + 4096),
        (4 * MIB + 4096, 8, 4 * MIB + 4096),
        (256 * MIB + 4096, 8, 29_827_072),
        (1, 8, 4096),
        (0, 8, 4096),
    ],
)
def test_idle_threads_get_pieces_and_a_busy_pool_gets_long_ones(num_bytes: int, num_idle: int, wanted: int) -> None:
    assert piece_bytes(num_bytes, num_idle) == wanted


@given(st.integers(1, 1 << 40), st.integers(0, 64))
def test_no_piece_is_much_shorter_than_the_others(num_bytes: int, num_idle: int) -> None:
    size = piece_bytes(num_bytes, num_idle)
    num_pieces = -(-num_bytes // size)
    assert size % ALIGNMENT_BYTES == 0
    assert size <= MAX_PIECE_BYTES
    assert num_pieces == 1 or size >= MIN_PIECE_BYTES
    assert num_bytes - (num_pieces - 1) * size > size - num_pieces * ALIGNMENT_BYTES


def test_the_last_piece_ends_the_append_and_the_first_error_counts() -> None:
    pieces = Pieces(range(3))
    first, second = StorageError("first"), StorageError("second")
    pieces.end_one(1, first)
    pieces.end_one(1, None)
    pieces.end_one(0, second)
    assert not pieces.future.done()
    pieces.end_all(second)
    assert pieces.future.exception(0) is first


def test_a_pool_tells_how_many_threads_have_nothing_to_do() -> None:
    pool = WorkerPool(3, "counted")
    gate, begun = threading.Event(), threading.Barrier(3)

    def work() -> None:
        begun.wait(TIMEOUT_S)
        gate.wait(TIMEOUT_S)

    assert pool.num_idle == 3
    futures = [pool.submit(work) for _ in range(2)]
    begun.wait(TIMEOUT_S)
    assert pool.num_idle == 1
    futures += [pool.submit(gate.wait, TIMEOUT_S) for _ in range(5)]
    assert pool.num_idle == 0
    gate.set()
    for future in futures:
        future.result(TIMEOUT_S)
    pool.close()
