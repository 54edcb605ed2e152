"""What a file claims is checked before it is believed: skeletons, specs and the tensor table."""

from __future__ import annotations

import json
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.engine.through import read_table, stored
from tidegate.codec.words import WordType
from tidegate.errors import CheckpointError, CorruptCheckpointError, InternalError, LoadError
from tidegate.extents import spec_from_json, spec_to_json
from tidegate.rebuild import MAX_DEPTH, rebuild, tensor_paths
from tidegate.state import describe, make_tensors, validate_table
from tidegate.table import StateTable
from tidegate.tensors import TensorSpec

ONE = [torch.zeros(3)]
BYTES = [torch.zeros(8, dtype=torch.uint8)]

HOSTILE = [
    ["t"],
    ["t", 1],
    ["t", -1],
    ["t", True],
    ["t", 0.0],
    ["t", "0"],
    ["t", 0, 0],
    ["t", 2**80],
    ["t", None],
    [["t", 0]],
    [{}],
    [1, 2],
    ["list", ["t", 9]],
    ["dict", 1],
    ["dict", [1]],
    ["dict", [1, 2, 3]],
    ["dict", [1, 2], [1, 3]],
    ["dict", [1, 2], [True, 3]],
    ["dict", [["list"], 1]],
    ["dict", [{}, 1]],
    ["dict", [[], 1]],
    ["dict", [[["t", 0]], 1]],
    ["set", [{}]],
    ["dict", [["dict"], 1]],
    ["dict", [["t", 0], 1]],
    ["dict", [["tuple", ["list"]], 1]],
    ["dict", [["tuple", ["t", 0]], 1]],
    ["dict", [["set"], 1]],
    ["dict", [["bytearray", ""], 1]],
    ["dict", [["frozenset", 1, 1], 1]],
    ["dict", [["namedtuple", "a:b", ["x", ["list"]]], 1]],
    ["dict", [["Decimal", "sNaN"], 1]],
    ["OrderedDict", "ab"],
    ["OrderedDict@"],
    ["OrderedDict@", {}, 3],
    ["defaultdict", "os.system"],
    ["defaultdict", 1],
    ["defaultdict", ["list"]],
    ["defaultdict"],
    ["Counter", ["a"]],
    ["set", ["list"]],
    ["set", 1, True],
    ["set", {}],
    ["frozenset", 1, 1],
    ["deque", 1, 2, 3],
    ["deque", -1],
    ["deque", "x"],
    ["deque", 2**80],
    ["deque"],
    ["Namespace"],
    ["Namespace", ["dict", [1, 2]]],
    ["SimpleNamespace", 1],
    ["SimpleNamespace", {}, {}],
    ["ndarray"],
    ["ndarray", 0],
    ["ndarray", 0, "<f8", [1]],
    ["ndarray", 0, "<f8", [1], "K"],
    ["ndarray", 0, "<f8", [2], "C"],
    ["ndarray", 0, "<f8", [-1, -1], "C"],
    ["ndarray", 0, "<f8", [2**62, 2**62, 0], "C"],
    ["ndarray", 0, "<f8", [2**80, 0], "C"],
    ["ndarray", 0, "<f8", [1.0], "C"],
    ["ndarray", 0, "<f8", [True], "C"],
    ["ndarray", 0, "<f8", [1] * 65, "C"],
    ["ndarray", 0, "|O", [1], "C"],
    ["ndarray", 0, "<f8", "x", "C"],
    ["ndarray", 0, None, [1], "C"],
    ["ndarray", 1, "<f8", [1], "C"],
    ["ndarray", "0", "<f8", [1], "C"],
    ["bytes@"],
    ["bytes@", 5],
    ["bytes@", 0, 0],
    ["bytearray@", None],
    ["enum"],
    ["enum", None, "x"],
    ["dataclass", "a:b"],
    ["namedtuple"],
    ["namedtuple", "a:b", "xy"],
]


@pytest.mark.parametrize("node", HOSTILE, ids=lambda node: json.dumps(node)[:60])
@pytest.mark.parametrize("place", ["root", "inner"])
def test_A23_a_malformed_skeleton_is_damage(node: object, place: str) -> None:
    skeleton = node if place == "root" else {"a": ["list", 0, {"x.y": node}]}
    with pytest.raises(CorruptCheckpointError) as info:
        rebuild(json.loads(json.dumps(skeleton)), BYTES)
    assert info.value.stage == "place"
    assert place == "root" or info.value.fqn.startswith('a.1["x.y"]')
    assert info.value.fqn in str(info.value)
    assert len(str(info.value)) < 500


def test_a_tensor_that_is_not_bytes_makes_no_array() -> None:
    for node in (["ndarray", 0, "<f4", [3], "C"], ["bytes@", 0], ["bytearray@", 0]):
        with pytest.raises(CorruptCheckpointError):
            rebuild(node, ONE)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 20_000])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: ["list", x],
        lambda x: {"a": x},
        lambda x: ["dict", [x, 1]],
        lambda x: ["tuple", x],
        lambda x: ["dict", [["tuple", x], 1]],
        lambda x: ["OrderedDict@", x],
        lambda x: ["np.dtype", x],
        lambda x: ["npscalar", ["sub", x, 1], ""],
        lambda x: ["datetime", "2026-01-01T00:00:00", 0, x],
        lambda x: ["nonsense", x],
        lambda x: ["namedtuple", "a:b", ["x", x]],
        lambda x: ["frozenset", x],
    ],
)
def test_A23_deep_json_never_overflows_the_stack(wrap: object, depth: int) -> None:
    skeleton: object = 1
    for _ in range(depth):
        skeleton = wrap(skeleton)
    try:
        with pytest.raises(CorruptCheckpointError):
            rebuild(skeleton, [])
        assert tensor_paths(skeleton, 0) == []
    finally:
        while isinstance(skeleton, list | dict):  # let go of it level by level: deallocation recurses as well
            inner = list(skeleton.values()) if isinstance(skeleton, dict) else skeleton
            skeleton = next((item for item in inner if isinstance(item, list | dict)), None)


TAGS = [
    *("t", "list", "dict", "tuple", "set", "frozenset", "deque", "defaultdict", "OrderedDict", "OrderedDict@"),
    *("Counter", "Namespace", "ndarray", "bytes@", "np.dtype", "npscalar", "enum", "namedtuple", "dataclass"),
    *("int", "float", "Fraction", "range", "datetime", "timezone", "Size", "path", "struct", "sub", "long", "device"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3) | st.sampled_from(["t", "list"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(
            lambda tag, items: [tag, *items],
            st.sampled_from(TAGS),
            st.lists(inner, max_size=4),
        )
    ),
    max_leaves=25,
)


@given(JSON)
@settings(deadline=None, max_examples=300)
def test_A23_any_json_is_read_or_refused(skeleton: object) -> None:
    try:
        rebuild(skeleton, BYTES)
    except LoadError as exc:
        assert str(exc)
    tensor_paths(skeleton, 1)


SPECS = [
    TensorSpec("float32", (2, 3)),
    TensorSpec("complex64", (), None, "cuda:1", conj=True),
    TensorSpec("bfloat16", (3, 5), (1, 3), "cpu", parameter=True, requires_grad=True),
    TensorSpec("float8_e8m0fnu", (0, 2), (7, 1), neg=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_spec_survives_json(spec: TensorSpec) -> None:
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_spec_is_readable() -> None:
    assert spec_to_json(SPECS[0]) == {"dtype": "float32", "shape": [2, 3]}


PLAIN = {"dtype": "float32", "shape": [2]}


@pytest.mark.parametrize(
    "node",
    [
        None,
        [],
        "float32",
        {},
        {"dtype": "float32"},
        {"shape": [2]},
        {**PLAIN, "dtype": "float31"},
        {**PLAIN, "dtype": "object"},
        {**PLAIN, "dtype": None},
        {**PLAIN, "dtype": ["float32"]},
        {**PLAIN, "shape": 2},
        {**PLAIN, "shape": [-1]},
        {**PLAIN, "shape": [1.0]},
        {**PLAIN, "shape": [True]},
        {**PLAIN, "shape": [2**63]},
        {**PLAIN, "shape": [2**61]},
        {**PLAIN, "shape": [2**40, 2**40]},
        {**PLAIN, "shape": [0, 2**62, 2**62]},
        {**PLAIN, "shape": [1] * 65},
        {**PLAIN, "strides": None},
        {**PLAIN, "strides": []},
        {**PLAIN, "strides": [-1]},
        {**PLAIN, "strides": [1, 1]},
        {**PLAIN, "strides": [2**62]},
        {"dtype": "float32", "shape": [2**40, 2**40], "strides": [0, 0]},
        {**PLAIN, "device": 0},
        {**PLAIN, "device": "CUDA"},
        {**PLAIN, "device": "cuda:-1"},
        {**PLAIN, "device": "cuda:1; x"},
        {**PLAIN, "parameter": 1},
        {**PLAIN, "requires_grad": "yes"},
        {**PLAIN, "conj": True},
        {"dtype": "int8", "shape": [], "requires_grad": True},
        {"dtype": "float32", "shape": [0], "strides": [2**63]},
        {"dtype": "bool", "shape": [], "neg": True},
        {**PLAIN, "unknown": 1},
    ],
    ids=lambda node: json.dumps(node)[:60],
)
def test_A23_a_malformed_spec_is_damage(node: object) -> None:
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        spec_from_json(node)


def table(**columns: object) -> StateTable:
    """A table of one float32[2, 3] in 24 bytes."""
    fields: dict[str, object] = {
        "skeleton": ["t", 0],
        "specs": [TensorSpec("float32", (2, 3))],
        "tensor_spec": [0],
        "tensor_extent": [0],
        "tensor_offset": [0],
        "extent_bytes": [24],
        "extent_words": [WordType.F32],
    }
    return StateTable(**{**fields, **columns})


def test_a_sound_table_is_accepted() -> None:
    validate_table(table())
    validate_table(table(extent_bytes=[40], tensor_offset=[16]))
    validate_table(table(specs=[TensorSpec("float32", (2, 3), (3, 1))]))
    validate_table(table(specs=[TensorSpec("float32", (1000, 6), (0, 1))]))
    validate_table(table(specs=[TensorSpec("float32", (0, 2**40))], extent_bytes=[0]))


@pytest.mark.parametrize(
    "columns",
    [
        {"tensor_spec": [1]},
        {"tensor_spec": [-1]},
        {"tensor_spec": [True]},
        {"tensor_spec": [0.0]},
        {"tensor_spec": []},
        {"tensor_extent": [1]},
        {"tensor_extent": [-1]},
        {"tensor_extent": [None]},
        {"tensor_extent": [0, 0]},
        {"tensor_offset": [4]},
        {"tensor_offset": [-4]},
        {"tensor_offset": [2], "extent_bytes": [32]},
        {"tensor_offset": [2**80]},
        {"tensor_offset": ["0"]},
        {"extent_bytes": [23], "extent_words": [WordType.U8]},
        {"extent_bytes": [26]},
        {"extent_bytes": [-24]},
        {"extent_bytes": [2**63]},
        {"extent_bytes": [24.0]},
        {"extent_bytes": [24, 24]},
        {"extent_words": []},
        {"specs": []},
        {"specs": [TensorSpec("float32", (2, 3), (4, 1))]},
        {"specs": [TensorSpec("float32", (3, 2), (1, 4))]},
        {"specs": [TensorSpec("float32", (2,), (2**60,))]},
        {"specs": [TensorSpec("float64", (2, 3))]},
    ],
    ids=str,
)
def test_A23_a_tensor_that_leaves_its_extent_is_damage(columns: dict[str, object]) -> None:
    with pytest.raises(CorruptCheckpointError, match="table is damaged"):
        validate_table(table(**columns))


def test_extents_must_be_as_long_as_the_table_says() -> None:
    for extents in ([], [torch.zeros(23, dtype=torch.uint8)], [torch.zeros(24, dtype=torch.uint8)] * 2):
        with pytest.raises(InternalError):
            make_tensors(table(), extents)


def test_extents_inside_a_larger_buffer_are_taken_out() -> None:
    room = torch.arange(64, dtype=torch.uint8)
    (made,) = make_tensors(table(), [room[3:27]])
    assert made.view(torch.uint8).flatten().tolist() == list(range(3, 27))
    assert made.untyped_storage().nbytes() == 24


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_A23_any_edit_of_a_table_is_refused_or_harmless(draw: st.DataObject) -> None:
    base = torch.arange(64, dtype=torch.float32)
    state = {"a": base[:10], "b": [base[5:20].view(3, 5).t(), base[40:44]], "z": torch.ones(3, dtype=torch.complex64)}
    text, _ = stored(describe(state))
    fields = json.loads(text)
    spots = [(name, i) for name in fields if name not in ("skeleton", "specs") for i in range(len(fields[name]))]
    name, i = draw.draw(st.sampled_from(spots))
    wild = st.sampled_from([2**31, 2**63, 2**70, -(2**63), True, 1.5, None])
    fields[name][i] = draw.draw(st.integers(-9, 300) | wild)
    try:
        edited = read_table(json.dumps(fields))
    except (CheckpointError, ValueError, TypeError):  # WordType(…) refuses on its own
        return
    if sum(edited.extent_bytes) > 4096:
        return  # the chunks of a manifest must cover these, so it would be refused before they are allocated
    for made in make_tensors(edited, [torch.zeros(n, dtype=torch.uint8) for n in edited.extent_bytes]):
        made.flatten().tolist()


def test_a_part_is_named_by_its_place_in_the_whole() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"damaged at model\.layers\.1: ") as info:
        rebuild(["list", 1, ["nonsense"]], [], ".model.layers")
    assert info.value.fqn == "model.layers.1"
    assert rebuild(["list", 1], [], ".model") == [1]


def test_a_tensor_that_was_not_loaded_stands_nowhere() -> None:
    with pytest.raises(CorruptCheckpointError, match="tensor 1"):
        rebuild(["list", ["t", 0], ["t", 1]], [ONE[0], None])


def test_fqn_of_a_hostile_skeleton_is_harmless() -> None:
    wild = replace(table(), skeleton={"a": ["dict", 5, [["tuple", {}], ["t", 0]], [1]], "b": ["t", 7], "c": ["t"]})
    assert wild.fqn(0) == "a[({…},)]"
    assert replace(table(), skeleton=None).fqn(0) == ""
