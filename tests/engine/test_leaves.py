"""Values at the leaves come back with their type and their bits."""

from __future__ import annotations

import collections
import datetime as dt
import json
import math
import pathlib
import struct
import uuid
import zoneinfo
from decimal import Decimal
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.engine.through import through
from tests.kit.bits import assert_same_bits, assert_same_leaf
from tidegate.errors import CorruptCheckpointError, LoadError, UnsupportedStateError
from tidegate.rebuild import rebuild
from tidegate.state import describe

NANS = [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001, 0xFFFFFFFFFFFFFFFF, 0x7FF4000000ABCDEF]
UTC_MINUS_3 = dt.timezone(dt.timedelta(hours=-3))

LEAVES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    2**63,
    -(2**63) + 1,
    -(2**63),
    10**40,
    -(10**40),
    1 << 5000,
    0.0,
    -0.0,
    5e-324,
    -2.2250738585072014e-308,
    1.7976931348623157e308,
    0.1,
    1e22,
    math.inf,
    -math.inf,
    *(struct.unpack(">d", struct.pack(">Q", bits))[0] for bits in NANS),
    "",
    "plain",
    "naïve ∂ 🙂 \x00 \u2028",
    "\ud800",
    "\ud83d\ude42",  # two surrogates, which JSON would join
    "a\udcff.pt",
    b"",
    b"\x00\xff" * 3,
    bytes(range(256)) * 16,
    bytes(range(256)) * 16 + b"x",
    bytearray(b"abc"),
    bytearray(5000),
    1 + 2j,
    complex(-0.0, math.inf),
    complex(math.nan, 5e-324),
    Decimal("-0"),
    Decimal("1.10"),
    Decimal("sNaN12"),
    Decimal("1E+999999"),
    Fraction(-3, 7),
    Fraction(10**40, 3),
    uuid.UUID(int=2**127 + 5),
    range(0),
    range(2, 10**30, 7),
    range(5, -5, -2),
    dt.datetime(2026, 1, 31, 12, 30, 15, 999999),
    dt.datetime(2026, 1, 31),
    dt.datetime(1, 1, 1, tzinfo=dt.UTC),
    dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC_MINUS_3),
    dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.datetime(2026, 10, 25, 2, 30, fold=1),
    dt.date(2026, 2, 28),
    dt.time(23, 59, 59, 1),
    dt.time(1, 2, fold=1, tzinfo=dt.timezone(dt.timedelta(seconds=1, microseconds=1), "odd \ud800")),
    dt.timedelta(-1, 5, 7),
    dt.timedelta.max,
    dt.UTC,
    zoneinfo.ZoneInfo("UTC"),
    pathlib.PurePosixPath("a/../b"),
    pathlib.PureWindowsPath("C:\\x\\y"),
    pathlib.Path("/tmp/é\udcff"),
    torch.Size([]),
    torch.Size([3, 0, 2]),
    torch.float8_e4m3fn,
    torch.quint8,
    torch.bool,
    torch.device("cuda:3"),
    torch.device("cpu"),
    torch.device("meta"),
    torch.strided,
    torch.sparse_coo,
    torch.channels_last,
    torch.preserve_format,
    np.dtype("f4"),
    np.dtype(">i8"),
    np.dtype("M8[25us]"),
    np.dtype([("a", "<i2"), ("b", "S3", (2, 2)), ("c", [("d", ">f8")])]),
    np.dtype({"names": ["x", "y"], "formats": ["u1", "f4"], "offsets": [9, 1], "itemsize": 32}),
    np.dtype("i1,f8", align=True),
]

SCALARS = [
    np.float64(0.1),
    np.float64(-0.0),
    np.frombuffer(bytes.fromhex("01000000000cf87f"), "<f8")[0],
    np.float32(1e-45),
    np.float16(np.nan),
    np.longdouble(1) / 3,
    np.clongdouble(1 - 2j),
    np.complex64(1 - 0j),
    np.int8(-128),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.str_("é\x00"),
    np.str_(""),
    np.bytes_(b"a\x00b\x00"),
    np.datetime64("2026-01-31T12:00", "ns"),
    np.datetime64("NaT", "ns"),
    np.timedelta64(-5, "h"),
    np.void(b"\x00\xff\x00"),
    np.zeros(1, [("a", "i4"), ("b", "U3")])[0],
]


def named(value: object) -> str:
    return f"{type(value).__name__}-{value!r:.24}".encode("ascii", "replace").decode()


@pytest.mark.parametrize("value", LEAVES, ids=named)
def test_A14_leaf_comes_back(value: object) -> None:
    assert_same_bits([value], through([value]))
    assert_same_bits({"k": value}, through({"k": value}))


@pytest.mark.parametrize("value", SCALARS, ids=named)
def test_A14_numpy_scalar_comes_back(value: np.generic) -> None:
    assert_same_bits([value], through([value]))


def test_a_leaf_is_readable_where_json_has_it() -> None:
    state = {"a": None, "b": True, "c": 7, "d": 0.5, "e": "text", "f": [1], "g": 2**70, "h": math.inf}
    expected = {**state, "f": ["list", 1], "g": ["int", hex(2**70)], "h": ["float", "7ff0000000000000"]}
    assert describe(state).skeleton == expected


@given(st.floats(allow_nan=True, width=64) | st.integers() | st.text() | st.binary(max_size=64) | st.complex_numbers())
@settings(deadline=None, max_examples=150)
def test_A14_any_plain_value_comes_back(value: object) -> None:
    assert_same_leaf(value, through(value))


@given(st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=100)
def test_A19_every_float_keeps_its_bits(bits: int) -> None:
    (value,) = struct.unpack(">d", struct.pack(">Q", bits))
    back = through({"x": value, "y": (value, complex(1, value))})
    assert struct.pack(">d", back["x"]) == struct.pack(">d", value)
    assert struct.pack(">d", back["y"][1].imag) == struct.pack(">d", value)


TIMES = st.datetimes(timezones=st.none() | st.timezones()) | st.times() | st.timedeltas() | st.dates()


@given(TIMES | st.decimals() | st.fractions())
@settings(deadline=None, max_examples=100)
def test_A14_dates_and_exact_numbers_come_back(value: object) -> None:
    assert_same_leaf(value, through(value))


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Real(np.float64):
    pass


class Zone(dt.tzinfo):
    def utcoffset(self, when: object) -> dt.timedelta:
        return dt.timedelta(0)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (lambda: 1, "function"),
        (len, "function"),
        (Text("x"), "str(x)"),
        (Whole(3), "int(x)"),
        (Real(3), "convert it to float64"),
        (torch.__version__, "str(x)"),
        (object(), "object"),
        (int, "class"),
        (torch, "module"),
        (torch.nn.Linear(1, 1), "state_dict()"),
        (torch.optim.SGD([torch.ones(1)]), "state_dict()"),
        (torch.Generator(), "get_state()"),
        (np.random.default_rng(0), "bit_generator.state"),
        (np.random.RandomState(0), "get_state()"),
        (iter([]), "iterator"),
        (dt.datetime(2026, 1, 1, tzinfo=Zone()), "time zone"),
        (torch.max(torch.ones(2, 2), 0), "tuple(x)"),
        (collections.UserDict(), "UserDict"),
        (np.array([None]), "Python objects"),
        (np.ma.masked_array([1]), "asarray"),
        (np.rec.array([(1,)], dtype=[("a", "i4")]), "asarray"),
        (np.dtype("O"), "Python objects"),
        (Ellipsis, "ellipsis"),
    ],
    ids=lambda value: f"{type(value).__name__}" if not isinstance(value, str) else value,
)
def test_A02_what_cannot_be_saved_is_refused_by_path(value: object, what: str) -> None:
    with pytest.raises(UnsupportedStateError) as info:
        describe({"good": torch.ones(2), "cfg": {"f": value}})
    assert info.value.path == "cfg.f"
    assert "cfg.f" in str(info.value)
    assert what in str(info.value)


HOSTILE_LEAVES = [
    [],
    [None],
    [3],
    [["list"]],
    ["nonsense"],
    ["int"],
    ["int", 5],
    ["int", "zz"],
    ["int", "1", "2"],
    ["float", "7ff"],
    ["float", 1.0],
    ["float", "zzzzzzzzzzzzzzzz"],
    ["str", "!!"],
    ["str", "/w=="],
    ["bytes"],
    ["bytes", "a"],
    ["bytes", 3],
    ["bytearray", None],
    ["complex", 1.0],
    ["complex", 1, 2],
    ["complex", [1.0], 2.0],
    ["Decimal", "x"],
    ["Decimal", 1],
    ["Fraction", 1, 0],
    ["Fraction", 1.5, 2],
    ["UUID", "12"],
    ["range", 1, 2, 0],
    ["range", 1, 2],
    ["range", True, 2, 1],
    ["datetime", "now", 0, None],
    ["datetime", "2026-01-01T00:00:00", 2, None],
    ["datetime", "2026-01-01T00:00:00", 0, ["int", "1"]],
    ["datetime", "2026-01-01T00:00:00", 0, ["datetime", "2026-01-01T00:00:00", 0, None]],
    ["timezone", ["timedelta", 5, 0, 0], None],
    ["timezone", None, None],
    ["timezone", ["timezone", None, None], None],
    ["ZoneInfo", "../../etc/passwd"],
    ["ZoneInfo", "/etc/localtime"],
    ["ZoneInfo", ""],
    ["ZoneInfo", "os.path"],
    ["timedelta", 10**30, 0, 0],
    ["date", "2026-13-01"],
    ["time", 3, 0, None],
    ["path", "PosixPath"],
    ["path", "Popen", "x"],
    ["path", "PurePosixPath", 3],
    ["Size", 1.5],
    ["Size", 2**70],
    ["device", "cuda:0; rm"],
    ["device", "nonsense"],
    ["device", "cuda:99999999999999999999"],
    ["dtype", 3],
    ["npscalar", "<f8", "00"],
    ["npscalar", "O", "0000000000000000"],
    ["npscalar", "|O", "0000000000000000"],
    ["npscalar", "<f8"],
    ["npscalar", "<f8", "zz"],
    ["npscalar", ["struct", 8, False, ["a", "|O", 0, None]], "0000000000000000"],
    ["npscalar", ["struct", 4, False, ["a", "<f8", 0, None]], "00000000"],
    ["npscalar", ["struct", 8, False, ["a", "<f8", -8, None]], "0000000000000000"],
    ["npscalar", ["struct", 8, False, ["a", "<f8", 0, None], ["a", "<f8", 0, None]], "0000000000000000"],
    ["npscalar", ["struct", 8, 0, []], ""],
    ["npscalar", ["sub", "<f8"], ""],
    ["np.dtype"],
    ["np.dtype", "object"],
    ["np.dtype", "<f8,O"],
    ["np.dtype", ["long", "<f4", 23]],
    ["np.dtype", ["sub", "<i4", -1]],
    ["np.dtype", ["sub", "<i4", 2**40, 2**40]],
    ["np.dtype", "|V99999999999"],
    ["np.str_"],
    ["np.bytes_", "x"],
    ["np.bytes_", ["bytes"]],
]


@pytest.mark.parametrize("node", HOSTILE_LEAVES, ids=lambda node: json.dumps(node)[:50])
def test_A23_a_malformed_leaf_is_damage_named_by_place(node: list[object]) -> None:
    with pytest.raises(CorruptCheckpointError) as info:
        rebuild({"a": ["list", 1, {"b": node}]}, [])
    assert info.value.fqn == "a.1.b"
    assert "a.1.b" in str(info.value)
    assert len(str(info.value)) < 500


def test_what_this_machine_lacks_is_not_damage() -> None:
    nodes = [["ZoneInfo", "Atlantis/Capital"], ["dtype", "torch.float3_e9"], ["np.dtype", ["long", "<f16", 112]]]
    for node in nodes:
        with pytest.raises(LoadError, match="x") as info:
            rebuild({"x": node}, [])
        assert not isinstance(info.value, CorruptCheckpointError)


def test_paths_of_another_system_come_back_pure() -> None:
    assert rebuild(["path", "WindowsPath", "C:\\x"], []) == pathlib.PureWindowsPath("C:\\x")
