"""Sharded states that tests save, made alike on every rank, and their comparison with whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch._dynamo  # the first DTensor would import it, in each process of a crew
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.kit.bits import physical_bytes
from tests.kit.states import odd_values

VOCABULARY = 13


class TiedModel(nn.Module):
    """Embedding and head that share a weight, layers of odd sizes, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 6)])
        self.frozen = nn.Linear(6, 5)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return self.head(y + self.frozen(y).mean(-1, keepdim=True))


def training(seed: int = 3, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """An FSDP2 model over the default group, with two steps of AdamW behind it; the same weights on any number of
    ranks before the first step."""
    torch.manual_seed(seed)
    model = TiedModel().to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Train on the same words on every rank."""
    words = torch.arange(VOCABULARY, device=model.seen.device)
    for _ in range(num_steps):
        loss = model(words).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def mesh_of(*sizes: int, device: str = "cpu") -> DeviceMesh:
    """A mesh of that shape over the default group."""
    return init_device_mesh(device, sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))


def whole_tensors() -> dict[str, torch.Tensor]:
    """Tensors of awkward shapes and values, the same at every call."""
    generator = torch.Generator().manual_seed(11)
    return {
        "six_rows": torch.randn(6, 4, generator=generator),
        "one_row": torch.randn(1, 3, generator=generator),
        "five": torch.arange(5, dtype=torch.int64),
        "cube": torch.randn(4, 6, 5, generator=generator),
        "odd": odd_values(torch.bfloat16, 12 * 7).view(12, 7),
        "nothing": torch.empty(0, 3),
        "complex": torch.randn(9, 2, generator=generator, dtype=torch.complex128),
        "flags": torch.arange(24).view(8, 3) % 3 == 0,
    }


def distributed(
    tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh, placements: list[Placement]
) -> dict[str, torch.Tensor]:
    """Shard tensors over a mesh; what has too few dimensions is sharded along its first."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        fitting = [p if not isinstance(p, Shard) or p.dim < tensor.dim() else Shard(0) for p in placements]
        found[name] = distribute_tensor(tensor, mesh, fitting)
    return found


def zeros_like(state: Any) -> Any:
    """The same structure with other values."""
    if isinstance(state, DTensor):
        local = torch.zeros_like(state.to_local())
        return DTensor.from_local(
            local, state.device_mesh, state.placements, run_check=False, shape=state.shape, stride=state.stride()
        )
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return type(state)(map(zeros_like, state)) if isinstance(state, list | tuple) else None


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from leaves(value, f"{path}.{i}")
    else:
        yield path, state


def whole_bits(state: Any) -> dict[str, object]:
    """Each leaf in full, as dtype, shape and bytes, gathered from all ranks; other values as they are."""
    found: dict[str, object] = {}
    for path, leaf in leaves(state):
        if isinstance(leaf, torch.Tensor):
            tensor = gathered(leaf)
            found[path] = (str(tensor.dtype), tuple(tensor.shape), physical_bytes(tensor))
        else:
            found[path] = repr(leaf)
    return found


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor in full. The bytes travel, not the values."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    mine = (tuple(offsets), tuple(sizes), physical_bytes(tensor.detach().to_local()))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for start, size, content in parts:
        if content:
            part = torch.frombuffer(bytearray(content), dtype=tensor.dtype).view(size)
            whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] = part
    return whole


def replicate() -> Placement:
    """A placement that keeps the whole tensor on each rank."""
    return Replicate()
