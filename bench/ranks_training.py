"""A model that several ranks train together with FSDP2, each holding a part of every tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from .networks import CONTEXT, DenseLM, Size
from .text import read_text

SIZES = {"large": Size(2048, 20), "tiny": Size(64, 2)}
"""`large`: 1.01 G parameters; with fp32 weights and both of AdamW's moments 12 bytes each."""

State = dict[str, Any]


class RankTraining:
    """This rank's part of a training: fp32 weights, computed with in bf16 on a GPU, and AdamW.

    Args:
        size: Of the model.
        device: Of this rank.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)  # the same weights on every rank; each keeps its part
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        is_cuda = device.type == "cuda"
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_cuda else None)
        with device:
            self.model = DenseLM(size)
        for layer in self.model.layers.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=is_cuda)
        self._text = read_text().to(device)
        torch.manual_seed(1 + dist.get_rank())

    @property
    def num_parameters(self) -> int:
        """Of all ranks together."""
        return sum(p.numel() for p in self.model.parameters())

    def train(self, num_steps: int) -> float:
        """Do some steps; wait for the device; return this rank's last loss. All ranks must call it."""
        loss = torch.zeros(())
        for _ in range(num_steps):
            starts = torch.randint(len(self._text) - CONTEXT - 1, (4, 1), device=self.device)
            windows = self._text[starts + torch.arange(CONTEXT + 1, device=self.device)].long()
            logits = self.model(windows[:, :-1])
            loss = functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self) -> State:
        """Weights and optimizer as DCP's users get them: DTensors by their qualified names."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}


def local_tensors(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """This rank's part of every tensor, by its path."""
    if isinstance(state, DTensor):
        return {path: state.to_local().detach()}
    if isinstance(state, torch.Tensor):
        return {path: state.detach()}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {name: tensor for key, value in items for name, tensor in local_tensors(value, f"{path}.{key}").items()}


def same_bits(state: Any, expected: dict[str, torch.Tensor]) -> bool:
    """Whether this rank's tensors have the bits of those `expected`."""
    found = local_tensors(state)
    if found.keys() != expected.keys():
        return False
    pairs = ((found[name].reshape(-1), expected[name].reshape(-1)) for name in expected)
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


def erase(state: Any) -> None:
    """Set every byte of this rank's tensors to 1."""
    with torch.no_grad():
        for tensor in local_tensors(state).values():
            if tensor.numel():
                tensor.reshape(-1).view(torch.uint8).fill_(1)
