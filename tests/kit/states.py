"""States that tests save."""

from __future__ import annotations

import torch


def filled(
    value: float, num_tensors: int = 4, num_bytes: int = 1 << 16, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Tensors of fp32 that all hold one value."""
    return {f"t{i}": torch.full((num_bytes // 4,), value, device=device) for i in range(num_tensors)}


def random_state(num_bytes: int, device: torch.device | str = "cpu") -> dict[str, object]:
    """A training state in small: bf16 weights, fp32 master and moments, a step, some odds and ends."""
    numel = num_bytes // 14
    master = torch.randn(numel, device=device).mul_(0.02)
    moment = torch.randn(numel, device=device).mul_(1e-4)
    return {
        "model": {"w": master.to(torch.bfloat16), "b": torch.zeros(3, 5, device=device)},
        "optimizer": {"state": {0: {"master": master, "exp_avg": moment}}, "lr": 1e-3},
        "exp_avg_sq": torch.rand(numel, device=device).mul_(1e-8),
        "rng": torch.get_rng_state(),
        "step": 7,
        "names": ["a", ("b", None, True)],
    }
