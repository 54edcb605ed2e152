"""Training states for benchmarks, trained on the spot on the sources of Python's standard library."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.nn import functional

from .networks import CONTEXT, SIZES, DenseLM, MoELM, Size
from .rig import say
from .text import read_text, read_words

_SAY_EVERY_STEPS = 25


class Training:
    """bf16 weights, fp32 master weights and AdamW, 14 bytes a parameter.

    Args:
        size: Of the model.
        device: Where to train.
        keep_gradients: Keep the last step's bf16 gradients, 2 bytes more a parameter, as one of the components.
    """

    def __init__(self, size: Size, device: torch.device, *, keep_gradients: bool = False) -> None:
        torch.manual_seed(0)
        self.device = device
        self.size = size
        self.keep_gradients = keep_gradients
        with device:  # initial values are drawn where the model lies: seconds faster on a GPU
            self.model = (MoELM(size) if size.num_experts else DenseLM(size)).to(torch.bfloat16)
        self.weights: list[torch.Tensor] = list(self.model.parameters())
        self.master = [p.detach().float().requires_grad_() for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.master, lr=3e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.text = (read_words(size.num_words) if size.num_experts else read_text()).to(device)
        self.gradients: list[torch.Tensor] = []
        self.loss = torch.tensor(math.nan)

    @property
    def num_parameters(self) -> int:
        """How many."""
        return sum(p.numel() for p in self.weights)

    def train_step(self, batch: int | None = None) -> None:
        """Do one step; by default on 8 windows of the text (4 for experts, so that rare words stay rare)."""
        batch = batch or (4 if self.size.num_experts else 8)
        starts = torch.randint(len(self.text) - CONTEXT - 1, (batch, 1), device=self.device)
        windows = self.text[starts + torch.arange(CONTEXT + 1, device=self.device)].long()
        logits = self.model(windows[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        self.loss = loss.detach()
        if self.keep_gradients:
            self.gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.weights]
        for master, weight in zip(self.master, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self.update()

    def update(self) -> None:
        """Step the optimizer, and round the master weights to weights."""
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.master)

    def train(self, steps: int, *, batch: int | None = None) -> float:
        """Do that many steps, waiting for the device.

        Returns:
            The last loss.

        Raises:
            RuntimeError: The training went astray; its state would be no sample of real states.
        """
        start_s = time.perf_counter()
        for step in range(1, steps + 1):
            self.train_step(batch)
            if step % _SAY_EVERY_STEPS == 0 or step == steps:
                say(f"step {step}/{steps}, loss {self.loss.item():.3f}, {time.perf_counter() - start_s:.1f} s")
        loss = self.loss.item()
        if steps and not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} after {steps} steps; use a lower learning rate")
        return loss

    def components(self) -> dict[str, list[torch.Tensor]]:
        """The state's tensors by role: weights, master, m, v, and gradients where they are kept.

        There is an m and a v once a step was done.
        """
        states = [self.optimizer.state[p] for p in self.master]
        found = {
            "weights": [p.detach() for p in self.weights],
            "master": [p.detach() for p in self.master],
            "m": [state["exp_avg"] for state in states],
            "v": [state["exp_avg_sq"] for state in states],
        }
        return found | ({"gradients": self.gradients} if self.gradients else {})

    def state(self) -> dict[str, object]:
        """Everything that a resumed run needs. On a GPU also the optimizer's step counters are CUDA tensors."""
        return {"model": self.model.state_dict(), "master": self.master, "optimizer": self.optimizer.state_dict()}


def train(
    name: str, device: torch.device, *, steps: int = 100, keep_gradients: bool = False, num_layers: int | None = None
) -> Training:
    """Build the model of that name in SIZES and train it.

    Args:
        name: In SIZES.
        device: Where.
        steps: How long.
        keep_gradients: As for Training.
        num_layers: Instead of the size's own.
    """
    size = SIZES[name] if num_layers is None else replace(SIZES[name], num_layers=num_layers)
    training = Training(size, device, keep_gradients=keep_gradients)
    say(f"{name}: {training.num_parameters / 1e6:.0f} M parameters in {len(training.weights)} tensors on {device}")
    training.train(steps)
    return training


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum of their bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def num_zeros(tensors: list[torch.Tensor]) -> int:
    """Count the values that are exactly zero. Waits for the device."""
    return sum(t.numel() - int(torch.count_nonzero(t)) for t in tensors)
