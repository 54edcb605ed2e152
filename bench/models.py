"""Training states for benchmarks, trained on the spot on the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

CONTEXT = 256


def read_text(limit_bytes: int = 16 << 20) -> torch.Tensor:
    """Sources of the standard library: shape (at most limit_bytes,), uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:limit_bytes]


class DenseLM(nn.Module):
    """A causal transformer over bytes. Input (batch, context), output (batch, context, 256)."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embed = nn.Embedding(256, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        return self.head(self.layers(x, mask=mask, is_causal=True))


class Training:
    """bf16 weights, fp32 master weights and AdamW, 14 bytes a parameter.

    Args:
        width: Of the model; a multiple of 64.
        num_layers: Of the model.
        device: Where to train.
    """

    def __init__(self, width: int, num_layers: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = DenseLM(width, num_layers).to(device, torch.bfloat16)
        self.weights = list(self.model.parameters())
        self.master = [p.detach().float().requires_grad_() for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.master, lr=3e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.text = read_text().to(device)

    @property
    def num_parameters(self) -> int:
        """How many."""
        return sum(p.numel() for p in self.weights)

    def train_step(self, batch: int = 8) -> None:
        """Do one step."""
        starts = torch.randint(len(self.text) - CONTEXT - 1, (batch, 1), device=self.device)
        windows = self.text[starts + torch.arange(CONTEXT + 1, device=self.device)].long()
        logits = self.model(windows[:, :-1])
        functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten()).backward()
        for master, weight in zip(self.master, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.master)

    def components(self) -> dict[str, list[torch.Tensor]]:
        """The state's tensors by role."""
        states = [self.optimizer.state[p] for p in self.master]
        return {
            "weights": [p.detach() for p in self.weights],
            "master": [p.detach() for p in self.master],
            "m": [state["exp_avg"] for state in states],
            "v": [state["exp_avg_sq"] for state in states],
        }

    def state(self) -> dict[str, object]:
        """Everything that a resumed run needs."""
        return {"model": self.model.state_dict(), "master": self.master, "optimizer": self.optimizer.state_dict()}
