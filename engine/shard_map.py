"""Which rank holds which part of which tensor: pure data, the same in every save of one structure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tidegate.codec.words import DTYPE_OF_NAME

from .paths import shown
from .types import JSON

Offsets = tuple[int, ...]
PathSteps = tuple[JSON, ...]
"""How a value is reached from the state's root: text is a key of a dict, a number a place in a list."""

OBJECT_SUFFIX = "@obj"


@dataclass(frozen=True, slots=True)
class GlobalSpec:
    """A tensor over all ranks: the name of its dtype, its whole shape, and its `requires_grad`."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How tensors of one shape are cut, and who holds the shards. Columns by shard.

    Attributes:
        offsets: Where each begins in the tensor.
        sizes: How long it is along each dimension.
        ranks: The rank whose object holds it.
    """

    offsets: tuple[Offsets, ...]
    sizes: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]


@dataclass(slots=True)
class ShardMap:
    """All tensors and other values of a sharded checkpoint.

    Most tensors are cut alike, so the layouts are few, however many the tensors and ranks.

    Attributes:
        num_ranks: How many objects there are.
        names: The tensors' names (`fqn`).
        specs: The distinct specs.
        tensor_spec: Index into `specs`, by tensor.
        layouts: The distinct layouts.
        tensor_layout: Index into `layouts`, by tensor.
        objects: For each value that is no tensor, the rank whose object holds it.
        places: For each value, how many tensors come before it in the state, so that keys keep their order.
        paths: Where in the nested state a name stands; None: the state was flat.
    """

    num_ranks: int
    names: list[str] = field(default_factory=list)
    specs: list[GlobalSpec] = field(default_factory=list)
    tensor_spec: list[int] = field(default_factory=list)
    layouts: list[ShardLayout] = field(default_factory=list)
    tensor_layout: list[int] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    paths: Mapping[str, PathSteps] | None = None

    def tensors(self) -> Iterator[tuple[str, GlobalSpec, ShardLayout]]:
        """Yield each tensor's name, spec and layout."""
        specs, layouts = self.specs, self.layouts
        for name, spec, layout in zip(self.names, self.tensor_spec, self.tensor_layout, strict=True):
            yield name, specs[spec], layouts[layout]

    def ordered(self) -> list[str]:
        """Return the names of tensors and values in the order of the state."""
        rows = [((place, 0), name) for place, name in enumerate(self.names, 1)]
        rows += [((place, 1), name) for place, name in zip(self.places, self.objects, strict=True)]
        return [name for _, name in sorted(rows, key=lambda row: row[0])]


class ShardMapMaker:
    """Collects tensors one by one, and finds those that are alike.

    Args:
        num_ranks: How many ranks write.
    """

    def __init__(self, num_ranks: int) -> None:
        self.made = ShardMap(num_ranks)
        self._specs: dict[GlobalSpec, int] = {}
        self._layouts: dict[ShardLayout, int] = {}

    def add(self, name: str, spec: GlobalSpec, layout: ShardLayout) -> None:
        """Add a tensor."""
        self.add_numbers([(name, (self.spec_number(spec), self.layout_number(layout)))])

    def add_numbers(self, tensors: Iterable[tuple[str, tuple[int, int]]]) -> None:
        """Add tensors whose specs and layouts are known by number."""
        for name, (spec, layout) in tensors:
            self.made.names.append(name)
            self.made.tensor_spec.append(spec)
            self.made.tensor_layout.append(layout)

    def add_value(self, name: str, rank: int, place: int | None = None) -> None:
        """Add a value that is no tensor, by default behind the tensors that were added."""
        self.made.objects[name] = rank
        self.made.places.append(len(self.made.names) if place is None else place)

    def spec_number(self, spec: GlobalSpec) -> int:
        """Return the number of a spec."""
        number = self._specs.setdefault(spec, len(self._specs))
        if number == len(self.made.specs):
            self.made.specs.append(spec)
        return number

    def layout_number(self, layout: ShardLayout) -> int:
        """Return the number of a layout."""
        number = self._layouts.setdefault(layout, len(self._layouts))
        if number == len(self.made.layouts):
            self.made.layouts.append(layout)
        return number


def shard_name(name: str, offsets: Offsets) -> str:
    """Return what a shard is called in its rank's object: such as `model.w@128,0`."""
    return f"{name}@{','.join(map(str, offsets))}"


def object_name(name: str) -> str:
    """Return what a value that is no tensor is called in its rank's object."""
    return name + OBJECT_SUFFIX


def check_shard_map(shards: ShardMap) -> None:
    """Check that every tensor's shards lie inside it, are as many elements as it, and that no name comes twice.

    Raises:
        ValueError: What is wrong.
    """
    if len({*shards.names, *shards.objects}) != len(shards.names) + len(shards.objects):
        raise ValueError("a name comes twice")
    if any(rank >= shards.num_ranks for rank in shards.objects.values()):
        raise ValueError(f"a value lies on a rank of more than {shards.num_ranks}")
    for spec in shards.specs:
        if spec.dtype not in DTYPE_OF_NAME:
            raise ValueError(f"{shown(spec.dtype)} is no dtype that this build knows")
    for layout in shards.layouts:
        _check_layout(layout, shards.num_ranks)
    pairs = dict(zip(zip(shards.tensor_spec, shards.tensor_layout, strict=True), shards.names, strict=True))
    for (spec_number, layout_number), name in pairs.items():
        if spec_number >= len(shards.specs) or layout_number >= len(shards.layouts):
            raise ValueError(f"tensor {shown(name)} names a spec or a layout that is not there")
        _check_cover(name, shards.specs[spec_number].shape, shards.layouts[layout_number])


def _check_layout(layout: ShardLayout, num_ranks: int) -> None:
    if not len(layout.offsets) == len(layout.sizes) == len(layout.ranks):
        raise ValueError("the columns of a layout are not equally long")
    if any(rank >= num_ranks for rank in layout.ranks):
        raise ValueError(f"a shard lies on a rank of more than {num_ranks}")
    if len(set(layout.offsets)) != len(layout.offsets):
        raise ValueError("two shards of a layout begin at the same place")


def _check_cover(name: str, shape: tuple[int, ...], layout: ShardLayout) -> None:
    for offsets, sizes in zip(layout.offsets, layout.sizes, strict=True):
        if not len(offsets) == len(sizes) == len(shape) or any(
            start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a shard of {shown(name)} leaves the tensor of shape {list(shape)}")
    num_held = sum(map(math.prod, layout.sizes))
    if num_held != math.prod(shape):
        raise ValueError(
            f"the shards of {shown(name)} hold {num_held} elements; the whole tensor has {math.prod(shape)}"
        )
