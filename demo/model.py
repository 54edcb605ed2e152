"""A small GPT in bf16 with fp32 master weights under AdamW, on the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Size:
    """How large the model and its batches are."""

    width: int
    num_layers: int
    num_heads: int
    context: int
    batch: int


SIZES: Mapping[str, Size] = {"small": Size(256, 4, 4, 64, 8), "tiny": Size(32, 2, 2, 16, 4)}


class Block(nn.Module):
    """One transformer layer. Input and output: (batch, context, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.num_heads = size.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits over the next byte out. The head is tied to the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 256, bias=False)
        self.head.weight = self.embed.weight
        for weight in (self.embed.weight, self.place.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text(limit_bytes: int = 4 << 20) -> torch.Tensor:
    """Sources of the standard library: shape (at most limit_bytes,), uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:limit_bytes]


class Trainer:
    """The training loop's state: bf16 weights, fp32 master weights and their AdamW, and the data's position.

    Args:
        device: Where to train.
        size: How large the model is.
    """

    def __init__(self, device: torch.device, size: Size) -> None:
        torch.manual_seed(0)
        self.device = device
        self.size = size
        self.model = GPT(size).to(device, torch.bfloat16)
        self.master = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.master, lr=3e-4, betas=(0.9, 0.95))
        self.text = read_text()
        self.picks = torch.Generator().manual_seed(1)
        self.step = 0

    def train_step(self) -> float:
        """Do one step and return its loss. The same state gives the same step, bit for bit."""
        length = self.size.context + 1
        starts = torch.randint(len(self.text) - length, (self.size.batch,), generator=self.picks)
        windows = torch.stack([self.text[s : s + length] for s in starts.tolist()]).long().to(self.device)
        logits = self._logits(windows[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        self.model.zero_grad()
        loss.backward()
        for master, weight in zip(self.master, self.model.parameters(), strict=True):
            master.grad = weight.grad.float() if weight.grad is not None else None
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.master, self.model.parameters(), strict=True):
                weight.copy_(master)
        self.step += 1
        return loss.item()

    def state(self) -> dict[str, object]:
        """Everything that a resumed run needs."""
        return {
            "model": self.model.state_dict(),
            "master": self.master,
            "optimizer": self.optimizer.state_dict(),
            "picks": self.picks.get_state(),
            "step": self.step,
        }

    def load_state(self, state: dict[str, object]) -> None:
        """Go on from a state that `state` returned."""
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        with torch.no_grad():
            for master, saved in zip(self.master, state["master"], strict=True):  # type: ignore[call-overload]
                master.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
        self.picks.set_state(state["picks"])  # type: ignore[arg-type]
        self.step = state["step"]  # type: ignore[assignment]

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cpu":
            return self.model(tokens)
        # A CPU without bf16 units takes 40 times as long in bf16: there the bf16 weights are computed with as fp32.
        weights = {name: weight.float() for name, weight in self.model.named_parameters()}
        return functional_call(self.model, weights, (tokens,))
