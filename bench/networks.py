"""Models for benchmarks: a dense transformer over bytes, and a mixture of experts over words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

CONTEXT = 256
_HEAD_WIDTH = 64
_CAPACITY = 4  # slots of an expert, in multiples of its fair share; tokens beyond are dropped


@dataclass(frozen=True, slots=True)
class Size:
    """What to build.

    Attributes:
        width: Of the model; a multiple of 64.
        num_layers: Of the model.
        num_words: Vocabulary; 256: bytes.
        num_experts: In each layer; 0: a dense model.
        expert_width: Of each expert's hidden layer.
    """

    width: int
    num_layers: int
    num_words: int = 256
    num_experts: int = 0
    expert_width: int = 0


SIZES = {
    "dense": Size(1024, 24),
    "moe": Size(1024, 8, num_words=1 << 16, num_experts=64, expert_width=256),
    "large": Size(1216, 35),
    "dense-tiny": Size(64, 2),
    "moe-tiny": Size(64, 2, num_words=1 << 13, num_experts=8, expert_width=64),
    "large-tiny": Size(64, 4),
}
"""`dense`: 303 M parameters. `moe`: 436 M. `large`: 622 M, whose state has 8.7 GB in 2,115 tensors."""


class DenseLM(nn.Module):
    """A causal transformer over bytes. Input (batch, context), output (batch, context, num_words)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        layer = nn.TransformerEncoderLayer(
            width, width // _HEAD_WIDTH, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embed = nn.Embedding(size.num_words, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.layers = nn.TransformerEncoder(layer, size.num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, size.num_words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        logits: torch.Tensor = self.head(self.layers(x, mask=mask, is_causal=True))
        return logits


class Experts(nn.Module):
    """A feed-forward layer of many experts; each token goes to one (top-1). Input and output (tokens, width).

    Every expert's weights are tensors of their own, as trainers keep them. An expert that no token was sent to has a
    gradient of exact zeros. Shapes are fixed, so nothing waits for the GPU.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_experts = size.num_experts
        self.router = nn.Linear(size.width, size.num_experts, bias=False)
        self.up = nn.ParameterList(_matrix(size.width, size.expert_width) for _ in range(size.num_experts))
        self.down = nn.ParameterList(_matrix(size.expert_width, size.width) for _ in range(size.num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, expert = self.router(x).float().softmax(dim=-1).max(dim=-1)
        capacity = max(1, _CAPACITY * x.shape[0] // self.num_experts)
        chosen = functional.one_hot(expert, self.num_experts)
        place = (chosen.cumsum(dim=0) * chosen).sum(dim=-1) - 1
        kept = place < capacity
        # Tokens that found no place all go to one slot behind the last, which nobody reads.
        slot = torch.where(kept, expert * capacity + place, self.num_experts * capacity)
        slots = x.new_zeros(self.num_experts * capacity + 1, x.shape[1]).index_copy(0, slot, x)
        hidden = torch.bmm(slots[:-1].view(self.num_experts, capacity, -1), torch.stack(list(self.up)))
        out = torch.bmm(functional.gelu(hidden), torch.stack(list(self.down))).flatten(0, 1)
        out = functional.pad(out, (0, 0, 0, 1))[slot]
        scaled: torch.Tensor = out * (share * kept).unsqueeze(-1).to(x.dtype)
        return scaled


class MoELayer(nn.Module):
    """Attention and experts with residuals. Input and output (batch, context, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads = size.width // _HEAD_WIDTH
        self.norm_1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.norm_2 = nn.LayerNorm(size.width)
        self.experts = Experts(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, context, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        routed: torch.Tensor = self.experts(self.norm_2(x).flatten(0, 1))
        return x + routed.view_as(x)


class MoELM(nn.Module):
    """A causal mixture-of-experts transformer over words. Shapes as for DenseLM."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.num_words, size.width)
        self.place = nn.Embedding(CONTEXT, size.width)
        self.layers = nn.ModuleList(MoELayer(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.num_words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) / math.sqrt(rows))
