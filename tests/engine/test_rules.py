"""What follows from what: each rule against an independent account of it, over every upper half of an fp32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tidegate.rules import BF16_OF_F32, F16_OF_F32, RULES, SAME, digest_of, digest_of_target, follow

LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xEDCB, 0x1000, 0x1001, 0x0FFF, 0x3000)


def every_upper_half() -> NDArray[np.uint32]:
    """fp32 bits: every sign, exponent and upper mantissa, with lower mantissas around every tie."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return np.concatenate([upper | np.uint32(low) for low in LOW_HALVES])


def followed(name: str, bits: NDArray[np.uint32], device: torch.device) -> NDArray[np.uint16]:
    source = torch.from_numpy(bits.view(np.uint8).copy()).to(device)
    out = torch.full((source.numel() // RULES[name].ratio,), 0xA5, dtype=torch.uint8, device=device)
    follow(RULES[name], source, out)
    return out.cpu().numpy().view(np.uint16)


def test_bf16_is_the_nearest_with_ties_to_even(device: torch.device) -> None:
    bits = every_upper_half()
    rule = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) % 2**32 >> 16).astype(np.uint16)
    found = followed("bf16-of-f32", bits, device)
    assert (found == rule).all(), "as FORMAT.md writes it, NaNs included"
    torchs = torch.from_numpy(bits.view(np.float32)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    is_number = ~np.isnan(bits.view(np.float32))
    assert (found == torchs)[is_number].all()


def test_f16_is_the_nearest_with_ties_to_even(device: torch.device) -> None:
    bits = every_upper_half()
    with np.errstate(over="ignore"):
        rounded = bits.view(np.float32).astype(np.float16).view(np.uint16)
    is_number = ~np.isnan(bits.view(np.float32))
    assert (followed("f16-of-f32", bits, device) == rounded)[is_number].all()


@pytest.mark.parametrize("rule", [SAME, BF16_OF_F32, F16_OF_F32], ids=lambda rule: rule.name)
@pytest.mark.parametrize("numel", [0, 1, 3, 65_535, 65_536, 65_537, 200_001])
def test_the_hash_of_a_target_is_that_of_its_bytes(rule: object, numel: int) -> None:
    source = torch.randn(numel).view(torch.uint8)
    target = torch.empty(source.numel() // rule.ratio, dtype=torch.uint8)  # type: ignore[attr-defined]
    follow(rule, source, target)  # type: ignore[arg-type]
    for seed in (0, 7):
        assert digest_of_target(rule, source, seed) == digest_of(target, seed)  # type: ignore[arg-type]
    assert digest_of(target, 0) != digest_of(target, 7)


def test_nothing_in_fp16_follows_from_a_nan() -> None:
    source = torch.randn(100_000)
    source[77_777] = torch.nan
    assert digest_of_target(F16_OF_F32, source.view(torch.uint8), 0) is None
    assert digest_of_target(BF16_OF_F32, source.view(torch.uint8), 0) is not None
