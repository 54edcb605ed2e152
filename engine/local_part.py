"""What this rank has of a sharded state: its boxes of the tensors, the classes they fall into, and the live shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from tidegate.codec.words import dtype_name

from .box_spans import Box
from .errors import UnsupportedStateError
from .flatten import Flat
from .shard_map import GlobalSpec, object_name, shard_name
from .shard_plan import RankNames, RankPart, Share, TensorClass


@dataclass(frozen=True, slots=True)
class LocalPart:
    """This rank's part of a state.

    Attributes:
        part: For the coordinator.
        names: For the coordinator, if it does not know them.
        shards: The live shards, by number of the tensor.
        values: What is no tensor, by number.
    """

    part: RankPart
    names: RankNames
    shards: Sequence[torch.Tensor]
    values: Sequence[object]

    def items(self, share: Share | None) -> dict[str, object]:
        """Return what this rank writes, by its name in the rank's object; None: all that it has."""
        kept = range(len(self.shards)) if share is None else share.kept(self.names.class_of)
        kept_values = range(len(self.values)) if share is None else share.values
        classes, class_of = self.part.classes, self.names.class_of
        found: dict[str, object] = {
            shard_name(self.names.tensors[i], classes[class_of[i]][1][0]): self.shards[i] for i in kept
        }
        found.update((object_name(self.names.values[i]), self.values[i]) for i in kept_values)
        return found


class PartFinder:
    """Finds this rank's part of states, one after another."""

    def __init__(self) -> None:
        self._box = BoxFinder()

    def find(self, flat: Flat) -> LocalPart:
        """Look at a state's tensors. Tensors of meshes that this rank is not in are left out.

        Raises:
            UnsupportedStateError: A tensor is cut in a way that `torch.distributed.checkpoint` cannot tell as one box.
        """
        numbers: dict[TensorClass, int] = {}
        names: list[str] = []
        class_of: list[int] = []
        shards: list[torch.Tensor] = []
        with torch.no_grad():
            for name, tensor in flat.tensors.items():
                box = self._box(name, tensor)
                if box is None:
                    continue
                spec = GlobalSpec(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)
                class_of.append(numbers.setdefault((spec, box), len(numbers)))
                names.append(name)
                shards.append(tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach())
        here = RankNames(tuple(names), tuple(class_of), tuple(flat.values), _places(names, flat), flat.paths)
        return LocalPart(RankPart(here.digest(), tuple(numbers)), here, shards, list(flat.values.values()))


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
