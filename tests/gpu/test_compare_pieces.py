"""One launch that compares many pieces with what the rules make of others: every rule, alignment and difference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tidegate.codec.kernels import kernels_of
from tidegate.rules import RULES, follow

pytestmark = pytest.mark.gpu

NUMELS = (1, 3, 4, 7, 1023, 4096, 100_003)
SHIFTS = ((0, 0), (1, 0), (0, 1), (3, 3), (4, 2))
"""Elements by which source and target are moved from a multiple of 16 bytes."""


def every_upper_half(device: torch.device) -> torch.Tensor:
    """fp32 with every sign, exponent and upper mantissa, but no NaN."""
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF], dtype=np.uint32)
    bits = (np.arange(1 << 16, dtype=np.uint32)[None, :] << 16 | lows[:, None]).reshape(-1)
    values = bits.view(np.float32)
    return torch.from_numpy(values[~np.isnan(values)].copy()).to(device)


def flags_of(
    rows: list[tuple[int, ...]], num_flags: int, device: torch.device, stream: torch.cuda.Stream
) -> NDArray[np.int32]:
    items = torch.tensor(rows, dtype=torch.int64, device=device)
    flags = torch.zeros(num_flags, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    longest = max(row[2] for row in rows)
    kernels_of(device).compare_pieces(items.data_ptr(), len(rows), longest, flags.data_ptr(), stream)
    stream.synchronize()
    return flags.cpu().numpy()


def shifted(octets: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """A copy that begins so many bytes behind a multiple of 256."""
    room = torch.empty(octets.numel() + num_bytes, dtype=torch.uint8, device=octets.device)
    room[num_bytes:] = octets
    return room[num_bytes:]


@pytest.mark.parametrize("name", RULES)
def test_every_place_of_a_difference_is_found(name: str, device: torch.device, stream: torch.cuda.Stream) -> None:
    rule = RULES[name]
    rows, expected, kept = [], [], []
    for numel, (source_shift, target_shift) in itertools.product(NUMELS, SHIFTS):
        octets = torch.randn(numel, device=device).view(torch.uint8)
        made = torch.empty(octets.numel() // rule.ratio, dtype=torch.uint8, device=device)
        follow(rule, octets, made)
        source = shifted(octets, 4 * source_shift)
        for at in {None, 0, made.numel() // 2, made.numel() - 1}:
            target = shifted(made, made.numel() // numel * target_shift)
            if at is not None:
                target[at] ^= 1
            kept += [source, target]
            rows.append((source.data_ptr(), target.data_ptr(), target.numel(), rule.number, len(rows)))
            expected.append(int(at is not None))
    assert flags_of(rows, len(rows), device, stream).tolist() == expected


@pytest.mark.parametrize("name", ["bf16-of-f32", "f16-of-f32"])
def test_the_kernel_rounds_as_the_rule_does(name: str, device: torch.device, stream: torch.cuda.Stream) -> None:
    """And as the CPU does: every upper half of a float, with all kinds of ties."""
    rule, values = RULES[name], every_upper_half(device)
    source = values.view(torch.uint8)
    made = torch.empty(source.numel() // 2, dtype=torch.uint8)
    follow(rule, source.cpu(), made)
    target = made.to(device)
    row = (source.data_ptr(), target.data_ptr(), target.numel(), rule.number, 0)
    assert flags_of([row], 1, device, stream).tolist() == [0]


def test_nothing_in_fp16_follows_from_a_nan(device: torch.device, stream: torch.cuda.Stream) -> None:
    source = torch.randn(10_000, device=device)
    source[7777] = torch.nan
    target = source.half()
    row = (source.data_ptr(), target.data_ptr(), target.nbytes, RULES["f16-of-f32"].number, 0)
    assert flags_of([row], 1, device, stream).tolist() == [1]


def test_pieces_share_a_flag(device: torch.device, stream: torch.cuda.Stream) -> None:
    source = torch.randn(1 << 20, device=device)
    target = source.bfloat16()
    target.view(torch.int16)[-1] ^= 1
    starts = range(0, 1 << 20, 1 << 16)
    rows = [(source.data_ptr() + 4 * at, target.data_ptr() + 2 * at, 2 << 16, 1, at >> 19) for at in starts]
    assert flags_of(rows, 3, device, stream).tolist() == [0, 1, 0]
