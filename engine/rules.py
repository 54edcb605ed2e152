"""How one extent's bytes follow from another's: rounding a float, or being the same. Exact, on every device alike.

The rules are part of the format (storage/FORMAT.md); never change what one of a version says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tidegate.codec.words import WordType

_TILE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Bytes of a target that are worked on at a time. On the CPU each step on a tile gives up the GIL, and waits for it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that gives a target's bytes from a source's.

    Attributes:
        name: What the manifest calls it.
        version: Of what it says.
        target: Word type of the target; None: any, and the source has the same.
        source: Word type of the source.
        ratio: Bytes of the source by byte of the target.
        number: What the kernels call it.
    """

    name: str
    version: int
    target: WordType | None
    source: WordType | None
    ratio: int
    number: int

    def fits(self, target: WordType, source: WordType) -> bool:
        """Whether it takes words of one type to words of the other."""
        return target == source if self.target is None else (self.target, self.source) == (target, source)


SAME = Rule("same", 1, None, None, 1, 0)
BF16_OF_F32 = Rule("bf16-of-f32", 1, WordType.BF16, WordType.F32, 2, 1)
F16_OF_F32 = Rule("f16-of-f32", 1, WordType.F16, WordType.F32, 2, 2)
RULES = {rule.name: rule for rule in (SAME, BF16_OF_F32, F16_OF_F32)}


def follow(rule: Rule, source: torch.Tensor, out: torch.Tensor) -> None:
    """Make a target from its source. On a GPU, queue that on the current stream.

    Args:
        rule: The rule.
        source: Shape (n × rule.ratio,), uint8, at a multiple of its word from the start of its storage.
        out: Shape (n,), uint8, likewise, on the same device, not overlapping it.
    """
    if rule is SAME:
        out.copy_(source)
        return
    make = _maker(rule, source, out.numel())
    for here, there in _tiles(rule, source, out):
        make(here, there)


def digests_of_targets(rule: Rule, source: torch.Tensor, sizes: Sequence[int], seed: int) -> list[bytes | None]:
    """Hash what the rule makes of a source, in consecutive targets. Blocks.

    Args:
        rule: The rule.
        source: As for `digest_of_target`: of one target, or of several that are not long.
        sizes: Bytes of each target.
        seed: Of the hash.
    """
    ends = list(itertools.accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    if len(sizes) == 1 or rule is F16_OF_F32:
        parts = [source[start * rule.ratio : end * rule.ratio] for start, end in zip(starts, ends, strict=True)]
        return [digest_of_target(rule, part, seed) for part in parts]
    made = torch.empty(ends[-1], dtype=torch.uint8)
    follow(rule, source, made)
    view = made.numpy().data
    return [xxhash.xxh3_128_digest(view[start:end], seed) for start, end in zip(starts, ends, strict=True)]


def digest_of_target(rule: Rule, source: torch.Tensor, seed: int) -> bytes | None:
    """Hash what the rule makes of a source. Blocks.

    Args:
        rule: The rule.
        source: Shape (n × rule.ratio,), uint8, on the CPU, at a multiple of its word from the start of its storage.
        seed: Of the hash.

    Returns:
        XXH3-128; None where the rule says nothing of this source.
    """
    if rule is SAME:
        return digest_of(source, seed)
    hashed = xxhash.xxh3_128(seed=seed)
    made = torch.empty(min(source.numel() // rule.ratio, _TILE_BYTES["cpu"]), dtype=torch.uint8)
    make = _maker(rule, source, made.numel())
    for start in range(0, source.numel(), _TILE_BYTES["cpu"] * rule.ratio):
        tile = source[start : start + _TILE_BYTES["cpu"] * rule.ratio]
        if rule is F16_OF_F32 and bool(tile.view(torch.float32).isnan().any()):
            return None  # whose payload depends on who rounds it
        here = made[: tile.numel() // rule.ratio]
        make(tile, here)
        hashed.update(here.numpy().data)
    return hashed.digest()


def digest_of(octets: torch.Tensor, seed: int) -> bytes:
    """Hash bytes: shape (n,), uint8, on the CPU. Blocks, and lets other threads run in between. XXH3-128."""
    hashed, view = xxhash.xxh3_128(seed=seed), octets.numpy().data
    for start in range(0, len(view), _TILE_BYTES["cpu"]):
        hashed.update(view[start : start + _TILE_BYTES["cpu"]])
    return hashed.digest()


def _tiles(rule: Rule, source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    step = _TILE_BYTES[target.device.type]
    for start in range(0, target.numel(), step):
        end = min(start + step, target.numel())
        yield source[start * rule.ratio : end * rule.ratio], target[start:end]


_Maker = Callable[[torch.Tensor, torch.Tensor], None]
"""Makes a tile of a target of one of its source: both uint8, on one device."""


def _maker(rule: Rule, source: torch.Tensor, num_bytes: int) -> _Maker:
    """Return what makes the target, which has so many bytes, tile by tile."""
    if rule is F16_OF_F32:
        return _round_to_f16
    if source.device.type != "cpu":
        return _round_to_bf16
    tile_bytes = min(num_bytes, _TILE_BYTES["cpu"])
    return partial(_round_to_bf16_on_cpu, np.empty(tile_bytes // BF16_OF_F32.ratio, dtype=np.uint32))


def _round_to_bf16(source: torch.Tensor, out: torch.Tensor) -> None:
    """Round to nearest, ties to even, by integers alone: no flag of a processor, and no NaN, has a say.

    u + 0x7FFF + (bit 16 of u), modulo 2**32; of that the upper half (storage/FORMAT.md).
    """
    bits = source.view(torch.int32)
    carried = bits >> 16
    carried &= 1
    carried += bits
    carried += 0x7FFF
    out.view(torch.int16).copy_(carried.view(torch.int16)[1::2])


def _round_to_bf16_on_cpu(room: NDArray[np.uint32], source: torch.Tensor, out: torch.Tensor) -> None:
    """Do the same in `room`, uint32[as many as there are floats, or more]: twice as fast as PyTorch."""
    bits = source.numpy().view(np.uint32)
    carried = room[: bits.size]
    np.right_shift(bits, 16, out=carried)
    np.bitwise_and(carried, 1, out=carried)
    np.add(carried, bits, out=carried)
    np.add(carried, 0x7FFF, out=carried)
    np.right_shift(carried, 16, out=out.numpy().view(np.uint16), casting="unsafe")


def _round_to_f16(source: torch.Tensor, out: torch.Tensor) -> None:
    out.view(torch.int16).copy_(source.view(torch.float32).to(torch.float16).view(torch.int16))
