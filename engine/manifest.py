"""The manifest: JSON that says what a checkpoint holds and where (storage/FORMAT.md). Checked before it is believed."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.codec.words import WordType

from .collector import collector_at_rest
from .container import ObjectRecord
from .delta import DELTA, DeltaPart, delta_from_json, delta_to_json
from .derived import Derivation
from .derived_json import DERIVED, derived_from_json, derived_to_json
from .errors import CorruptCheckpointError
from .json_fields import as_dict, as_int, as_ints, as_list, as_str
from .paths import shown
from .plan import MAX_CHUNK_BYTES, Chunk
from .table import StateTable, validate_table
from .tensors import spec_from_json, spec_to_json
from .types import JSON

FORMAT_NAME = "tidegate-manifest"
FORMAT_VERSION = 1
KNOWN_FEATURES = frozenset({DELTA, DERIVED})
_LEAST_BYTES_PER_TENSOR = len('["t",0]')
"""Each tensor stands in the skeleton once at least, so a short text cannot claim, in a run, a billion of them."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one checkpoint holds.

    Attributes:
        step: The step; -1 in an object that stands alone.
        attempt: The attempt that wrote it.
        created: Versions and time, for people; never used to decide anything.
        metadata: The caller's own JSON.
        objects: The objects that hold the frames. Empty in an object that stands alone, which is its own only one.
        table: Skeleton, tensors and extents, without live tensors.
        chunks: What each frame holds.
        derived: The chunks that have no frame.
        delta: What it is a difference to; None for a full checkpoint.
        parts: The keys of the state that are left; empty where all are.
    """

    step: int
    attempt: str
    created: Mapping[str, JSON]
    metadata: Mapping[str, JSON]
    objects: tuple[ObjectRecord, ...]
    table: StateTable
    chunks: tuple[Chunk, ...]
    derived: tuple[Derivation, ...] = ()
    delta: DeltaPart | None = None
    parts: tuple[str, ...] = ()

    @property
    def features(self) -> list[str]:
        """What a reader must know."""
        return [name for name, used in ((DELTA, self.delta is not None), (DERIVED, bool(self.derived))) if used]


def dump_manifest(manifest: Manifest) -> bytes:
    """Write a manifest as JSON, one top-level key a line."""
    table = manifest.table
    num_tensors = len(table.tensor_spec)
    is_identity = table.tensor_extent == list(range(num_tensors))
    fields: dict[str, JSON] = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "features": [*manifest.features],
        "step": manifest.step,
        "attempt": manifest.attempt,
        "created": dict(manifest.created),
        "metadata": dict(manifest.metadata),
        **({"parts": list(manifest.parts)} if manifest.parts else {}),
        "objects": [[o.key, o.num_bytes, f"{o.tail_digest:016x}"] for o in manifest.objects],
        "specs": [spec_to_json(spec) for spec in table.specs],
        "tensor_spec": _pack_runs(table.tensor_spec),
        "tensor_extent": None if is_identity else list(table.tensor_extent),
        "tensor_offset": list(table.tensor_offset) if any(table.tensor_offset) else None,
        "extent_words": _pack_runs(table.extent_words),
        "extent_bytes": _pack_runs(table.extent_bytes),
        "chunks": [[c.first_extent, c.end_extent, c.offset, c.num_bytes] for c in manifest.chunks],
        **({"derived": derived_to_json(manifest.derived)} if manifest.derived else {}),
        **({"delta": delta_to_json(manifest.delta)} if manifest.delta is not None else {}),
        "state": table.skeleton,
    }
    with collector_at_rest():
        lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in fields.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def parse_manifest(text: bytes, key: str) -> Manifest:
    """Read and check a manifest. Raises CorruptCheckpointError. Runs nothing that the text names."""
    try:
        with collector_at_rest():
            fields = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise _damaged(key, f"it is not JSON ({exc})") from exc
    if not isinstance(fields, dict) or fields.get("format") != FORMAT_NAME:
        raise _damaged(key, "it is not a tidegate manifest")
    version, features = fields.get("version"), fields.get("features")
    is_known = isinstance(features, list) and all(isinstance(name, str) and name in KNOWN_FEATURES for name in features)
    if type(version) is not int or version != FORMAT_VERSION or not is_known:
        raise _damaged(
            key,
            f"it is of version {shown(version)} with features {shown(features)}; this build reads version "
            f"{FORMAT_VERSION} with features {sorted(KNOWN_FEATURES)}. Install the tidegate that wrote it",
        )
    try:
        with collector_at_rest():
            return _parse_fields(fields, key, len(text) // _LEAST_BYTES_PER_TENSOR)
    except (KeyError, TypeError, ValueError) as exc:
        raise _damaged(key, f"a field is missing or malformed ({exc!r})") from exc


def _parse_fields(fields: dict[str, JSON], key: str, max_tensors: int) -> Manifest:
    tensor_spec = _unpack_runs(fields["tensor_spec"], key, max_tensors)
    num_tensors = len(tensor_spec)
    tensor_extent = _ints(fields["tensor_extent"], range(num_tensors))
    tensor_offset = _ints(fields["tensor_offset"], itertools.repeat(0, num_tensors))
    words = dict(enumerate(WordType))
    extent_words = [words[number] for number in _unpack_runs(fields["extent_words"], key, max_tensors)]
    extent_bytes = _unpack_runs(fields["extent_bytes"], key, max_tensors)
    table = StateTable(
        skeleton=fields["state"],
        specs=[spec_from_json(spec) for spec in as_list(fields["specs"])],
        tensor_spec=tensor_spec,
        tensor_extent=tensor_extent,
        tensor_offset=tensor_offset,
        extent_bytes=extent_bytes,
        extent_words=extent_words,
    )
    validate_table(table)
    chunks = _parse_chunks(as_list(fields["chunks"]), table, key)
    objects = tuple(_parse_object(item) for item in as_list(fields["objects"]))
    if len({item.key for item in objects}) != len(objects):
        raise _damaged(key, "it names an object twice")
    return Manifest(
        step=as_int(fields["step"], minimum=-1),
        attempt=as_str(fields["attempt"]),
        created=as_dict(fields["created"]),
        metadata=as_dict(fields["metadata"]),
        objects=objects,
        table=table,
        chunks=chunks,
        derived=derived_from_json(fields["derived"], table, chunks) if "derived" in fields else (),
        delta=delta_from_json(fields["delta"], len(chunks)) if "delta" in fields else None,
        parts=tuple(map(as_str, as_list(fields.get("parts", [])))),
    )


def _parse_object(item: JSON) -> ObjectRecord:
    key, num_bytes, tail_digest = as_list(item)
    return ObjectRecord(as_str(key), as_int(num_bytes), int(as_str(tail_digest), 16))


def _parse_chunks(items: Sequence[JSON], table: StateTable, key: str) -> tuple[Chunk, ...]:
    """Check that the chunks cover every extent's bytes once, in order."""
    starts = list(itertools.accumulate(table.extent_bytes, initial=0))
    chunks = []
    covered = 0
    for index, item in enumerate(items):
        first, end, offset, num_bytes = (as_int(value) for value in as_list(item))
        if not 0 <= first < end <= len(table.extent_bytes) or not 0 < num_bytes <= MAX_CHUNK_BYTES:
            raise _damaged(key, f"chunk {index} names extents {first}-{end} with {num_bytes} bytes")
        is_whole = offset == 0 and num_bytes == starts[end] - starts[first]
        is_piece = end - first == 1 and offset + num_bytes <= table.extent_bytes[first]
        if not (is_whole or is_piece) or starts[first] + offset != covered:
            raise _damaged(key, f"chunk {index} does not go on where the one before ends")
        words = set(table.extent_words[first:end])
        if len(words) != 1:
            raise _damaged(key, f"chunk {index} mixes word types")
        covered += num_bytes
        chunks.append(Chunk(index, words.pop(), first, end, offset, num_bytes))
    if covered != starts[-1]:
        raise _damaged(key, f"its chunks hold {covered} of {starts[-1]} bytes")
    return tuple(chunks)


def _pack_runs(values: Sequence[int]) -> JSON:
    """Write [value, count] pairs where that is shorter than the values themselves."""
    if len(values) > 1 and all(map(operator.eq, values, itertools.islice(values, 1, None))):
        return {"runs": [[int(values[0]), len(values)]]}
    runs: list[JSON] = [[int(value), len(list(group))] for value, group in itertools.groupby(values)]
    return {"runs": runs} if len(runs) * 2 < len(values) else list(map(int, values))


def _unpack_runs(item: JSON, key: str, max_values: int) -> list[int]:
    if isinstance(item, list):
        return _ints(item, ())
    values: list[int] = []
    for run in as_list(as_dict(item)["runs"]):
        value, count = (as_int(number) for number in as_list(run))
        if count > max_values - len(values):
            raise _damaged(key, f"it claims more than {max_values:,} tensors or extents, and has no room to name them")
        values.extend(itertools.repeat(value, count))
    return values


def _ints(item: JSON, otherwise: Sequence[int] | itertools.repeat[int] | range) -> list[int]:
    if item is None:
        return list(otherwise)
    return list(as_ints(item))


def _damaged(key: str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"manifest of {key} is damaged or unreadable: {why}", key=key, stage="open")
