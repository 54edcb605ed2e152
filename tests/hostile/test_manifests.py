"""Manifests and COMMIT records made to harm: every checksum is right and the fields lie. All are refused, cheaply."""

from __future__ import annotations

import functools
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.hostile.bounds import bounded
from tests.hostile.forge import ATTEMPT, STEP, Forgery, commit_text, put_file, taken_apart
from tests.kit.bits import assert_same_bits
from tidegate.cli import main as run_cli
from tidegate.storage import LocalStore, MemoryStore

Fields = dict[str, Any]
DEEP = 100_000
NUM_TENSORS = 4  # those of state(), and as many extents


def state() -> dict[str, object]:
    """Two tensors of one word type in a chunk, a tie, a view with strides, an array, and containers."""
    shared = torch.arange(64.0)
    return {
        "w": shared,
        "tied": shared,
        "column": torch.arange(12.0).reshape(3, 4).t(),
        "half": torch.zeros(400).bfloat16(),
        "array": np.arange(6.0).reshape(2, 3),
        "list": [1, (2.5, None)],
        7: {"text": "x"},
    }


@functools.cache
def honest() -> Forgery:
    return taken_apart(state())


def load_root(store: MemoryStore | LocalStore, step: int | str = STEP) -> object:
    with tidegate.CheckpointEngine(store) as engine:
        return engine.load(step)  # type: ignore[arg-type]


def refused(
    forgery: Forgery,
    match: str | None = None,
    error: type[tidegate.CheckpointError] = tidegate.CorruptCheckpointError,
    *,
    only_root: bool = False,
) -> None:
    """Assert that no way of loading takes it, and that none costs much."""
    root = forgery.root()
    loads: list[Callable[[], object]] = [lambda: load_root(root), lambda: load_root(root, "latest")]
    if not only_root:
        url = put_file(forgery.one_file())
        loads.append(lambda: tidegate.load(url))
    for load in loads:
        with bounded(), pytest.raises(error, match=match) as caught:
            load()
        assert type(caught.value) is error, repr(caught.value)
        assert len(str(caught.value)) < 3000


def changed(change: Callable[[Fields], object]) -> Forgery:
    forgery = honest().copy()
    change(forgery.fields)
    return forgery


def test_the_forge_makes_good_checkpoints() -> None:
    """Else the tests below would prove nothing."""
    assert_same_bits(load_root(honest().root()), state())
    assert_same_bits(tidegate.load(put_file(honest().one_file())), state())


NO_NUMBERS: list[object] = [-1, 1.0, 0.5, True, False, "0", None, [], {}, [0], float("nan"), float("inf"), 2**63, -(2**70), 10**400]
COLUMNS = ("tensor_spec", "tensor_extent", "tensor_offset", "extent_words", "extent_bytes")


def column(fields: Fields, name: str) -> list[Any]:
    """A column as a plain list, put in the place of what is there."""
    values = fields[name]
    if values is None:
        values = [0] * NUM_TENSORS if name == "tensor_offset" else list(range(NUM_TENSORS))
    elif isinstance(values, dict):
        values = [value for value, count in values["runs"] for _ in range(count)]
    fields[name] = values
    return fields[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("number", NO_NUMBERS, ids=lambda n: str(n)[:12])
def test_a_column_with_something_else_in_it(name: str, number: object) -> None:
    refused(changed(lambda fields: column(fields, name).__setitem__(1, number)))


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize(
    "whole",
    [0, "x", True, {}, {"runs": None}, {"runs": 3}, {"runs": [3]}, {"runs": [[0]]}, {"runs": [[0, 5, 5]]},
     {"runs": [[0, -5]]}, {"runs": [[0, 5.0]]}, {"runs": [[True, 5]]}, {"runs": [["0", 5]]},
     {"runs": [[0, NUM_TENSORS - 1]]}, {"runs": [[0, NUM_TENSORS + 1]]}, [], [0] * (NUM_TENSORS + 1), [0] * (NUM_TENSORS - 1)],
    ids=str,
)  # fmt: skip
def test_a_column_of_another_form(name: str, whole: object) -> None:
    refused(changed(lambda fields: fields.__setitem__(name, whole)))


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("count", [10**6, 19_999_999, 2**31, 2**40, 2**62])
def test_a_run_that_counts_more_than_there_can_be(name: str, count: int) -> None:
    """A few bytes that ask for lists of gigabytes."""
    refused(changed(lambda fields: fields.__setitem__(name, {"runs": [[0, count]]})))


def test_runs_that_agree_on_more_than_there_can_be() -> None:
    def change(fields: Fields) -> None:
        for name in COLUMNS:
            fields[name] = {"runs": [[0, 10**7]]}
        fields["tensor_extent"] = fields["tensor_offset"] = None
        fields["chunks"] = []

    refused(changed(change))


CHUNKS: dict[str, Callable[[list[list[Any]]], object]] = {
    "none": lambda c: c.clear(),
    "first-missing": lambda c: c.pop(0),
    "last-missing": lambda c: c.pop(),
    "twice": lambda c: c.append(list(c[-1])),
    "first-twice": lambda c: c.insert(0, list(c[0])),
    "swapped": lambda c: c.reverse(),
    "no-extent": lambda c: c[0].__setitem__(1, c[0][0]),
    "turned-round": lambda c: c[-1].__setitem__(0, 9),
    "an-extent-more": lambda c: c[0].__setitem__(1, c[0][1] + 1),
    "beyond-the-last": lambda c: c[-1].__setitem__(1, c[-1][1] + 1),
    "no-bytes": lambda c: c[0].__setitem__(3, 0),
    "a-word-less": lambda c: c[0].__setitem__(3, c[0][3] - 4),
    "a-word-more": lambda c: c[0].__setitem__(3, c[0][3] + 4),
    "an-offset": lambda c: c[0].__setitem__(2, 4),
    "huge": lambda c: c[0].__setitem__(3, 2**62),
    "above-the-limit": lambda c: c[0].__setitem__(3, 2**30 + 4),
    "negative-extent": lambda c: c[0].__setitem__(0, -1),
    "float": lambda c: c[0].__setitem__(3, float(c[0][3])),
    "bool": lambda c: c[1].__setitem__(0, True),
    "short": lambda c: c[0].pop(),
    "long": lambda c: c[0].append(0),
    "no-list": lambda c: c.__setitem__(0, 5),  # type: ignore[call-overload]
    "empty": lambda c: c.append([]),
    "all-in-one": lambda c: c.__setitem__(slice(None), [[0, c[-1][1], 0, sum(chunk[3] for chunk in c)]]),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_that_do_not_cover_the_extents(name: str) -> None:
    refused(changed(lambda fields: CHUNKS[name](fields["chunks"])))


@pytest.mark.parametrize("num_bytes", [2**20, 2**30, 2**40, 2**62, 2**63 - 4])
def test_an_extent_of_more_than_is_there(num_bytes: int) -> None:
    def extent(fields: Fields) -> None:
        column(fields, "extent_bytes")[0] = num_bytes

    def chunk_too(fields: Fields) -> None:
        extent(fields)
        fields["chunks"][0] = [0, 1, 0, num_bytes]

    refused(changed(extent))
    refused(changed(chunk_too))


SPECS: dict[str, Callable[[Fields], object]] = {
    "no-dtype": lambda s: s.pop("dtype"),
    "dtype-of-another-build": lambda s: s.update(dtype="float3"),
    "dtype-that-has-no-bytes": lambda s: s.update(dtype="qint8"),
    "dtype-path": lambda s: s.update(dtype="os.system"),
    "dtype-number": lambda s: s.update(dtype=5),
    "dtype-wider": lambda s: s.update(dtype="complex128"),
    "negative-size": lambda s: s.update(shape=[-64]),
    "float-size": lambda s: s.update(shape=[64.0]),
    "bool-size": lambda s: s.update(shape=[True, 64]),
    "one-more": lambda s: s.update(shape=[65]),
    "huge": lambda s: s.update(shape=[2**62]),
    "product-wraps-to-64": lambda s: s.update(shape=[2**32, 2**32, 64]),
    "huge-and-empty": lambda s: s.update(shape=[2**62, 2**62, 0]),
    "a-thousand-dimensions": lambda s: s.update(shape=[1] * 1000),
    "no-shape": lambda s: s.update(shape=None),
    "negative-stride": lambda s: s.update(strides=[-1]),
    "huge-stride": lambda s: s.update(strides=[2**61]),
    "stride-beyond": lambda s: s.update(strides=[2]),
    "more-strides": lambda s: s.update(strides=[1, 1]),
    "no-strides": lambda s: s.update(strides="1"),
    "flag-number": lambda s: s.update(parameter=1),
    "conj-of-a-real": lambda s: s.update(conj=True),
    "device-path": lambda s: s.update(device="../../dev"),
    "device-number": lambda s: s.update(device=0),
    "unknown-field": lambda s: s.update(reduce="os.system"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_tensor_that_cannot_be(name: str) -> None:
    def change(fields: Fields) -> None:
        spec = next(spec for spec in fields["specs"] if spec["shape"] == [64])
        SPECS[name](spec)

    refused(changed(change))


@pytest.mark.parametrize("spec", [None, 5, "float32", [], ["dtype", "shape"]])
def test_a_spec_of_another_form(spec: object) -> None:
    refused(changed(lambda fields: fields["specs"].__setitem__(0, spec)))


@pytest.mark.parametrize("offset", [1, 2, 4, 256, 2**40, 2**62])
def test_a_tensor_that_leaves_its_extent(offset: int) -> None:
    refused(changed(lambda fields: column(fields, "tensor_offset").__setitem__(0, offset)))


def test_versions_and_features_say_what_is_unknown_and_what_to_do() -> None:
    refused(changed(lambda f: f.update(version=2)), r"version 2 .*Install the tidegate that wrote it")
    refused(changed(lambda f: f.update(features=["delta-chains"])), r"delta-chains.*Install the tidegate")
    refused(changed(lambda f: f.update(format="zarr")), "not a tidegate manifest")


@pytest.mark.parametrize("version", [None, 0, -1, "1", [1], {}, 1.5])
def test_versions_of_another_form(version: object) -> None:
    refused(changed(lambda f: f.update(version=version)))


@pytest.mark.parametrize("features", [None, 1, "", "x", {}, {"x": 1}, [1], [None], [[]], [{}], [["x"]], ["x"] * 10**6], ids=lambda f: str(f)[:10])
def test_features_of_another_form(features: object) -> None:
    refused(changed(lambda f: f.update(features=features)))


@pytest.mark.parametrize("name", sorted(taken_apart({}).fields))
def test_every_field_is_needed_and_typed(name: str) -> None:
    """Each is left out, and each is what it may not be. Only the state itself may be anything."""
    only_root = name in ("step", "attempt", "objects")  # the forge sets these in a file that stands alone
    refused(changed(lambda f: f.pop(name)), only_root=only_root)
    for value in (True, 1.5, "x", {}):
        if name != "state" and (name, value) not in [("created", {}), ("metadata", {})]:
            refused(changed(lambda f, value=value: f.__setitem__(name, value)), only_root=only_root)  # type: ignore[misc]


STATES: dict[str, object] = {
    "unknown-tag": ["pickle", "gASVAAAA"],
    "no-tag": [],
    "tag-number": [5],
    "tag-list": [["t", 0]],
    "tag-object": [{}],
    "tensor-without-index": ["t"],
    "tensor-beyond": ["t", NUM_TENSORS],
    "tensor-negative": ["t", -1],
    "tensor-bool": ["t", True],
    "tensor-float": ["t", 0.0],
    "tensor-text": ["t", "0"],
    "tensor-huge": ["t", 2**70],
    "tensor-two": ["t", 0, 1],
    "array-of-floats": ["ndarray", 0, "<f4", [64], "C"],
    "array-of-objects": ["ndarray", 3, "|O", [6], "C"],
    "array-of-more": ["ndarray", 3, "<f8", [7], "C"],
    "array-negative": ["ndarray", 3, "<f8", [-6], "C"],
    "array-of-nothing": ["ndarray", 3, "|S0", [2**40], "C"],
    "array-of-void": ["ndarray", 3, "|V0", [2**61, 4], "C"],
    "array-huge": ["ndarray", 3, "<f8", [2**61], "C"],
    "array-wraps": ["ndarray", 3, "<f8", [2**32, 2**32, 6], "C"],
    "array-order": ["ndarray", 3, "<f8", [6], "K"],
    "array-many-dimensions": ["ndarray", 3, "<f8", [1] * 70 + [6], "C"],
    "array-struct-huge": ["ndarray", 3, ["struct", 2**40, False, ["a", "<f8", 2**39, None]], [6], "C"],
    "array-struct-overlap": ["ndarray", 3, ["struct", 8, False, ["a", "|O", 0, None]], [6], "C"],
    "array-sub-huge": ["ndarray", 3, ["sub", "<f8", 2**31, 2**31], [6], "C"],
    "array-itemsize": ["ndarray", 3, "|V9999999999", [6], "C"],
    "scalar-huge": ["npscalar", "|V2147483647", ""],
    "scalar-object": ["npscalar", "|O", "00"],
    "bytes-of-floats": ["bytes@", 0],
    "not-base64": ["bytes", "!"],
    "pairs-odd": ["dict", ["a"]],
    "pairs-twice": ["dict", ["a", 1], ["a", 2]],
    "key-list": ["dict", [["list", 1], 2]],
    "key-tensor": ["dict", [["t", 0], 1]],
    "key-object": ["dict", [{}, 1]],
    "set-of-lists": ["set", ["list"]],
    "set-twice": ["set", 1, 1],
    "counter-of-text": ["Counter", ["a", "b"], ["a", 1]],
    "defaultdict-of-eval": ["defaultdict", "eval"],
    "defaultdict-of-import": ["defaultdict", "__import__"],
    "deque-too-long": ["deque", 1, 1, 2],
    "deque-negative": ["deque", -5],
    "namespace-list": ["Namespace", ["list"]],
    "namespace-two": ["Namespace", {}, {}],
    "int-not-hex": ["int", "zz"],
    "float-short": ["float", "7ff8"],
    "complex-one": ["complex", 1.0],
    "device-path": ["device", "/dev/null"],
    "size-negative-text": ["Size", "x"],
    "size-too-large": ["Size", 2**63],
    "range-zero": ["range", 0, 1, 0],
    "fraction-zero": ["Fraction", 1, 0],
    "zone-outside": ["ZoneInfo", "../../etc/passwd"],
    "zone-absolute": ["ZoneInfo", "/etc/localtime"],
    "date": ["date", "2026-13-41"],
    "datetime": ["datetime", "2026-01-01T00:00:00", 9, None],
    "path-kind": ["path", "Popen", "x"],
    "uuid": ["UUID", "x"],
    "decimal": ["Decimal", "x"],
    "enum-number": ["enum", 5, "x"],
    "namedtuple-empty": ["namedtuple"],
    "dataclass-list": ["dataclass", "os:system", []],
}


@pytest.mark.parametrize("name", STATES)
def test_a_description_that_no_state_has(name: str) -> None:
    refused(changed(lambda f: f.update(state={"x": [*["list"], STATES[name]]})), "damaged")


@pytest.mark.parametrize(
    "node",
    [["dataclass", "os:system", {"a": 1}], ["enum", "os:environ", "x"], ["namedtuple", "builtins:eval", ["a", 1]],
     ["dataclass", "subprocess:Popen", {"args": "true"}], ["enum", "re:RegexFlag", "I"]],
    ids=str,
)  # fmt: skip
def test_classes_that_nobody_allowed_are_named_and_not_imported(node: list[object]) -> None:
    refused(changed(lambda f: f.update(state=node)), re.escape(str(node[1])), tidegate.LoadError)


NESTS: dict[str, tuple[str, str]] = {
    "arrays": ("[", "]"),
    "objects": ('{"a":', "}"),
    "lists": ('["list",', "]"),
    "tuples-as-keys": ('["tuple",', "]"),
    "dtypes": ('["sub",', ",1]"),
    "metadata": ('["OrderedDict@",', "]"),
}


@pytest.mark.parametrize("name", NESTS)
@pytest.mark.parametrize("depth", [301, 320, 900, 1000, DEEP])
@pytest.mark.parametrize("where", ["state", "metadata", "chunks", "specs", "extent_bytes", "features", "key", "array"])
def test_nests(name: str, depth: int, where: str) -> None:
    opening, closing = NESTS[name]
    nest = opening * depth + "1" + closing * depth
    if where == "metadata" and (depth < DEEP or name == "objects"):
        return  # people's own JSON may nest, as far as the parser goes
    value = {"key": f'["dict",[{nest},1]]', "array": f'["ndarray",3,{nest},[6],"C"]'}.get(where, nest)
    field = where if where not in ("key", "array") else "state"
    text = json.dumps({**honest().fields, field: "HERE", "objects": []}).replace('"HERE"', value)
    forgery = honest().copy()
    forgery.text = text.encode()
    refused(forgery)


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"\x00" * 100, b"{" * DEEP, b'{"format": "tidegate-manifest"}',
     b'{"format": "tidegate-manifest", "version": 1, "features": []}', b"9" * 10_000, pickle.dumps({"a": 1}), b"NaN"],
    ids=lambda t: repr(t[:12]),
)  # fmt: skip
def test_texts_that_are_no_manifest(text: bytes) -> None:
    forgery = honest().copy()
    forgery.text = text
    refused(forgery, only_root=text == b"")


@pytest.mark.parametrize(
    "key",
    ["../../secret", "/etc/hostname", "rank-00000.tg", "", f"step-{STEP:010d}/COMMIT", f"step-{STEP:010d}/../x",
     f"step-{STEP:010d}/{'0' * 32}/rank-00000.tg", f"step-{STEP:010d}/{ATTEMPT}/../../../etc/hostname",
     f"step-{STEP:010d}/{ATTEMPT}/./rank-00000.tg", f"step-{STEP:010d}/{ATTEMPT}/manifest.json",
     f"step-{STEP:010d}/{ATTEMPT}/absent.tg", f"step-{STEP:010d}/{ATTEMPT}/\0", f"step-{STEP:010d}/{ATTEMPT}/" + "x" * 5000, 5],
    ids=lambda k: str(k)[-20:],
)  # fmt: skip
def test_objects_that_lie_elsewhere(key: object, tmp_path: Path) -> None:
    """In memory and in a folder, beside which a secret lies."""
    (tmp_path / "secret").write_bytes(honest().object())
    forgery = honest().copy()
    octets = forgery.object()
    forgery.record = [key, len(octets), octets[-16:-8][::-1].hex()]
    source = forgery.root()
    folder = LocalStore(tmp_path / "a" / "root", sync=False)
    for stat in source.list():
        folder.compare_and_put(stat.key, source.read_all(stat.key, limit_bytes=1 << 20), expected=None)
    for store in (source, folder):
        with bounded(), pytest.raises(tidegate.LoadError) as caught:
            load_root(store)
        assert not isinstance(caught.value, OSError)
    folder.close()


@pytest.mark.parametrize("record", [None, [], [1, 2, 3], ["k"], ["k", 1], ["k", -1, "0"], ["k", 1.5, "0"], ["k", 1, 0], ["k", 1, "xyz"], ["k", 2**63, "0"]], ids=str)
def test_object_records_of_another_form(record: object) -> None:
    refused(changed(lambda f: f.update(objects=[record])), only_root=True)


def test_objects_missing_twice_and_none() -> None:
    octets = honest().object()
    truth = [f"step-{STEP:010d}/{ATTEMPT}/rank-00000.tg", len(octets), octets[-16:-8][::-1].hex()]
    refused(changed(lambda f: f.update(objects=[])), "missing", only_root=True)
    refused(changed(lambda f: f.update(objects=[truth, truth])), "twice", only_root=True)
    refused(changed(lambda f: f.update(objects=[truth] * 10_000)), "twice", only_root=True)


@pytest.mark.parametrize(("name", "value"), [("step", 8), ("step", -1), ("attempt", "f" * 32), ("attempt", "")])
def test_a_manifest_of_another_checkpoint(name: str, value: object) -> None:
    refused(changed(lambda f: f.update({name: value})), "another checkpoint", only_root=True)


def test_a_path_as_long_as_a_file_for_every_tensor_costs_one_path() -> None:
    """An error names the first tensors of a frame; it must not spell out a long key for each of a hundred thousand."""
    forgery = honest().copy()
    forgery.fields["state"] = {"k" * 10**6: ["list", *([["t", i % NUM_TENSORS] for i in range(10**5)])]}
    forgery.frames[0].header["raw_digest"] = 1
    refused(forgery, "chunk 0")


NO_COMMIT_NUMBERS = [None, -1, 1.5, True, "7", [], {}, float("inf"), float("-inf"), float("nan"), 2**63, 10**400]


@pytest.mark.parametrize("name", ["version", "step", "sequence", "manifest_bytes", "manifest_digest", "attempt"])
@pytest.mark.parametrize("value", NO_COMMIT_NUMBERS, ids=lambda v: str(v)[:10])
def test_a_commit_record_with_something_else_in_it(name: str, value: object) -> None:
    forgery = honest().copy()
    forgery.commit[name] = value
    refused(forgery, "COMMIT", only_root=True)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [("version", 2, "version 2"), ("attempt", "../../etc", "COMMIT"), ("attempt", "", "COMMIT"), ("attempt", "A" * 32, "COMMIT"),
     ("attempt", "0" * 41, "COMMIT"), ("manifest_bytes", 0, "COMMIT"), ("manifest_bytes", 2**62, "COMMIT"), ("step", 8, "COMMIT"),
     ("manifest_digest", "0" * 16, "checksum"), ("manifest_digest", "x", "COMMIT"), ("manifest_digest", "-1", "COMMIT")],
)  # fmt: skip
def test_a_commit_record_that_lies(name: str, value: object, match: str) -> None:
    forgery = honest().copy()
    forgery.commit[name] = value
    refused(forgery, match, only_root=True)


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"[" * 60_000, b'{"tidegate-commit":' * 3000, b"9" * 5000, b"x" * 65_537, b" " * 10**6,
     commit_text([]), commit_text(None), commit_text("x"), commit_text({}), pickle.dumps(honest)],
    ids=lambda t: repr(t[:12]),
)  # fmt: skip
def test_texts_that_are_no_commit_record(text: bytes) -> None:
    store = honest().root()
    key = f"step-{STEP:010d}/COMMIT"
    store.delete(key)
    store.compare_and_put(key, text, expected=None)
    for step in (STEP, "latest"):
        with bounded(), pytest.raises(tidegate.CorruptCheckpointError, match="COMMIT"):
            load_root(store, step)


def test_a_damaged_record_does_not_hide_the_checkpoint_before_it() -> None:
    store = honest().root()
    store.compare_and_put("step-0000000008/COMMIT", commit_text({"sequence": float("inf")}), expected=None)
    with pytest.warns(tidegate.CheckpointWarning, match="step 8 is damaged"):
        assert_same_bits(load_root(store, "latest"), state())


def test_a_record_in_other_spacing_still_lets_a_load_fall_back() -> None:
    """COMMIT may be valid and not byte for byte what this build writes."""
    forgery = honest().copy()
    forgery.frames[0].header["raw_digest"] = 1
    store = forgery.root()
    key = f"step-{STEP:010d}/COMMIT"
    text = store.read_all(key, limit_bytes=1 << 16)
    store.compare_and_put(key, json.dumps(json.loads(text), indent=3).encode(), expected=text)
    with pytest.raises(tidegate.CorruptCheckpointError, match="chunk 0"):
        load_root(store, "latest")


class Touch:
    """A pickle of this touches a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_pickles_in_place_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is run, by any command (A23)."""
    touched = tmp_path / "touched"
    poison = pickle.dumps(Touch(touched), protocol=4)
    torch.save(Touch(touched), tmp_path / "poison.pt")
    for octets in (poison, (tmp_path / "poison.pt").read_bytes(), poison + bytes(-len(poison) % 4096)):
        for victim in ("COMMIT", "manifest.json", "rank-00000.tg"):
            root = tmp_path / f"{victim}-{len(octets)}"
            with tidegate.CheckpointEngine(root) as engine:
                engine.save_async(state(), step=1).result(60)
                path = next(root.rglob(victim))
                path.write_bytes(octets)
                for step in (1, "latest"):
                    with pytest.raises(tidegate.CorruptCheckpointError):
                        engine.load(step)  # type: ignore[arg-type]
            assert [run_cli([name, str(root)]) for name in ("inspect", "verify")] == [1, 1]
            run_cli(["list", str(root)])
        (tmp_path / "one.tg").write_bytes(octets)
        with pytest.raises(tidegate.CorruptCheckpointError):
            tidegate.load(tmp_path / "one.tg")
        assert [run_cli([name, str(tmp_path / "one.tg")]) for name in ("inspect", "verify")] == [1, 1]
    capsys.readouterr()
    assert not touched.exists()
    pickle.loads(poison)
    assert touched.exists(), "the poison works"
