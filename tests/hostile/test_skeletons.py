"""Descriptions of states made to harm: every checksum is right and no state has them. All are refused, cheaply."""

from __future__ import annotations

import json
import re

import pytest

import tidegate
from tests.hostile.refusing import NUM_TENSORS, changed, honest, refused

DEEP = 100_000

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
    text = json.dumps({**honest().fields, "objects": [honest().truth()], field: "HERE"}).replace('"HERE"', value)
    forgery = honest().copy()
    forgery.text = text.encode()
    refused(forgery)


def test_a_path_as_long_as_a_file_for_every_tensor_costs_one_path() -> None:
    """An error names the first tensors of a frame; it must not spell out a long key for each of a hundred thousand."""
    forgery = honest().copy()
    forgery.fields["state"] = {"k" * 10**6: ["list", *([["t", i % NUM_TENSORS] for i in range(10**5)])]}
    forgery.frames[0].header["raw_digest"] = 1
    refused(forgery, "chunk 0")
