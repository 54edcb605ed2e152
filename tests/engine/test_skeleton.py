"""Containers come back with their class, their keys' types and their order."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import enum
import functools
import random
import sys
import types
import typing
from collections import Counter, OrderedDict, defaultdict, deque

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.engine.through import through
from tests.kit.bits import assert_same_bits
from tidegate.errors import CorruptCheckpointError, LoadError, UnsupportedStateError
from tidegate.rebuild import rebuild
from tidegate.skeleton import MAX_DEPTH
from tidegate.state import describe


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"
    CRIMSON = 1  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Mode(enum.IntFlag):
    A = 1
    B = 2


class Name(enum.StrEnum):
    X = "x"


Point = collections.namedtuple("Point", "x y")


class Pair(typing.NamedTuple):
    left: object
    right: object = None


@dataclasses.dataclass
class Config:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weights: object = None

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError("init must not run at load")

    @functools.cached_property
    def doubled(self) -> float:
        return self.lr * 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    inner: Config
    level: Level = Level.LOW


class Outer:
    @dataclasses.dataclass
    class Inner:
        a: int = 1


CLASSES = [Colour, Level, Access, Mode, Name, Point, Pair, Config, Frozen, Outer.Inner]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_A13_keys_keep_their_type_and_order() -> None:
    state = {0: tensor(1), "0": tensor(2), (1, 2): tensor(3), 1.5: tensor(4), None: tensor(6), b"k": tensor(7)}
    state |= {True: tensor(5), (1, ("x", None)): 8, -0.5: 9, 2**70: 10, (): 11, frozenset({1, "a"}): 12}
    state |= {torch.float32: 1, np.float64(2.5): 2, "z": 3, "a": 4}
    back = through(state)
    assert_same_bits(state, back)
    assert list(map(type, back)) == list(map(type, state))


def test_A13_true_and_one_are_told_apart() -> None:
    assert_same_bits({True: "t"}, through({True: "t"}))
    assert_same_bits({1: "t"}, through({1: "t"}))
    assert_same_bits({1.0: "t"}, through({1.0: "t"}))
    assert_same_bits({float("nan"): 1, float("inf"): 2}, through({float("nan"): 1, float("inf"): 2}))


def test_A13_containers_keep_their_class() -> None:
    with torch.serialization.safe_globals(CLASSES):
        state = {
            "empty": [{}, [], (), set(), frozenset(), OrderedDict(), deque(), "", Counter()],
            "nested": [(1, [2, (3, {})])],
            "od": OrderedDict([("b", 1), ("a", tensor(1)), (3, None)]),
            "dd": defaultdict(list, {"x": [1], 2: []}),
            "dd0": defaultdict(None, {}),
            "counter": Counter({"a": 2, 1: -1}),
            "deque": deque([1, tensor(2)], maxlen=5),
            "set": {1, "a", (2, 3), None, b"x"},
            "frozen": frozenset({frozenset({1}), 2.5}),
            "ns": argparse.Namespace(lr=1, **{"not an identifier": 2}),
            "sns": types.SimpleNamespace(a=tensor(3)),
            "point": Point(1, tensor(4)),
            "pair": Pair(left=Point(0, 0)),
            "optimizer": torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(),
        }
        assert_same_bits(state, through(state))


@pytest.mark.parametrize("factory", [None, list, dict, int, float, set, str, tuple, bool, OrderedDict])
def test_A14_defaultdict_keeps_its_factory(factory: type | None) -> None:
    back = through(defaultdict(factory, {"a": 1}))
    assert back.default_factory is factory


def test_an_unknown_factory_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="factory"):
        describe({"d": defaultdict(lambda: 1)})
    with pytest.raises(UnsupportedStateError, match="factory"):
        describe({"d": defaultdict(type("list", (), {}))})


def test_the_metadata_of_a_state_dict_comes_back() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Linear(2, 2))
    state = model.state_dict()
    back = through({"model": state})["model"]
    assert back._metadata == state._metadata and type(back._metadata) is type(state._metadata)
    assert_same_bits({"model": state}, {"model": back})
    model.load_state_dict(back)
    odd = OrderedDict()
    odd.mine = 1
    with pytest.raises(UnsupportedStateError, match="mine"):
        describe({"odd": odd})


def test_A14_classes_come_back_where_they_are_allowed() -> None:
    config = Config(lr=0.5, weights=tensor(1, 2))
    assert config.doubled == 1.0
    state = {
        "enums": [Colour.RED, Colour.CRIMSON, Colour.GREEN, Level.HIGH, Name.X],
        "flags": [Access.READ, Access.READ | Access.RUN, Access(0), Mode.A | Mode.B, Mode(0)],
        "keys": {Colour.RED: 1, Level.LOW: 2, Point(1, (2, 3)): 3, (Colour.GREEN,): 4},
        "config": Frozen(inner=config, level=Level.HIGH),
        "inner": Outer.Inner(5),
        "broken": dataclasses.replace(config, weights=None),
    }
    object.__setattr__(state["broken"], "lr", -1.0)
    with torch.serialization.safe_globals(CLASSES):
        back = through(state)
    assert_same_bits(state, back)
    assert "doubled" not in vars(back["config"].inner)


def test_A23_classes_that_are_not_allowed_are_named_and_not_made() -> None:
    state = {"a": [Config(), Colour.RED], "b": {Level.LOW: Point(1, 2)}, "s": {Access.READ, Access.WRITE}}
    with pytest.raises(LoadError) as info:
        through(state)
    assert not isinstance(info.value, CorruptCheckpointError)
    assert info.value.stage == "place"
    for cls in (Config, Colour, Level, Point, Access):
        assert f"{__name__}:{cls.__qualname__}" in str(info.value)
    assert "torch.serialization.safe_globals([Config, Colour" in str(info.value)
    with torch.serialization.safe_globals([Config, Colour, Level, Point]), pytest.raises(LoadError) as info:
        through(state)
    assert "Access" in str(info.value) and "Config" not in str(info.value)


def test_an_allowed_class_may_go_by_an_older_name() -> None:
    with torch.serialization.safe_globals([(Config, "old_module.OldConfig")]):
        back = rebuild(["dataclass", "old_module:OldConfig", {"lr": 1.0, "betas": ["tuple"], "weights": None}], [])
    assert back == Config(1.0, (), None)


@pytest.mark.parametrize(
    ("node", "error"),
    [
        (["dataclass", f"{__name__}:Colour", {}], CorruptCheckpointError),
        (["dataclass", f"{__name__}:Point", {"x": 1, "y": 2}], CorruptCheckpointError),
        (["namedtuple", f"{__name__}:Config", ["lr", 1]], CorruptCheckpointError),
        (["enum", f"{__name__}:Config", "lr"], CorruptCheckpointError),
        (["enum", f"{__name__}:Colour", "BLUE"], CorruptCheckpointError),
        (["enum", f"{__name__}:Colour", "__init__"], CorruptCheckpointError),
        (["enum", f"{__name__}:Colour", 1], CorruptCheckpointError),
        (["enum", f"{__name__}:Access", 64], CorruptCheckpointError),
        (["enum", f"{__name__}:Access", 1.5], CorruptCheckpointError),
        (["enum", 5, "x"], CorruptCheckpointError),
        (["dataclass", f"{__name__}:Config", {"lr": 1}], LoadError),
        (["dataclass", f"{__name__}:Config", {"lr": 1, "weights": 1, "betas": 1, "evil": 1}], LoadError),
        (["dataclass", f"{__name__}:Config", ["list"]], CorruptCheckpointError),
        (["dataclass", f"{__name__}:Config"], CorruptCheckpointError),
        (["namedtuple", f"{__name__}:Point", ["x", 1]], LoadError),
        (["namedtuple", f"{__name__}:Point", ["x", 1], ["y", 2], ["x", 3]], CorruptCheckpointError),
        (["namedtuple"], CorruptCheckpointError),
        (["dataclass", "os:system", {}], LoadError),
        (["enum", "builtins:exec", "x"], LoadError),
        (["namedtuple", "subprocess:Popen", ["args", "x"]], LoadError),
    ],
    ids=lambda value: str(value)[:60],
)
def test_A23_a_class_is_only_made_as_what_it_is(node: list[object], error: type[LoadError]) -> None:
    with torch.serialization.safe_globals(CLASSES), pytest.raises(LoadError) as info:
        rebuild({"x": node}, [])
    assert type(info.value) is error


def test_A23_nothing_that_a_checkpoint_names_is_imported() -> None:
    before = set(sys.modules)
    nodes = [["dataclass", "antigravity:Flight", {}], ["enum", "this:X", "Y"], ["namedtuple", "idlelib.idle:X"]]
    for node in nodes:
        with pytest.raises(LoadError):
            rebuild(node, [])
    assert not {"antigravity", "this", "idlelib"} & (set(sys.modules) - before)


def test_A14_a_local_class_is_refused() -> None:
    @dataclasses.dataclass
    class Local:
        a: int = 1

    with pytest.raises(UnsupportedStateError, match="top level") as info:
        describe({"a": [0, Local()]})
    assert info.value.path == "a.1"
    impostor = dataclasses.make_dataclass("Config", ["a"])
    impostor.__module__ = __name__
    with pytest.raises(UnsupportedStateError, match="top level"):
        describe(impostor(1))


@dataclasses.dataclass
class Loose:
    a: int = 1
    unset: int = dataclasses.field(init=False)


class Sub(Point):
    pass


@dataclasses.dataclass
class Mapped(dict):
    a: int = 1


@dataclasses.dataclass
class Net(torch.nn.Module):
    a: int = 1


def test_what_fields_do_not_cover_is_refused() -> None:
    config = Config()
    config.extra = 1
    with pytest.raises(UnsupportedStateError, match="extra"):
        describe([config])
    with pytest.raises(UnsupportedStateError, match="unset"):
        describe([Loose()])
    sub = Sub(1, 2)
    sub.note = "x"
    with pytest.raises(UnsupportedStateError, match="note"):
        describe([sub])
    with pytest.raises(UnsupportedStateError, match="built on another container"):
        describe([Mapped()])
    with pytest.raises(UnsupportedStateError):
        describe([Config])


@pytest.mark.parametrize(
    ("state", "path"),
    [
        (lambda f: f, "state"),
        (lambda f: {"a": f}, "a"),
        (lambda f: [f], "0"),
        (lambda f: {"a": [1, (2, f)]}, "a.1.1"),
        (lambda f: {"a": {"x.y": f}}, 'a["x.y"]'),
        (lambda f: {"x.y": f}, 'state["x.y"]'),
        (lambda f: {"a": {(1, 2): f}}, "a[(1, 2)]"),
        (lambda f: {"a": {(1, ("b", None)): f}}, "a[(1, (\"b\", None))]"),
        (lambda f: {"a": {0: {True: f}}}, "a[0][True]"),
        (lambda f: {"a": {"0": f}}, 'a["0"]'),
        (lambda f: {"a": {"q\"": f}}, 'a["q\\""]'),
        (lambda f: OrderedDict(a=OrderedDict(b=f)), "a.b"),
        (lambda f: {"a": Point(1, f)}, "a.y"),
        (lambda f: {"a": Config(weights=[f])}, "a.weights.0"),
        (lambda f: {"a": argparse.Namespace(b=f)}, "a.b"),
        (lambda f: deque([0, f]), "1"),
        (lambda f: defaultdict(list, a=[f]), "a.0"),
        (lambda f: {"a": {"s": {1, f}}}, "a.s"),
        (lambda f: {Level.LOW: f}, "state[tests.engine.test_skeleton:Level.LOW]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_A02_a_refusal_names_the_path(state: object, path: str) -> None:
    with pytest.raises(UnsupportedStateError) as info:
        describe(state(lambda: 1))
    assert info.value.path == path
    assert str(info.value).startswith(f"cannot save {path}: ")


@pytest.mark.parametrize(
    "key", [object(), lambda: 1, torch.ones(1), int, Config, torch.nn.Parameter(torch.ones(1)), (1, object())]
)
def test_A13_an_unsupported_key_is_refused_by_name(key: object) -> None:
    with pytest.raises(UnsupportedStateError, match="key of class") as info:
        describe({"a": {"ok": 1, key: 2}})
    assert info.value.path.startswith("a[")


def test_a_tensor_in_several_places_is_one_object() -> None:
    t = tensor(1, 2)
    twin = torch.nn.Parameter(tensor(3))
    state = {"a": t, "b": [t, {"c": t}], "p": twin, "q": (twin,)}
    back = through(state)
    assert back["a"] is back["b"][0] is back["b"][1]["c"]
    assert back["p"] is back["q"][0]
    assert_same_bits(state, back)
    assert describe(state).fqn(0) == "a"


def test_a_cycle_is_refused() -> None:
    cycle: list[object] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(UnsupportedStateError, match="contains itself") as info:
        describe({"a": cycle})
    assert info.value.path == "a.1.again"
    shared = [1]
    assert_same_bits([shared, shared], through([shared, shared]), aliasing=False)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": x}, lambda x: (x,)])
def test_depth_has_a_limit(wrap: object) -> None:
    state: object = wrap(tensor(1)[0])
    for _ in range(MAX_DEPTH - 1):
        state = wrap(state)
    back = through(state)
    for _ in range(MAX_DEPTH):
        back = back["a"] if isinstance(back, dict) else back[0]
    assert back.item() == 1
    with pytest.raises(UnsupportedStateError, match=str(MAX_DEPTH)):
        describe(wrap(state))
    for _ in range(5000):
        state = wrap(state)
    with pytest.raises(UnsupportedStateError, match=str(MAX_DEPTH)):
        describe(state)


def test_deep_keys_and_pairs_count_too() -> None:
    state: object = 1
    for _ in range(MAX_DEPTH // 2):
        state = {0: state}
    through(state)
    with pytest.raises(UnsupportedStateError):
        describe([[state]])
    key: tuple[object, ...] = ()
    for _ in range(400):
        key = (key,)
    with pytest.raises(UnsupportedStateError):
        describe({key: 1})


@pytest.mark.parametrize("make", [list, dict])
def test_a_call_from_deep_in_the_stack_is_refused_not_torn(make: object) -> None:
    state: object = make()
    for _ in range(MAX_DEPTH - 1):
        state = [state]
    skeleton = describe(state).skeleton

    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)
            return
        with pytest.raises(UnsupportedStateError, match="shallower"):
            describe(state)
        with pytest.raises(LoadError, match="shallower") as info:
            rebuild(skeleton, [])
        assert not isinstance(info.value, CorruptCheckpointError)

    depth = len(_frames())
    deeper(sys.getrecursionlimit() - depth - 200)


def _frames() -> list[object]:
    frames, frame = [], sys._getframe()
    while frame:
        frames.append(frame)
        frame = frame.f_back
    return frames


def test_A14_random_states_resume() -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "numpy_new": np.random.default_rng(3).bit_generator.state,
        "torch": torch.get_rng_state(),
        "scalars": [np.float64(0.1), np.arange(3), 10**40, float("nan"), 1j, b"x"],
    }
    back = through(state)
    assert_same_bits(state, back)
    expected = _draws()
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    assert _draws() == expected
    generator = np.random.default_rng(0)
    generator.bit_generator.state = back["numpy_new"]
    assert generator.random(100).tolist() == np.random.default_rng(3).random(100).tolist()


def _draws() -> list[object]:
    return [[random.random() for _ in range(100)], np.random.random(100).tolist(), torch.rand(100).tolist()]


def test_A14_a_whole_trainer_state_comes_back() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "config": Config(),
        "step": 7,
    }
    with torch.serialization.safe_globals([Config]):
        back = through(copy.deepcopy(state))
    assert_same_bits(state, back)
    optimizer.load_state_dict(back["optimizer"])
    schedule.load_state_dict(back["schedule"])


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.sampled_from(Colour),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=4,
)
LEAVES = (
    KEYS
    | st.complex_numbers()
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(lambda n: torch.full((n, 2), 0.5), st.integers(0, 3))
    | st.builds(lambda n: np.arange(n, dtype="i2").reshape(n, 1), st.integers(0, 3))
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda d: defaultdict(dict, d))
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 7))
        | st.builds(Pair, inner, inner)
        | st.builds(Config, st.floats(0, 1), st.just((1.0, 2.0)), inner)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=20,
)


@given(STATES)
@settings(deadline=None, max_examples=150)
def test_A13_any_nesting_comes_back(state: object) -> None:
    with torch.serialization.safe_globals(CLASSES):
        assert_same_bits(state, through(state))
