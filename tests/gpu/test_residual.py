"""Residuals on a GPU: the bytes that the CPU makes, undone to the chunk, and a sum that tells of any change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tidegate.codec.device_report import digest_words, read_digest
from tidegate.codec.digest import digest
from tidegate.codec.errors import CodecUnavailableError
from tidegate.codec.kernels import Kernels, kernels_of
from tidegate.codec.words import WordType
from tidegate.residual import KINDS, ONLY_KEEP, Kind, device_kind, take_residual

from .chunks import CONTENTS, make_chunk
from .frames import on_device

pytestmark = pytest.mark.gpu

WORDS = pytest.mark.parametrize("word", list(WordType), ids=lambda word: word.name)
PAIRS = [pair for content in CONTENTS for pair in ((content, content), (content, "normal"), ("specials", content))]
NUM_VALUES = (1, 2, 3, 7, 8, 9, 1000, 1001, 4096, 16_383, 70_001)


@pytest.fixture(scope="module")
def kernels(device: torch.device) -> Kernels:
    try:
        found = kernels_of(device)
        found.load_residual()
    except CodecUnavailableError as exc:
        pytest.skip(str(exc))
    return found


def poisoned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Room with 64 bytes behind it that nobody may write to."""
    return torch.full((num_bytes + 64,), 0xA5, dtype=torch.uint8, device=device)


def take(
    kernels: Kernels, stream: torch.cuda.Stream, number: int, word: WordType, raw: torch.Tensor, base: torch.Tensor
) -> tuple[NDArray[np.uint8], list[int]]:
    """Take a residual and the chunk over its base; return what is left, and the sums."""
    num_bytes = raw.numel()
    out, sums = poisoned(num_bytes, raw.device), torch.zeros(2, dtype=torch.int64, device=raw.device)
    torch.cuda.synchronize(raw.device)
    with kernels.on(stream):
        addresses = (raw.data_ptr(), base.data_ptr(), out.data_ptr())
        kernels.take_residual(number, word, *addresses, num_bytes, sums=sums.data_ptr())
    torch.cuda.synchronize(raw.device)
    found = out.cpu().numpy()
    assert (found[num_bytes:] == 0xA5).all()
    return found[:num_bytes], [int(value) for value in sums.tolist()]


@WORDS
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_the_cpus(
    kernels: Kernels, stream: torch.cuda.Stream, device: torch.device, kind: Kind, word: WordType
) -> None:
    for (new, old), num_values in itertools.product(PAIRS, NUM_VALUES):
        num_bytes = num_values * word.itemsize
        raw, before = make_chunk(new, word, num_bytes, 1), make_chunk(old, word, num_bytes, 2)
        expected = np.empty_like(raw)
        take_residual(kind, word, raw, before, expected)
        chunk, base = on_device(raw, device), on_device(before, device)
        left, sums = take(kernels, stream, device_kind(kind, word), word, chunk, base)
        assert left.tobytes() == expected.tobytes(), (new, old, num_values)
        assert base.cpu().numpy().tobytes() == chunk.cpu().numpy().tobytes() == raw.tobytes()
        rebuilt = on_device(before, device)
        residual = on_device(left, device)
        with kernels.on(stream):
            number = device_kind(kind, word)
            kernels.undo_residual(number, word, residual.data_ptr(), rebuilt.data_ptr(), num_bytes)
        torch.cuda.synchronize(device)
        assert rebuilt.cpu().numpy().tobytes() == raw.tobytes()
        _, kept = take(kernels, stream, ONLY_KEEP, word, on_device(before, device), rebuilt)
        assert kept == [0, sums[0]], "the sum of a base is that with which it was kept"


@WORDS
def test_a_chunk_is_hashed_on_the_way(
    kernels: Kernels, stream: torch.cuda.Stream, device: torch.device, word: WordType
) -> None:
    for num_bytes in (8, 16, 40, 240, 248, 1032, 65_528, 65_536, 65_544, 65_776, 65_784, 1_000_008):
        raw, before = (make_chunk("normal", word, num_bytes, seed) for seed in (1, 2))
        for kind in KINDS:
            expected = np.empty_like(raw)
            take_residual(kind, word, raw, before, expected)
            chunk, base, out = on_device(raw, device), on_device(before, device), poisoned(num_bytes, device)
            room = torch.zeros(2 + digest_words(num_bytes), dtype=torch.int64, device=device)
            torch.cuda.synchronize(device)
            with kernels.on(stream):
                addresses = (chunk.data_ptr(), base.data_ptr(), out.data_ptr())
                kernels.take_and_digest(
                    device_kind(kind, word), word, *addresses, num_bytes,
                    sums=room.data_ptr(), words=room.data_ptr() + 16,
                )  # fmt: skip
            torch.cuda.synchronize(device)
            words = room.cpu().numpy().view(np.uint64)
            assert read_digest(words[2:], num_bytes) == digest(raw)
            assert out.cpu().numpy().tobytes() == expected.tobytes() + b"\xa5" * 64
            assert base.cpu().numpy().tobytes() == chunk.cpu().numpy().tobytes() == raw.tobytes()
            other = on_device(before, device)
            _, sums = take(kernels, stream, device_kind(kind, word), word, chunk, other)
            assert sums == room[:2].tolist()


@WORDS
def test_in_place_and_with_the_base_left_alone(
    kernels: Kernels, stream: torch.cuda.Stream, device: torch.device, word: WordType
) -> None:
    raw, before = (make_chunk("normal", word, 100_003 * word.itemsize, seed) for seed in (1, 2))
    for kind in KINDS:
        expected = np.empty_like(raw)
        take_residual(kind, word, raw, before, expected)
        chunk, base = on_device(raw, device), on_device(before, device)
        with kernels.on(stream):
            addresses = (chunk.data_ptr(), base.data_ptr(), chunk.data_ptr())
            kernels.take_residual(device_kind(kind, word), word, *addresses, raw.size)
        torch.cuda.synchronize(device)
        assert chunk.cpu().numpy().tobytes() == expected.tobytes()
        assert base.cpu().numpy().tobytes() == before.tobytes()


def test_every_changed_bit_changes_the_sum(kernels: Kernels, stream: torch.cuda.Stream, device: torch.device) -> None:
    chunk = make_chunk("zeros", WordType.U8, 40_013)
    room = on_device(chunk, device)
    seen = set()
    for place in (None, 0, 1, 7, 8, 20_000, 40_000, 40_012):
        for bit in range(8):
            bad = chunk.copy()
            if place is not None:
                bad[place] ^= 1 << bit
            seen.add(
                (
                    place,
                    bit if place is not None else 0,
                    take(kernels, stream, ONLY_KEEP, WordType.U8, on_device(bad, device), room)[1][1],
                )
            )
    assert len({value for *_, value in seen}) == len(seen) == 7 * 8 + 1
