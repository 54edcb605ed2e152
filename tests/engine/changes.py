"""A trainer's state, and changes to it that a describer must see, or must see through."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tidegate.sources import bytes_at
from tidegate.tensors import reach


class Trainer:
    """A model in bf16 with fp32 masters and AdamW, as they are in many trainings."""

    def __init__(self, num_layers: int = 2) -> None:
        layers = [torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)) for _ in range(num_layers)]
        self.model = torch.nn.Sequential(*layers).to(torch.bfloat16)
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters)
        self.epoch = 0
        self.step()

    def step(self) -> None:
        for p in self.masters:
            p.grad = torch.randn_like(p)
        self.optimizer.step()
        self.epoch += 1

    def state(self) -> dict[Any, Any]:
        return {
            "model": self.model.state_dict(),
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
        }


# Every change gets the state, a trainer whose tensors it holds, and a source of chances.
Change = Callable[[dict[Any, Any], random.Random], None]


def places(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every tensor that can be replaced."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        if isinstance(value, torch.Tensor):
            yield state, key
        else:
            yield from places(value)


def pick(state: Any, chance: random.Random) -> tuple[Any, Any]:
    return chance.choice(list(places(state)))


def replacing(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(state: dict[Any, Any], chance: random.Random) -> None:
        container, key = pick(state, chance)
        container[key] = make(container[key])

    return change


def over_the_same_memory(x: torch.Tensor, before: int) -> torch.Tensor:
    """A tensor of a storage of its own over a window that begins `before` bytes ahead of x, where there is room."""
    before = min(before, x.data_ptr() - x.untyped_storage().data_ptr())
    num_bytes = before + reach(x.shape, x.stride()) * x.itemsize
    raw = bytes_at(x.data_ptr() - before, num_bytes, x)
    return torch.empty(0, dtype=x.dtype).set_(raw.untyped_storage(), before // x.itemsize, x.shape, x.stride())


def swap_memory(x: torch.Tensor) -> torch.Tensor:
    x.data = x.data.clone()
    return x


def swap_strides(x: torch.Tensor) -> torch.Tensor:
    x.data = x.data.t() if x.dim() == 2 else x.data.view(1, -1)
    return x


def flip_grad(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_(not x.requires_grad) if x.is_leaf and x.is_floating_point() else x


def share_object(state: dict[Any, Any], chance: random.Random) -> None:
    (one, key), (other, other_key) = pick(state, chance), pick(state, chance)
    one[key] = other[other_key]


def share_memory(state: dict[Any, Any], chance: random.Random) -> None:
    (one, key), (other, other_key) = pick(state, chance), pick(state, chance)
    one[key] = other[other_key].detach().reshape(-1)[chance.randrange(2) :]


def break_ties(state: dict[Any, Any], chance: random.Random) -> None:
    for container, key in places(state):
        container[key] = container[key].clone().detach()


def rename(state: dict[Any, Any], chance: random.Random) -> None:
    container = chance.choice([state, state["optimizer"]["state"], state["optimizer"]["state"][0], state["extra"]])
    key = chance.choice(list(container))
    if key not in ("optimizer", "extra", "state", 0):
        items = [((f"{key}!" if k == key else k), v) for k, v in container.items()]
        container.clear()
        container.update(items)


def retype_key(state: dict[Any, Any], chance: random.Random) -> None:
    table = state["optimizer"]["state"]
    items = [((str(k) if k == 1 else 1 if k == "1" else k), v) for k, v in table.items()]
    table.clear()
    table.update(items)


def change_leaf(state: dict[Any, Any], chance: random.Random) -> None:
    values = [0, 1, True, False, None, 0.0, -0.0, float("nan"), "x", "", 2**70, [1], [1.0], {"a": 1}, (), torch.float32]
    state["extra"][chance.choice(["a", "b"])] = chance.choice(values)
    state["optimizer"]["param_groups"][0]["lr"] = chance.choice([0.1, 0.2])
    state["extra"]["ints"][0] = chance.choice([0, 1, False])


def change_history(state: dict[Any, Any], chance: random.Random) -> None:
    state["extra"]["history"] = [0.5] * chance.randrange(3)


def new_bytes(state: dict[Any, Any], chance: random.Random) -> None:
    state["extra"]["rng"] = torch.randint(0, 256, (100,), dtype=torch.uint8)
    state["extra"]["array"] = np.full(chance.choice([7, 7, 8]), 3.0, chance.choice(["f4", "i4", "u4"]))


def swap_slots(state: dict[Any, Any], chance: random.Random) -> None:
    extra = state["extra"]
    extra["a"], extra["rng"] = extra["rng"], extra["a"]


def other_kind(state: dict[Any, Any], chance: random.Random) -> None:
    key = chance.choice(["masters", "model"])
    value = state[key]
    kinds = {list: tuple, tuple: list, dict: OrderedDict, OrderedDict: dict}
    state[key] = kinds[type(value)](value)


def other_metadata(state: dict[Any, Any], chance: random.Random) -> None:
    if isinstance(state["model"], OrderedDict) and vars(state["model"]):
        state["model"]._metadata["0.0"] = chance.choice([{"version": 1}, {"version": 2}, {"v": 1}, {}])


def reorder(state: dict[Any, Any], chance: random.Random) -> None:
    if isinstance(state["model"], OrderedDict):
        state["model"].move_to_end(next(iter(state["model"])))


def resize_storage(state: dict[Any, Any], chance: random.Random) -> None:
    container, key = pick(state, chance)
    storage = container[key].untyped_storage()
    if storage.resizable():
        storage.resize_(storage.nbytes() + chance.choice([0, 8]))


def add_or_remove(state: dict[Any, Any], chance: random.Random) -> None:
    masters = list(state["masters"])
    state["masters"] = masters[:-1] if chance.randrange(2) and len(masters) > 1 else [*masters, torch.ones(2)]


CHANGES: dict[str, Change] = {
    "nothing": lambda state, chance: None,
    "values": lambda state, chance: [c[k].detach().fill_(1) for c, k in places(state)] and None,
    "detached": replacing(lambda x: x.detach()),
    "all detached": lambda state, chance: [c.__setitem__(k, c[k].detach()) for c, k in places(state)] and None,
    "moved": replacing(lambda x: x.detach().clone()),
    "swapped memory": replacing(swap_memory),
    "swapped strides": replacing(swap_strides),
    "resized": replacing(lambda x: torch.ones(*x.shape, 2)),
    "viewed as another dtype": replacing(lambda x: x.detach().view(torch.uint8) if x.dim() else x),
    "converted": replacing(lambda x: x.detach().to(torch.complex128 if x.is_complex() else torch.float64)),
    "conjugated": replacing(lambda x: x.conj() if x.is_complex() else torch._neg_view(x) if x.dtype.is_signed else x),
    "gradient": replacing(flip_grad),
    "parameter": replacing(lambda x: torch.nn.Parameter(x.detach(), requires_grad=False)),
    "other storage, same memory": replacing(lambda x: over_the_same_memory(x.detach(), 0) if x.numel() else x),
    "other start, same memory": replacing(lambda x: over_the_same_memory(x.detach(), 16) if x.numel() else x),
    "offset": replacing(lambda x: torch.cat([torch.ones(4, dtype=x.dtype), x.detach().reshape(-1)])[4:]),
    "every second": replacing(lambda x: torch.ones(9)[::2]),
    "every third": replacing(lambda x: torch.ones(15)[::3]),
    "empty": replacing(lambda x: torch.empty(0, 3)),
    "same object": share_object,
    "shared memory": share_memory,
    "ties broken": break_ties,
    "renamed": rename,
    "key of another type": retype_key,
    "leaf": change_leaf,
    "history": change_history,
    "new bytes": new_bytes,
    "slots": swap_slots,
    "kind": other_kind,
    "metadata": other_metadata,
    "order": reorder,
    "storage": resize_storage,
    "number": add_or_remove,
}
