"""Nested states of DTensors, tensors and values, and changes to them that ranks must see, or must see through.

They are made on rank 1 of 4 that a process group of no messages pretends to have.
"""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Pair = namedtuple("Pair", "a b")
State = dict[Any, Any]
Change = Callable[[State, random.Random], None]

_KEYS = ["w", "b", "w.b", "", "é", "\ud800", 0, 1, 2, "0", "1", True, None, (1, 2), b"k", 1.0]
_ODD_KEYS = [frozenset({1}), object, 0.0, -0.0, (True, 2)]
_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
_SHAPES = [(4,), (2, 3), (3, 2), (), (0, 3)]


class Maker:
    """Makes random states.

    Args:
        chance: Where the randomness comes from.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def state(self) -> State:
        """A trainer's state, and some more."""
        rows = {f"layer.{i}.w": {"exp_avg": self.dtensor((4, 3)), "step": torch.tensor(1.0)} for i in range(2)}
        return {
            "model": OrderedDict((name, self.dtensor((4, 3))) for name in rows),
            "optimizer": {"state": rows, "groups": [{"lr": 0.1, "params": list(rows)}]},
            "mixed": {"a": {"lr": 0.1, "x": torch.ones(2)}, "b": {"x": torch.ones(3), "betas": (0.9, 0.95)}},
            "numbered": {0: self.dtensor(), 1: torch.ones(1), 2: {"lr": 0.1}},
            "table": {1: {"0": torch.ones(2), "1": torch.ones(1)}, 0: {"1": torch.ones(3), "2": torch.ones(2)}},
            "more": self.container(0),
            "step": 3,
        }

    def container(self, depth: int) -> Any:
        """Any container."""
        kind = self._chance.choice([dict, dict, dict, OrderedDict, list, list, tuple, defaultdict, UserDict])
        things = [self.thing(depth + 1) for _ in range(self._chance.randrange(4))]
        if kind in (list, tuple):
            return kind(things)
        keys = self._chance.sample(_KEYS, len(things))
        items = zip(keys, things, strict=True)
        return defaultdict(list, items) if kind is defaultdict else kind(dict(items))

    def thing(self, depth: int = 3) -> Any:
        """A container or a leaf."""
        if depth < 4 and self._chance.random() < 0.4:
            return self.container(depth)
        return self._chance.choice([self.value, self.tensor, self.dtensor])()

    def value(self) -> Any:
        """A leaf that is no tensor, though one may have a tensor in it."""
        values = [0, 1.5, True, None, "text", b"x", [], {}, (), [1, "a"], {"k": {}}, torch.float32, {1, 2}, range(3)]
        return self._chance.choice([*values, Pair(1, torch.ones(2)), [[[]]], UserDict()])

    def tensor(self) -> torch.Tensor:
        """A tensor."""
        x = torch.ones(self._chance.choice(_SHAPES), dtype=self._chance.choice(_DTYPES))
        return torch.nn.Parameter(x, requires_grad=x.is_floating_point()) if self._chance.random() < 0.2 else x

    def dtensor(self, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
        """A DTensor, on this rank or not."""
        mesh = self._chance.choice(_meshes())
        cuts: list[Placement] = [Shard(0), Shard(1), Replicate()]
        placements = [self._chance.choice(cuts) for _ in range(mesh.ndim)]
        x = DTensor.from_local(torch.ones(shape), mesh, placements, run_check=False)
        return torch.nn.Parameter(x) if self._chance.random() < 0.3 else x


def _meshes() -> list[DeviceMesh]:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return [init_device_mesh("cpu", (4,)), whole, whole["a"], whole["b"], DeviceMesh("cpu", [0, 2])]


def containers(x: Any) -> Iterator[Any]:
    """Every container that can be changed."""
    if isinstance(x, dict | list | UserDict):
        yield x
    if isinstance(x, dict | list | tuple | UserDict):
        for inner in list(x.values() if isinstance(x, dict | UserDict) else x):
            yield from containers(inner)


def slots(state: State) -> list[tuple[Any, Any]]:
    """(container, key) of everything that can be replaced."""
    return [(x, key) for x in containers(state) for key in list(range(len(x)) if isinstance(x, list) else x)]


def _replacing(make: Callable[[Any, random.Random], Any]) -> Change:
    def change(state: State, chance: random.Random) -> None:
        container, key = chance.choice(slots(state))
        container[key] = make(container[key], chance)

    return change


def _replacing_tensor(make: Callable[[torch.Tensor, random.Random], Any]) -> Change:
    def change(state: State, chance: random.Random) -> None:
        found = [(x, key) for x, key in slots(state) if isinstance(x[key], torch.Tensor)]
        if found:
            container, key = chance.choice(found)
            container[key] = make(container[key], chance)

    return change


def _another_cut(x: torch.Tensor, chance: random.Random) -> Any:
    if not isinstance(x, DTensor) or not x.dim():
        return x
    kinds = [Shard(0), Replicate(), _StridedShard(0, split_factor=2), Partial()]
    placements = [chance.choice(kinds) for _ in x.placements]
    local = x.to_local().detach()
    return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def _another_mesh(x: torch.Tensor, chance: random.Random) -> Any:
    if not isinstance(x, DTensor):
        return x
    mesh = chance.choice([mesh for mesh in _meshes() if mesh.ndim == x.device_mesh.ndim])
    local = x.to_local().detach()
    return DTensor.from_local(local, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _another_kind(x: Any, chance: random.Random) -> Any:
    kinds: dict[type, list[Any]] = {
        dict: [OrderedDict, UserDict, lambda x: defaultdict(int, x)], OrderedDict: [dict], UserDict: [dict],
        defaultdict: [dict], list: [tuple], tuple: [list],
    }  # fmt: skip
    return chance.choice(kinds.get(type(x), [lambda x: x]))(x)


def _flip_grad(x: torch.Tensor, chance: random.Random) -> Any:
    return x.detach().requires_grad_(not x.requires_grad) if x.is_floating_point() else x


def _dicts(state: State) -> list[State]:
    """Dicts that are not empty; those that have tensors three times, as they are few."""
    found = [x for x in containers(state) if isinstance(x, dict) and x]
    return found + [x for x in found if any(isinstance(value, torch.Tensor) for value in x.values())] * 2


def _rekey(state: State, chance: random.Random) -> None:
    container = chance.choice(_dicts(state))
    old, new = chance.choice(list(container)), chance.choice(_KEYS + _ODD_KEYS)
    items = [(new if key is old else key, value) for key, value in container.items()]
    container.clear()
    container.update(items)


def _retype_key(state: State, chance: random.Random) -> None:
    twins = {1: [True, 1.0, "1"], 0: [False, 0.0, "0"], "1": [1], "0": [0], (1, 2): [(True, 2)]}
    found = [(x, key) for x in _dicts(state) for key in x if key in twins]
    if found:
        container, old = chance.choice(found)
        new = chance.choice(twins[old])
        items = [(new if key is old else key, value) for key, value in container.items()]
        container.clear()
        container.update(items)


def _reorder(state: State, chance: random.Random) -> None:
    container = chance.choice(_dicts(state))
    items = list(container.items())
    chance.shuffle(items)
    container.clear()
    container.update(items)


def _remove(state: State, chance: random.Random) -> None:
    container, key = chance.choice(slots(state))
    if len(state) > 1 or container is not state:
        del container[key]


def _add(state: State, chance: random.Random) -> None:
    container, thing = chance.choice(list(containers(state))), Maker(chance).thing()
    if isinstance(container, list):
        container.insert(chance.randrange(len(container) + 1), thing)
    else:
        container[chance.choice(_KEYS)] = thing


def _share(state: State, chance: random.Random) -> None:
    (one, key), (other, other_key) = chance.choice(slots(state)), chance.choice(slots(state))
    if not any(x is one for x in containers(other[other_key])):  # no cycles
        one[key] = other[other_key]


def _move_between_rows(state: State, chance: random.Random) -> None:
    """The keys of all rows, one behind the other, stay what they were."""
    table = state.get("table")
    rows = [row for row in table.values() if isinstance(row, dict)] if isinstance(table, dict) else []
    if len(rows) > 1 and len(rows[0]) > 1:
        key = list(rows[0])[-1]
        moved = {key: rows[0].pop(key), **rows[1]}
        rows[1].clear()
        rows[1].update(moved)


def _nest(x: Any, chance: random.Random) -> Any:
    for _ in range(chance.choice([1, 2, 196, 197, 198, 199, 200])):
        x = [x]
    return x


CHANGES: dict[str, Change] = {
    "nothing": lambda state, chance: None,
    "value": _replacing(lambda x, chance: x if isinstance(x, torch.Tensor) else Maker(chance).value()),
    "anything": _replacing(lambda x, chance: Maker(chance).thing()),
    "becomes a value": _replacing_tensor(lambda x, chance: Maker(chance).value()),
    "another tensor": _replacing_tensor(lambda x, chance: x.detach().clone()),
    "another dtype": _replacing_tensor(lambda x, chance: x.detach().to(torch.float64)),
    "another shape": _replacing_tensor(lambda x, chance: x.detach().reshape(1, *x.shape)),
    "another cut": _replacing_tensor(_another_cut),
    "another mesh": _replacing_tensor(_another_mesh),
    "becomes a tensor": _replacing_tensor(lambda x, chance: x.to_local() if isinstance(x, DTensor) else x),
    "gradient": _replacing_tensor(_flip_grad),
    "parameter": _replacing_tensor(lambda x, chance: torch.nn.Parameter(x.detach(), requires_grad=False)),
    "kind of container": _replacing(_another_kind),
    "key": _rekey,
    "type of a key": _retype_key,
    "order": _reorder,
    "moved between rows": _move_between_rows,
    "removed": _remove,
    "added": _add,
    "same object": _share,
    "nested": _replacing(_nest),
}
