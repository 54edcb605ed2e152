"""One launch that copies many pieces: every alignment, every length, nothing beside them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tidegate.codec.kernels import kernels_of

pytestmark = pytest.mark.gpu

POISON = 0xA5
LENGTHS = (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 255, 256, 4095, 4096, 4097)
LONG = (16383, 16384, 16385, 16384 + 15, 32768 + 1, 100_003, 1 << 20, (1 << 20) - 1, (1 << 20) + 13)
ALIGNMENTS = tuple(itertools.product(range(16), repeat=2))


def pieces_of(alignments: tuple[tuple[int, int], ...], lengths: tuple[int, ...]) -> NDArray[np.int64]:
    """Offsets in source and target, and bytes: int64[num_pieces, 3]; no two targets are closer than 32 bytes."""
    rows, source_at, target_at = [], 0, 32
    for (source, target), length in itertools.product(alignments, lengths):
        rows.append((source_at + source, target_at + target, length))
        source_at += -(-(16 + length) // 16) * 16
        target_at += -(-(48 + length) // 16) * 16
    return np.array(rows, dtype=np.int64)


def check(pieces: NDArray[np.int64], device: torch.device, stream: torch.cuda.Stream, *, base: bool) -> None:
    rng = np.random.default_rng(1)
    source_bytes = int((pieces[:, 0] + pieces[:, 2]).max())
    target_bytes = int((pieces[:, 1] + pieces[:, 2]).max()) + 32
    octets = rng.integers(0, 256, source_bytes, dtype=np.uint8)
    expected = np.full(target_bytes, POISON, dtype=np.uint8)
    for source_at, target_at, length in pieces.tolist():
        expected[target_at : target_at + length] = octets[source_at : source_at + length]
    source = torch.from_numpy(octets).to(device)
    target = torch.full((target_bytes,), POISON, dtype=torch.uint8, device=device)
    shift = 0 if base else target.data_ptr()
    items = torch.from_numpy(pieces + np.array([source.data_ptr(), shift, 0])).to(device)
    torch.cuda.synchronize(device)
    kernels_of(device).copy_pieces(
        items.data_ptr(), len(pieces), int(pieces[:, 2].max()), stream, target_base=target.data_ptr() - shift
    )
    stream.synchronize()
    assert target.cpu().numpy().tobytes() == expected.tobytes()
    assert source.cpu().numpy().tobytes() == octets.tobytes()


@pytest.mark.parametrize("base", [False, True], ids=["addresses", "offsets"])
def test_small_pieces_at_every_alignment(device: torch.device, stream: torch.cuda.Stream, base: bool) -> None:
    check(pieces_of(ALIGNMENTS, LENGTHS), device, stream, base=base)


@pytest.mark.parametrize("alignment", [(0, 0), (3, 3), (8, 0), (4, 12), (2, 8), (5, 9), (1, 0), (15, 7)])
def test_long_pieces(device: torch.device, stream: torch.cuda.Stream, alignment: tuple[int, int]) -> None:
    check(pieces_of((alignment,), LONG), device, stream, base=False)


@pytest.mark.parametrize("length", [1, 5, 16, 1000, 16384, 3_000_001])
def test_small_one_piece_alone(device: torch.device, stream: torch.cuda.Stream, length: int) -> None:
    for alignment in ((0, 0), (7, 7), (2, 4), (9, 0)):
        check(pieces_of((alignment,), (length,)), device, stream, base=True)


def test_a_hundred_thousand_pieces(device: torch.device, stream: torch.cuda.Stream) -> None:
    lengths = tuple(np.random.default_rng(2).integers(0, 700, 400).tolist())
    pieces = pieces_of(ALIGNMENTS, lengths)
    assert len(pieces) > 100_000
    check(pieces, device, stream, base=True)


def test_small_no_pieces_are_no_launch(device: torch.device, stream: torch.cuda.Stream) -> None:
    kernels_of(device).copy_pieces(0, 0, 1 << 20, stream)
    kernels_of(device).copy_pieces(0, 5, 0, stream.cuda_stream)
    stream.synchronize()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 1000, 16384, 70_001])
def test_small_bytes_for_the_host(device: torch.device, stream: torch.cuda.Stream, length: int) -> None:
    kernels = kernels_of(device)
    source = torch.randint(0, 256, (length + 16,), dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    for source_at, target_at in ALIGNMENTS:
        target = torch.full((length + 32,), POISON, dtype=torch.uint8, pin_memory=True)
        with kernels.on(stream):
            kernels.copy_to_host(target.data_ptr() + target_at, source.data_ptr() + source_at, length)
        stream.synchronize()
        expected = torch.full_like(target, POISON)
        expected[target_at : target_at + length] = source[source_at : source_at + length].cpu()
        assert torch.equal(target, expected)


def test_bytes_for_the_host_wait_for_no_frame_under_way(device: torch.device, stream: torch.cuda.Stream) -> None:
    kernels, other = kernels_of(device), torch.cuda.Stream(device)
    report, frame = torch.ones(64, dtype=torch.uint8, device=device), torch.ones(1 << 28, device=device)
    told, there = torch.zeros(64, dtype=torch.uint8, pin_memory=True), torch.zeros(1 << 28, pin_memory=True)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(other):
        there.copy_(frame, non_blocking=True)  # 20 ms
    with kernels.on(stream):
        kernels.copy_to_host(told.data_ptr(), report.data_ptr(), 64)
    stream.synchronize()
    assert not other.query()
    assert torch.equal(told, report.cpu())
    other.synchronize()
    assert torch.equal(there, frame.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; torch sees fewer")
def test_a_gpu_that_is_not_the_current_one(device: torch.device) -> None:
    other = torch.device("cuda", 1)
    check(pieces_of(((0, 0), (1, 2)), LENGTHS), other, torch.cuda.Stream(other), base=True)
    assert torch.cuda.current_device() == 0
