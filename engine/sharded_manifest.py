"""The manifest of a checkpoint that several ranks wrote together (storage/FORMAT.md). Checked before it is believed."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .collector import collector_at_rest
from .container import ObjectRecord
from .errors import CorruptCheckpointError
from .json_fields import as_bool, as_dict, as_int, as_ints, as_list, as_str
from .manifest import FORMAT_NAME, FORMAT_VERSION
from .paths import shown
from .shard_map import GlobalSpec, PathSteps, ShardLayout, ShardMap, check_shard_map
from .types import JSON

FEATURE = "sharded"
_MARK = b'"features": ["sharded"]'
_HEAD_BYTES = 256


@dataclass(frozen=True, slots=True)
class ShardedManifest:
    """What a sharded checkpoint holds.

    Attributes:
        step: The step.
        attempt: The attempt that wrote it.
        created: Versions and time, for people.
        metadata: The caller's own JSON.
        objects: The object of each rank; each has its own manifest of its shards.
        shards: Which rank holds what.
    """

    step: int
    attempt: str
    created: Mapping[str, JSON]
    metadata: Mapping[str, JSON]
    objects: tuple[ObjectRecord, ...]
    shards: ShardMap


def is_sharded(text: bytes) -> bool:
    """Tell, from its first lines, whether a manifest is one of a sharded checkpoint."""
    return _MARK in text[:_HEAD_BYTES]


def dump_sharded(manifest: ShardedManifest, shards_text: bytes | None = None) -> bytes:
    """Write a manifest as JSON, one top-level key a line; what is the same in each save of one structure comes last.

    Args:
        manifest: The manifest.
        shards_text: What `dump_shards` has written of its shards already.
    """
    fields: dict[str, JSON] = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "features": [FEATURE],
        "step": manifest.step,
        "attempt": manifest.attempt,
        "created": dict(manifest.created),
        "metadata": dict(manifest.metadata),
        "objects": [[o.key, o.num_bytes, f"{o.tail_digest:016x}"] for o in manifest.objects],
    }
    shards_text = dump_shards(manifest.shards) if shards_text is None else shards_text
    return ("{\n" + ",\n".join(_lines(fields)) + ",\n").encode() + shards_text + b"\n}\n"


def dump_shards(shards: ShardMap) -> bytes:
    """Write the lines of the manifest that depend on the structure alone."""
    fields: dict[str, JSON] = {
        "num_ranks": shards.num_ranks,
        "specs": [_spec_node(spec) for spec in shards.specs],
        "layouts": [_layout_node(layout) for layout in shards.layouts],
        "tensor_spec": _pack(shards.tensor_spec),
        "tensor_layout": _pack(shards.tensor_layout),
        "tensors": list(shards.names),
        "values": [[name, rank, n] for (name, rank), n in zip(shards.objects.items(), shards.places, strict=True)],
        "paths": None if shards.paths is None else _path_nodes(shards.paths),
    }
    return ",\n".join(_lines(fields)).encode()


def _lines(fields: Mapping[str, JSON]) -> list[str]:
    with collector_at_rest():
        return [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in fields.items()]


def _spec_node(spec: GlobalSpec) -> JSON:
    node: dict[str, JSON] = {"dtype": spec.dtype, "shape": list(spec.shape)}
    if spec.requires_grad:
        node["requires_grad"] = True
    return node


def _layout_node(layout: ShardLayout) -> JSON:
    """One size for all shards is written once; the ranks 0, 1, 2, … are left out."""
    sizes = set(layout.sizes)
    node: dict[str, JSON] = {"offsets": [list(offsets) for offsets in layout.offsets]}
    node["sizes"] = list(layout.sizes[0]) if len(sizes) == 1 else [list(size) for size in layout.sizes]
    if layout.ranks != tuple(range(len(layout.ranks))):
        node["ranks"] = _pack(layout.ranks)
    return node


def _path_nodes(paths: Mapping[str, PathSteps]) -> JSON:
    """A name is its path's steps joined by dots, as a rule; those of which it is not true are written down."""
    return {name: list(steps) for name, steps in paths.items() if steps != tuple(name.split("."))}


def _pack(values: Sequence[int]) -> JSON:
    """Write [value, count] pairs where that is shorter than the values themselves."""
    num_runs = sum(map(operator.ne, values, itertools.islice(values, 1, None))) + 1
    if num_runs * 2 >= len(values):
        return list(values)
    return {"runs": [[value, len(list(group))] for value, group in itertools.groupby(values)]}


def parse_sharded(text: bytes, key: str) -> ShardedManifest:
    """Read and check a manifest. Raises CorruptCheckpointError. Runs nothing that the text names."""
    try:
        with collector_at_rest():
            fields = as_dict(json.loads(text))
            version = as_int(fields["version"])
            if fields["format"] != FORMAT_NAME or version != FORMAT_VERSION:
                raise ValueError(f"it is of version {version}; install the tidegate that wrote it")
            if fields["features"] != [FEATURE]:
                raise ValueError(f"its features are {shown(fields['features'])}; install the tidegate that wrote it")
            manifest = ShardedManifest(
                step=as_int(fields["step"]),
                attempt=as_str(fields["attempt"]),
                created=as_dict(fields["created"]),
                metadata=as_dict(fields["metadata"]),
                objects=tuple(_parse_object(item) for item in as_list(fields["objects"])),
                shards=_parse_shards(fields),
            )
            check_shard_map(manifest.shards)
            if len(manifest.objects) != manifest.shards.num_ranks or len(
                {item.key for item in manifest.objects}
            ) != len(manifest.objects):
                raise ValueError("it does not name one object a rank")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CorruptCheckpointError(
            f"manifest {key} is damaged or unreadable: {exc or repr(exc)}", key=key, stage="open"
        ) from exc
    return manifest


def _parse_object(item: JSON) -> ObjectRecord:
    key, num_bytes, tail_digest = as_list(item)
    return ObjectRecord(as_str(key), as_int(num_bytes), int(as_str(tail_digest), 16))


def _parse_shards(fields: dict[str, JSON]) -> ShardMap:
    names = [as_str(name) for name in as_list(fields["tensors"])]
    objects: dict[str, int] = {}
    places: list[int] = []
    for item in as_list(fields["values"]):
        name, rank, place = as_list(item)
        objects[as_str(name)] = as_int(rank)
        places.append(as_int(place))
    if len(objects) != len(as_list(fields["values"])):
        raise ValueError("a value's name comes twice")
    return ShardMap(
        num_ranks=as_int(fields["num_ranks"], minimum=1),
        names=names,
        specs=[_parse_spec(node) for node in as_list(fields["specs"])],
        tensor_spec=_unpack(fields["tensor_spec"], len(names)),
        layouts=[_parse_layout(node) for node in as_list(fields["layouts"])],
        tensor_layout=_unpack(fields["tensor_layout"], len(names)),
        objects=objects,
        places=places,
        paths=None if fields["paths"] is None else _parse_paths(as_dict(fields["paths"]), [*names, *objects]),
    )


def _parse_spec(node: JSON) -> GlobalSpec:
    fields = as_dict(node)
    return GlobalSpec(as_str(fields["dtype"]), as_ints(fields["shape"]), as_bool(fields.get("requires_grad", False)))


def _parse_layout(node: JSON) -> ShardLayout:
    fields = as_dict(node)
    offsets = tuple(as_ints(item) for item in as_list(fields["offsets"]))
    sizes = as_list(fields["sizes"])
    is_one_size = not sizes or not isinstance(sizes[0], list)
    ranks = fields.get("ranks")
    return ShardLayout(
        offsets,
        (as_ints(sizes),) * len(offsets) if is_one_size else tuple(as_ints(item) for item in sizes),
        tuple(range(len(offsets))) if ranks is None else tuple(_unpack(ranks, len(offsets))),
    )


def _parse_paths(nodes: dict[str, JSON], names: Sequence[str]) -> dict[str, PathSteps]:
    unknown = nodes.keys() - set(names)
    if unknown:
        raise ValueError(f"there is a path for {shown(sorted(unknown)[0])}, which is not there")
    return {name: tuple(as_list(nodes[name])) if name in nodes else tuple(name.split(".")) for name in names}


def _unpack(item: JSON, max_values: int) -> list[int]:
    if isinstance(item, list):
        return list(as_ints(item))
    values: list[int] = []
    for run in as_list(as_dict(item)["runs"]):
        value, count = as_ints(run)
        if count > max_values - len(values):
            raise ValueError(f"it claims more than {max_values:,} values, and has no room for them")
        values.extend(itertools.repeat(value, count))
    return values
