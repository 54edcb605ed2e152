"""A state's way through JSON and plain bytes, without frames, files or threads."""

from __future__ import annotations

import json

import torch

from tidegate.codec.words import WordType
from tidegate.extents import spec_from_json, spec_to_json
from tidegate.state import describe, make_tensors, rebuild, validate_table
from tidegate.table import StateTable


def stored(table: StateTable) -> tuple[str, list[torch.Tensor]]:
    """Write a described state as JSON, and its extents as uint8 tensors."""
    text = json.dumps(
        {
            "skeleton": table.skeleton,
            "specs": [spec_to_json(spec) for spec in table.specs],
            "tensor_spec": table.tensor_spec,
            "tensor_extent": table.tensor_extent,
            "tensor_offset": table.tensor_offset,
            "extent_bytes": table.extent_bytes,
            "extent_words": [int(word) for word in table.extent_words],
        }
    )
    extents = []
    for source in table.sources:
        extent = torch.full((source.num_bytes,), 0xA5, dtype=torch.uint8, device=source.device)
        source.copy_to(extent)
        extents.append(extent)
    return text, extents


def read_table(text: str) -> StateTable:
    """Read and check what `stored` wrote."""
    fields = json.loads(text)
    fields["specs"] = [spec_from_json(spec) for spec in fields["specs"]]
    fields["extent_words"] = [WordType(word) for word in fields["extent_words"]]
    table = StateTable(**fields)
    validate_table(table)
    return table


def through(state: object) -> object:
    """Save and load a state."""
    text, extents = stored(describe(state))
    table = read_table(text)
    return rebuild(table.skeleton, make_tensors(table, extents))


def num_stored_bytes(state: object) -> int:
    """How many bytes of tensors a state would store."""
    return sum(describe(state).extent_bytes)
