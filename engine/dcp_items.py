"""What a rank of a DCP save has written: the names of the items, in its object and for the coordinator."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from .container import ObjectRecord
from .dcp_metadata import ItemName
from .shard_map import Offsets, object_name, shard_name


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank tells the coordinator of its object. It travels by DCP's own collectives.

    Attributes:
        record: The object.
        items: What is in it: the JSON list of `[name, offsets]`, compressed.
    """

    record: ObjectRecord
    items: bytes

    @classmethod
    def of(cls, record: ObjectRecord, items: Sequence[WriteItem]) -> RankResult:
        """Say that an object holds these items."""
        names = json.dumps([[item.index.fqn, _offsets(item)] for item in items], separators=(",", ":"))
        return cls(record, zlib.compress(names.encode(), 1))

    def item_names(self) -> list[ItemName]:
        """Return what the object holds."""
        rows = json.loads(zlib.decompress(self.items))
        return [(name, None if offsets is None else tuple(offsets)) for name, offsets in rows]


def stored_name(item: WriteItem) -> str:
    """Return what an item is called in its rank's object."""
    offsets = _offsets(item)
    return object_name(item.index.fqn) if offsets is None else shard_name(item.index.fqn, offsets)


def _offsets(item: WriteItem) -> Offsets | None:
    return None if item.type is WriteItemType.BYTE_IO else tuple(item.index.offset or ())
