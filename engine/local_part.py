"""What this rank has of a sharded state: its boxes of the tensors, the classes they fall into, and the live shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from tidegate.codec.words import dtype_name

from .box_spans import Box
from .collector import collector_at_rest
from .errors import UnsupportedStateError
from .flat_track import FlatTrack, Leaves
from .flatten import Flat, flatten
from .shard_map import GlobalSpec, object_name, shard_name
from .shard_plan import RankNames, RankPart, Share, TensorClass
from .tensor_kinds import TensorKinds, wrappers_of


class LocalPart:
    """This rank's part of all states of one structure. It keeps no tensor.

    Args:
        part: For the coordinator.
        names: For the coordinator, if it does not know them.
    """

    def __init__(self, part: RankPart, names: RankNames) -> None:
        self.part = part
        self.names = names
        self._written: tuple[Share | None, Written] | None = None

    def written(self, share: Share | None) -> Written:
        """Return what this rank writes of it; None: all. Kept, as it is the same at every save."""
        if self._written is None or self._written[0] is not share:
            self._written = share, self._select(share)
        return self._written[1]

    def _select(self, share: Share | None) -> Written:
        classes, here = self.part.classes, self.names
        shards = list(range(len(here.tensors)) if share is None else share.kept(here.class_of))
        values = list(range(len(here.values)) if share is None else share.values)
        labels = [shard_name(here.tensors[i], classes[here.class_of[i]][1][0]) for i in shards]
        return Written(shards, values, labels + [object_name(here.values[i]) for i in values])


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank writes.

    Attributes:
        shards: Numbers of tensors.
        values: Numbers of other values.
        labels: What they are called in the rank's object, first the shards.
    """

    shards: Sequence[int]
    values: Sequence[int]
    labels: Sequence[str]


@dataclass(frozen=True, slots=True)
class LocalState:
    """A state, as this rank has it.

    Attributes:
        local: Its structure.
        shards: The live shards, by number of the tensor.
        values: What is no tensor, by number.
        wrappers: The DTensors.
    """

    local: LocalPart
    shards: Sequence[torch.Tensor]
    values: Sequence[object]
    wrappers: Sequence[DTensor]

    def items(self, share: Share | None) -> dict[str, object]:
        """Return what this rank writes, by its name in the rank's object; None: all that it has."""
        written = self.local.written(share)
        live = chain((self.shards[i] for i in written.shards), (self.values[i] for i in written.values))
        return dict(zip(written.labels, live, strict=True))


class PartFinder:
    """Finds this rank's part of states, one after another; fast where one has the structure of the one before.

    It remembers that structure in names, types and numbers, and keeps nothing of the states alive. Used by one thread.
    """

    def __init__(self) -> None:
        self._box = BoxFinder()
        self._known: _Known | None = None

    def find(self, state: object) -> LocalState:
        """Look at a state. Tensors of meshes that this rank is not in are left out.

        Raises:
            UnsupportedStateError: It is no mapping, nests too deeply, has a key that cannot be saved, or a tensor that
                is cut in a way that `torch.distributed.checkpoint` cannot tell as one box.
        """
        with collector_at_rest(), torch.no_grad():
            found = None if self._known is None else self._known.find(state)
            return self._find_anew(state) if found is None else found

    def _find_anew(self, state: object) -> LocalState:
        flat = flatten(state)
        numbers: dict[TensorClass, int] = {}
        names: list[str] = []
        class_of: list[int] = []
        places: list[int] = []
        for place, (name, tensor) in enumerate(flat.tensors.items()):
            box = self._box(name, tensor)
            if box is None:
                continue
            spec = GlobalSpec(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)
            class_of.append(numbers.setdefault((spec, box), len(numbers)))
            names.append(name)
            places.append(place)
        here = RankNames(tuple(names), tuple(class_of), tuple(flat.values), _places(names, flat), flat.paths)
        local = LocalPart(RankPart(here.digest(), tuple(numbers)), here)
        leaves = Leaves(list(flat.tensors.values()), list(flat.values.values()))
        self._known = known = _Known(FlatTrack(state), TensorKinds(leaves.tensors), places, local)
        return known.take(leaves)


@dataclass(frozen=True, slots=True)
class _Known:
    """What a finder remembers.

    Attributes:
        track: How to take the state apart again.
        kinds: What its tensors were.
        places: Which of them this rank has a part of.
        local: What came of it.
    """

    track: FlatTrack
    kinds: TensorKinds
    places: Sequence[int]
    local: LocalPart

    def find(self, state: object) -> LocalState | None:
        """Look at a state; None if it has, or may have, another structure."""
        leaves = self.track.follow(state)
        return None if leaves is None or not self.kinds.are_those_of(leaves.tensors) else self.take(leaves)

    def take(self, leaves: Leaves) -> LocalState:
        """Take the shards of a state whose leaves are known to be of this structure."""
        tensors = leaves.tensors
        here = tensors if len(self.places) == len(tensors) else [tensors[i] for i in self.places]
        shards = [tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach() for tensor in here]
        return LocalState(self.local, shards, leaves.values, wrappers_of(tensors))


def _places(tensors: Sequence[str], flat: Flat) -> tuple[int, ...]:
    """Return how many of the tensors come before each value."""
    is_tensor = set(tensors)
    num_before = 0
    places = []
    for name in flat.paths:
        if name in is_tensor:
            num_before += 1
        elif name in flat.values:
            places.append(num_before)
    return tuple(places)


class BoxFinder:
    """Finds which box of a tensor this rank has; remembers the layouts that it has met."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[object, ...], Box | None] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> Box | None:
        """Return the box; None if this rank is not in the tensor's mesh.

        Raises:
            UnsupportedStateError: The shard is not one box.
        """
        if not isinstance(tensor, DTensor):
            return (0,) * tensor.dim(), tuple(tensor.shape)
        key = (tuple(tensor.shape), tensor.device_mesh, tensor.placements)
        if key not in self._boxes:
            self._boxes[key] = self._box_of_dtensor(name, tensor)
        return self._boxes[key]

    @staticmethod
    def _box_of_dtensor(name: str, tensor: DTensor) -> Box | None:
        if tensor.device_mesh.get_coordinate() is None:
            return None
        items: list[WriteItem] = tensor.__create_write_items__(name, tensor)
        if len(items) != 1 or items[0].tensor_data is None:
            raise UnsupportedStateError(f"cannot save {name}: its shard is not one box of it", path=name)
        chunk = items[0].tensor_data.chunk
        return tuple(chunk.offsets), tuple(chunk.sizes)
