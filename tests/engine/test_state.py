"""Describing a state: refusals, names, signatures, speed; and the comparer that these tests rest on."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.engine.through import through
from tests.kit.bits import assert_same_bits
from tidegate.errors import UnsupportedStateError
from tidegate.extents import gather, scatter
from tidegate.rebuild import rebuild
from tidegate.state import describe, make_tensors, validate_table, version_of
from tidegate.tensors import TensorSpec


def _freed() -> torch.Tensor:
    x = torch.ones(100)
    x.untyped_storage().resize_(0)
    return x


def _shrunk() -> torch.Tensor:
    x = torch.ones(100)
    x.untyped_storage().resize_(40)
    return x


def _quantised() -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def _nested() -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _csr() -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def _functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.ones(3))


class Tagged(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.empty(4, device="meta"), "meta tensor"),
    "meta_parameter": (lambda: torch.nn.Parameter(torch.empty(4, device="meta")), "meta tensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "csr": (_csr, "sparse"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "mkldnn"),
    "quantised": (_quantised, "quantised"),
    "nested": (_nested, "nested"),
    "fake": (_fake, "FakeTensor"),
    "functional": (_functional, "pass a plain copy"),
    "uninitialized": (lambda: torch.nn.LazyLinear(3).weight, "uninitialized"),
    "subclass": (lambda: torch.ones(3).as_subclass(Tagged), "Tagged"),
    "freed": (_freed, "freed"),
    "shrunk": (_shrunk, "freed"),
    "65 dimensions": (lambda: torch.ones((1,) * 65), "larger"),
    "endless": (lambda: torch.empty(0, 2**62), "larger"),
    "int4": (lambda: torch.empty(0, dtype=torch.uint8).set_(torch.ones(3).untyped_storage()).view(torch.int4), "int4"),
    "bits8": (lambda: torch.empty(0, dtype=torch.bits8).set_(torch.ones(3).untyped_storage(), 0, (4,), (1,)), "bits8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_A12_a_tensor_without_plain_bytes_is_refused_by_path(name: str) -> None:
    make, what = REFUSED[name]
    with pytest.raises(UnsupportedStateError) as info:
        describe({"a": torch.ones(4), "b": [torch.ones(3), torch.ones(100), {"w": make()}]})
    assert info.value.path == "b.2.w"
    assert what in str(info.value)


def test_A16_a_dtensor_is_sent_to_the_distributed_engine() -> None:
    from torch.distributed.tensor import DTensor

    sharded = torch.Tensor._make_wrapper_subclass(DTensor, (3,))
    with pytest.raises(UnsupportedStateError, match=r"process_group, or use tidegate\.dcp") as info:
        describe({"w": sharded})
    assert info.value.path == "w"


def test_A12_tensors_inside_function_transforms_are_refused() -> None:
    seen: list[str] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedStateError) as info:
            describe({"x": x})
        seen.append(info.value.path)
        return x

    torch.func.vmap(inner)(torch.ones(3, 2))
    assert seen == ["x"]


def test_nothing_is_read_or_changed_by_describing() -> None:
    x = torch.nn.Parameter(torch.randn(10))
    state = {"x": x, "half": x.detach()[::2]}
    version, bits = x._version, x.detach().clone()
    describe(state)
    assert x._version == version and torch.equal(x.detach(), bits)
    assert version_of(x) == version
    with torch.inference_mode():
        assert version_of(torch.ones(2)) == 0


def test_the_collector_is_as_it_was_after_describing() -> None:
    try:
        for switch, is_on in ((gc.disable, False), (gc.enable, True)):
            switch()
            describe({"x": torch.ones(1)})
            assert gc.isenabled() == is_on
            with pytest.raises(UnsupportedStateError):
                describe({"x": object()})
            assert gc.isenabled() == is_on
    finally:
        gc.enable()


def test_names_are_paths() -> None:
    state = OrderedDict(
        model={"layers": [{"weight": torch.ones(1)}], "x.y": torch.ones(2)},
        optimizer={"state": {0: {"exp_avg": torch.ones(3)}}},
        array=np.ones(3),
        long=b"x" * 5000,
        tup=(torch.ones(4), bytearray(9999)),
    )
    table = describe(state)
    assert [table.fqn(i) for i in range(7)] == [
        "model.layers.0.weight",
        'model["x.y"]',
        "optimizer.state[0].exp_avg",
        "array",
        "long",
        "tup.0",
        "tup.1",
    ]
    assert describe(torch.ones(1)).fqn(0) == "state"
    assert_same_bits(state, through(state))


def test_equal_tensors_share_a_spec() -> None:
    table = describe([torch.ones(3), torch.ones(3), torch.nn.Parameter(torch.ones(3)), np.ones(3)])
    assert table.specs == [
        TensorSpec("float32", (3,)),
        TensorSpec("float32", (3,), parameter=True, requires_grad=True),
        TensorSpec("uint8", (24,)),
    ]
    assert table.tensor_spec == [0, 0, 1, 2]


def test_the_signature_is_of_the_structure() -> None:
    def state(**changes: object) -> dict[object, object]:
        return {"a": torch.randn(3), "b": [torch.randn(2, 2), 5], "lr": 0.1, **changes}

    signature = describe(state()).signature
    assert len(signature) == 16
    assert describe(state(lr=0.2)).signature == signature
    assert describe(state(b=[torch.randn(2, 2), "x"])).signature == signature
    base = torch.randn(4)
    others = [
        state(a=torch.randn(4)),
        state(a=torch.randn(3, dtype=torch.float64)),
        state(a=torch.nn.Parameter(torch.randn(3))),
        state(a=torch.randn(1, 3)),
        state(b=[torch.randn(2, 2).t(), 5]),
        state(b=[torch.randn(2, 2)]),
        state(c=1),
        {"A": torch.randn(3), "b": [torch.randn(2, 2), 5], "lr": 0.1},
        {"b": [torch.randn(2, 2), 5], "a": torch.randn(3), "lr": 0.1},
        state(a=base[:3], b=[base.view(2, 2), 5]),
    ]
    signatures = [describe(other).signature for other in others]
    assert len({signature, *signatures}) == len(others) + 1


def test_A26_a_hundred_thousand_tiny_tensors() -> None:
    num = 100_000
    flat = torch.randn(num, 8)
    state = {f"t{i}": row.clone() for i, row in enumerate(flat)}
    seconds = {}

    def timed(name: str, work: Callable[[], object]) -> object:
        start = time.thread_time()
        result = work()
        seconds[name] = time.thread_time() - start
        return result

    table = timed("describe", lambda: describe(state))
    chunk = torch.empty(num * 32, dtype=torch.uint8)
    timed("gather", lambda: gather(table.sources, chunk))
    assert chunk.numpy().tobytes() == flat.numpy().tobytes()
    parts = timed("scatter", lambda: scatter(chunk, table.extent_bytes))
    timed("validate", lambda: validate_table(table))
    back = timed("make", lambda: make_tensors(table, parts))
    loaded = timed("rebuild", lambda: rebuild(table.skeleton, back))
    assert list(loaded) == list(state)
    assert torch.stack(list(loaded.values())).numpy().tobytes() == flat.numpy().tobytes()
    # An idle machine takes a third of these; they are there to catch what grows faster than the number of tensors.
    # Coverage traces every line, which makes such loops twice as slow.
    slower = 1 if sys.gettrace() is None else 2
    assert seconds["describe"] < 2 * slower, seconds
    assert seconds["gather"] + seconds["scatter"] < 2 * slower, seconds
    assert seconds["make"] + seconds["rebuild"] + seconds["validate"] < 2.5 * slower, seconds
    columns = [table.tensor_spec, table.tensor_extent, table.tensor_offset, table.extent_bytes]
    text = json.dumps([table.skeleton, *columns, [int(word) for word in table.extent_words]], separators=(",", ":"))
    assert len(text) <= 45 * num


def test_A26_many_views_of_one_buffer_take_linear_time() -> None:
    flat = torch.randn(20_000, 4)
    start = time.thread_time()
    table = describe([flat, *flat.unbind()])
    assert table.extent_bytes == [flat.nbytes]
    assert time.thread_time() - start < 2


DIFFERENT: list[tuple[object, object]] = [
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
    (torch.ones(2), torch.ones(1, 2)),
    (torch.ones(2, 2), torch.ones(2, 2).t()),
    (torch.ones(2), torch.nn.Parameter(torch.ones(2))),
    (torch.ones(2), torch.ones(2, requires_grad=True)),
    ([x := torch.ones(2), x], [torch.ones(2), torch.ones(2)]),
    ([x, x], [x, x.view(2)]),
    ([x, x.view(2)], [torch.ones(2), torch.ones(2)]),
    ([torch.ones(2), torch.ones(2)], [x, x.view(2)]),
    ([(y := torch.ones(4))[:3], y[1:]], [(z := torch.ones(5))[:3], z[2:]]),
    ([(y := torch.ones(4))[::2], y[1:]], [torch.ones(2), torch.ones(3)]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": 1}, {"a": True}),
    ({1: 1}, {True: 1}),
    ({1: 1}, {1.0: 1}),
    ([1], (1,)),
    ([1], [1.0]),
    ({}, OrderedDict()),
    (float("nan"), -float("nan")),
    (0.0, -0.0),
    (np.float64(1), 1.0),
    (np.arange(3), np.arange(3, dtype="i4")),
    (np.ones((2, 3)), np.asfortranarray(np.ones((2, 3)))),
    (np.array([0.0]), np.array([-0.0])),
    ("a", "b"),
    ({1, 2}, {1, 3}),
    (None, False),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=lambda pair: repr(pair)[:50].replace("\n", " "))
def test_the_comparer_tells_different_states_apart(pair: tuple[object, object]) -> None:
    for a, b in (pair, pair[::-1]):
        assert_same_bits(a, a)
        with pytest.raises(AssertionError):
            assert_same_bits(a, b)
