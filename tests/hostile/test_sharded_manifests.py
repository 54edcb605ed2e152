"""A manifest of several ranks that is damaged or forged is refused, and so are ranks' objects that do not fit."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

import tidegate
from tidegate.commit import CommitRecord, attempt_key
from tidegate.container import ObjectRecord
from tidegate.derived import DerivedChunks
from tidegate.errors import CorruptCheckpointError
from tidegate.job import SaveJob
from tidegate.options import Options
from tidegate.pairs import find_pairs
from tidegate.planned import plan_table
from tidegate.rank_object import job_in_place, write_rank_object
from tidegate.resources import Resources
from tidegate.save import commit_attempt
from tidegate.shard_map import GlobalSpec, ShardLayout, ShardMapMaker
from tidegate.sharded_load import load_sharded
from tidegate.sharded_manifest import ShardedManifest, dump_sharded, parse_sharded
from tidegate.snapshot import stage_in_place
from tidegate.state import describe
from tidegate.storage import MemoryStore

ATTEMPT = "0123456789abcdef" * 2
STEP = 4


def manifest_of(objects: tuple[ObjectRecord, ...]) -> ShardedManifest:
    maker = ShardMapMaker(2)
    layout = ShardLayout(((0, 0), (2, 0)), ((2, 3), (2, 3)), (0, 1))
    for name in ("model.a", "model.b"):
        maker.add(name, GlobalSpec("float32", (4, 3)), layout)
    maker.add_value("step", 0)
    maker.made.paths = {"model.a": ("model", "a"), "model.b": ("model", ["key", 3]), "step": ("step",)}
    return ShardedManifest(STEP, ATTEMPT, {"by": "x"}, {}, objects, maker.made)


def fields_of(manifest: ShardedManifest) -> dict[str, Any]:
    return json.loads(dump_sharded(manifest))


def text_of(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


OBJECTS = tuple(ObjectRecord(attempt_key(STEP, ATTEMPT, f"rank-0000{r}.tg"), 4096, r) for r in range(2))
FIELDS = fields_of(manifest_of(OBJECTS))
WRONG: tuple[Any, ...] = (
    None, -1, 1.5, "x", [], {}, [[]], [None], {"runs": [[0, 1 << 60]]}, {"runs": [[1]]}, 1 << 70, True,
)  # fmt: skip


def test_the_right_one_is_read() -> None:
    assert parse_sharded(text_of(FIELDS), "key") == manifest_of(OBJECTS)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_any_field_that_is_missing_or_of_another_kind_is_refused(name: str) -> None:
    for wrong in ("missing", *WRONG):
        fields = copy.deepcopy(FIELDS)
        if wrong == "missing":
            del fields[name]
        else:
            fields[name] = wrong
        try:
            parsed = parse_sharded(text_of(fields), "key")
        except CorruptCheckpointError as exc:
            assert "key" in str(exc)
        else:
            assert name in ("created", "metadata", "attempt", "paths", "values", "step", "num_ranks"), (name, wrong)
            assert parsed.shards.names == ["model.a", "model.b"]


@pytest.mark.parametrize(
    "path, wrong",
    [
        (("layouts", 0, "offsets"), [[0, 0], [3, 0]]),
        (("layouts", 0, "offsets"), [[0, 0], [0, 0]]),
        (("layouts", 0, "offsets"), [[0, 0]]),
        (("layouts", 0, "sizes"), [2]),
        (("layouts", 0, "ranks"), [0, 2]),
        (("layouts", 0, "ranks"), {"runs": [[0, 1 << 40]]}),
        (("specs", 0, "dtype"), "float31"),
        (("specs", 0, "shape"), [1 << 62, 1 << 62]),
        (("tensor_spec",), [0, 1]),
        (("tensors",), ["model.a", "model.a"]),
        (("tensors",), ["model.a", "step"]),
        (("values",), [["step", 2, 0]]),
        (("objects",), [["k", 1, "0"], ["k", 1, "0"]]),
        (("paths",), {"absent": ["x"]}),
        (("features",), ["sharded", "new"]),
        (("version",), 2),
    ],
)
def test_a_field_that_does_not_fit_the_others_is_refused(path: tuple[Any, ...], wrong: object) -> None:
    fields = copy.deepcopy(FIELDS)
    inner = fields
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = wrong
    with pytest.raises(CorruptCheckpointError):
        parse_sharded(text_of(fields), "key")


def saved(change: Any = None) -> tuple[MemoryStore, CommitRecord]:
    """Two ranks' objects and a manifest, changed before it is committed."""
    store = MemoryStore()
    resources = Resources(Options(codec="zstd"))
    records = []
    for rank in range(2):
        items = {f"model.{name}@{2 * rank},0": torch.full((2, 3), float(rank)) for name in "ab"}
        job = job_in_place({**items, **({"step@obj": 7} if rank == 0 else {})}, STEP, resources)
        records.append(write_rank_object(job, store, resources, ATTEMPT, rank)[0])
    resources.close()
    fields = fields_of(manifest_of(tuple(records)))
    if change is not None:
        change(fields)
    return store, commit_attempt(store, STEP, ATTEMPT, dump_text(fields), None)


def dump_text(fields: dict[str, Any]) -> bytes:
    return ("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in fields.items()) + "\n}").encode()


def exchange_objects(fields: dict[str, Any]) -> None:
    fields["objects"].reverse()


def leave_the_attempt(fields: dict[str, Any]) -> None:
    fields["objects"][1][0] = "step-0000000004/../secret"


def rename_a_tensor(fields: dict[str, Any]) -> None:
    fields["tensors"][1] = "model.c"
    fields["paths"] = {}


def change_the_dtype(fields: dict[str, Any]) -> None:
    fields["specs"][0]["dtype"] = "int32"


def exchange_sizes(fields: dict[str, Any]) -> None:
    fields["layouts"][0].update(offsets=[[0, 0], [3, 0]], sizes=[[3, 3], [1, 3]])


def belong_to_another_step(fields: dict[str, Any]) -> None:
    fields["step"] = 5


CHANGES = (
    exchange_objects, leave_the_attempt, rename_a_tensor, change_the_dtype, exchange_sizes, belong_to_another_step,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_A24_objects_that_do_not_fit_are_refused(change: Any) -> None:
    store, _ = saved(change)
    with tidegate.CheckpointEngine(store) as engine, pytest.raises(tidegate.LoadError):
        engine.load(STEP)


def test_load_sharded_reads_what_was_written() -> None:
    store, record = saved()
    manifest = parse_sharded(bytes(store.read_all(record.manifest_key, limit_bytes=1 << 20)), "key")
    targets = {name: torch.zeros(4, 3) for name in ("model.a", "model.b")}
    manifest.shards.paths = None
    load_sharded(store, manifest, map_location=None, into=None, part=None, targets=targets)
    assert all(t.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2 for t in targets.values())


def test_an_object_that_lacks_what_follows_from_others_is_refused() -> None:
    """Nothing would fill such shards: what ranks write is stored in full."""
    store, resources = MemoryStore(), Resources(Options(codec="zstd"))
    master = torch.randn(50_000, 1)
    table = describe({"a@0,0": master, "b@0,0": master.bfloat16()})
    planned = plan_table(table, resources.sizes_for(table), find_pairs(table))
    job = SaveJob(
        STEP, table, planned.plan, {}, resources.wake,
        chunk_order=planned.chunk_order, derived=DerivedChunks(planned.candidates),
    )  # fmt: skip
    stage_in_place(job)
    record, _ = write_rank_object(job, store, resources, ATTEMPT, 0)
    resources.close()
    assert job.derived.found(), "the test needs an object that lacks a chunk"
    maker = ShardMapMaker(1)
    for name, dtype in (("a", "float32"), ("b", "bfloat16")):
        maker.add(name, GlobalSpec(dtype, (50_000, 1)), ShardLayout(((0, 0),), ((50_000, 1),), (0,)))
    maker.made.paths = {"a": ("a",), "b": ("b",)}
    manifest = ShardedManifest(STEP, ATTEMPT, {}, {}, (record,), maker.made)
    commit_attempt(store, STEP, ATTEMPT, dump_sharded(manifest), None)
    with tidegate.CheckpointEngine(store) as engine, pytest.raises(CorruptCheckpointError, match="claims derived"):
        engine.load(STEP)
