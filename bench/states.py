"""States made on the spot, for benchmarks that need a model's kind of bytes rather than a model; and their digests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .models import Training

State = dict[str, dict[str, torch.Tensor]]
"""By parameter, then by role."""

KEYS = ("weight", "master", "exp_avg", "exp_avg_sq")
BYTES_PER_PARAMETER = 14
_BLOCK_WORDS = 16 << 20
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as int64
_MIX = -4658895280553007687  # the first multiplier of splitmix64


def normal_state(num_bytes: int, num_layers: int, device: torch.device | str) -> State:
    """Make what mixed-precision AdamW keeps, 14 bytes a parameter, without training.

    Args:
        num_bytes: About how large it is.
        num_layers: How many parameters; all are alike in size.
        device: Where it is made.

    Returns:
        For each parameter `weight` (bf16, the rounded master), `master` (fp32, N(0, 0.02)), `exp_avg` (fp32, N(0, 1e-4)
        times a scale for each row) and `exp_avg_sq` (fp32, positive), of shape (rows, 256).
    """
    num_rows = max(1, num_bytes // BYTES_PER_PARAMETER // num_layers // 256)
    generator = torch.Generator(device).manual_seed(0)
    state: State = {}
    for i in range(num_layers):
        master = torch.empty(num_rows, 256, device=device).normal_(0, 0.02, generator=generator)
        scale = torch.empty(num_rows, 1, device=device).normal_(0, 1.0, generator=generator).exp2_()
        m = torch.empty(num_rows, 256, device=device).normal_(0, 1e-4, generator=generator).mul_(scale)
        v = torch.empty(num_rows, 256, device=device).normal_(0, 1e-4, generator=generator).mul_(scale).square_()
        state[f"layer.{i}"] = {"weight": master.bfloat16(), "master": master, "exp_avg": m, "exp_avg_sq": v}
    return state


def trained_state(training: Training) -> State:
    """The same four tensors of every parameter of a model in training; not copied."""
    names = [name for name, _ in training.model.named_parameters()]
    roles = training.components()
    rows = zip(roles["weights"], roles["master"], roles["m"], roles["v"], strict=True)
    return {name: dict(zip(KEYS, row, strict=True)) for name, row in zip(names, rows, strict=True)}


def tensors_of(state: State) -> list[torch.Tensor]:
    """All tensors of a state, in order."""
    return [tensor for tensors in state.values() for tensor in tensors.values()]


def num_bytes_of(state: State) -> int:
    """Bytes of all its tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(state))


def digests_of(state: State) -> list[int]:
    """Digests of all its tensors, in order. Blocks."""
    return [digest_of(tensor) for tensor in tensors_of(state)]


def digest_of(tensor: torch.Tensor) -> int:
    """Hash a tensor's bytes where they are: 64 bits that depend on every bit and on where it stands.

    Takes a few hundred MB of scratch at most, whatever the tensor's size. Blocks.
    """
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if octets.numel() % 8:
        octets = torch.nn.functional.pad(octets, (0, -octets.numel() % 8))
    words = octets.view(torch.int64)
    total = 0
    for at in range(0, words.numel(), _BLOCK_WORDS):
        block = words[at : at + _BLOCK_WORDS]
        mixed = torch.arange(at + 1, at + 1 + block.numel(), device=block.device).mul_(_GOLDEN).bitwise_xor_(block)
        for shift in (30, 27):
            mixed.bitwise_xor_(mixed >> shift).mul_(_MIX)
        total += int(mixed.bitwise_xor_(mixed >> 31).sum())
    return total % 2**64
