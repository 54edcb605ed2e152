"""Whole states to files and back: views, strides, dtypes, keys, NaN bits, meta, inference mode (A09–A13, A19)."""

from __future__ import annotations

import collections
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tidegate import SaveReport
from tidegate.storage import MemoryStore

CHUNK = 1 << 16


class Point(NamedTuple):
    """A named tuple of the caller's."""

    x: torch.Tensor
    y: int


def through_engine(state: object, path: Path, device: torch.device) -> tuple[object, SaveReport]:
    """Save and load with an engine, in small chunks."""
    with tidegate.CheckpointEngine(MemoryStore(), chunk_bytes=CHUNK) as engine:
        report = engine.save_async(state, step=0).result(60)
        return engine.load(map_location=HOME), report


def through_file(state: object, path: Path, device: torch.device) -> tuple[object, SaveReport]:
    """Save and load as one file."""
    report = tidegate.save(state, path / "state.tg")
    return tidegate.load(path / "state.tg", map_location=HOME), report


Through = Callable[[object, Path, torch.device], tuple[object, SaveReport]]
BOTH_WAYS = pytest.mark.parametrize("through", [through_engine, through_file])
CPU = torch.device("cpu")
HOME = {"cuda:0": "cuda:0"}
"""Every tensor back to the device that it was saved from."""


# A09


def test_A09_a_slice_stores_the_slice(tmp_path: Path) -> None:
    """Ten elements of a hundred million: nothing of the rest is copied, staged or stored."""
    view = torch.empty(100_000_000)[:10].fill_(1.5)
    for through in (through_engine, through_file):
        state, report = through({"x": view}, tmp_path, CPU)
        assert_same_bits(state, {"x": torch.full((10,), 1.5)})
        assert report.stored_bytes < 64 << 10
        assert report.raw_bytes == 40
        assert report.peak_host_bytes < 1 << 20


@pytest.mark.parametrize("chunk_bytes", [CHUNK, 1 << 20])
def test_A09_views_that_tile_a_buffer_store_it_once(tmp_path: Path, chunk_bytes: int) -> None:
    """All in one chunk, and cut over many."""
    flat = torch.randn(300 * 1000)
    views = {f"p{i}": view for i, view in enumerate(flat.split(1000))}
    with tidegate.CheckpointEngine(tmp_path, codec="raw", chunk_bytes=chunk_bytes) as engine:
        report = engine.save_async({**views, "all": [flat[i] for i in range(3)]}, step=0).result(60)
        assert report.raw_bytes == flat.nbytes
        assert report.stored_bytes < 1.05 * flat.nbytes + (64 << 10)
        state = engine.load()
    assert isinstance(state, dict)
    assert_same_bits(state, {**views, "all": [flat[i] for i in range(3)]})


# A10


def layouts(device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors whose elements do not lie in a row."""
    x = torch.randn(64, 8, device=device)
    line = torch.randn(1000, device=device)
    z = torch.randn(31, dtype=torch.complex64, device=device)
    return {
        "channels last": torch.randn(64, 32, 3, 3, device=device).to(memory_format=torch.channels_last),
        "channels last 3d": torch.randn(2, 3, 4, 5, 6, device=device).to(memory_format=torch.channels_last_3d),
        "transposed": torch.randn(3, 5, device=device).t(),
        "expanded": torch.ones(1, 1000, device=device).expand(1000, 1000),
        "every second": x.clone()[::2],
        "without the first column": x.clone()[:, 1:],
        "overlapping": line.clone().as_strided((10, 20), (3, 2)),
        "conjugate": z.clone().conj(),
        "negative": torch._neg_view(line.clone()),
        "imaginary part": z.clone().conj().imag,
        "permuted": torch.randn(4, 5, 6, device=device).permute(2, 0, 1),
        "scalar": torch.tensor(2.5, device=device),
        "empty": torch.empty(0, 7, device=device),
        "one column": x.clone()[:, 3],
    }


@BOTH_WAYS
def test_A10_strides_come_back(tmp_path: Path, device: torch.device, through: Through) -> None:
    state = layouts(device)
    loaded, report = through(state, tmp_path, device)
    assert isinstance(loaded, dict)
    assert_same_bits(loaded, state)
    for name in ("channels last", "channels last 3d"):
        assert loaded[name].stride() == state[name].stride()
        assert not loaded[name].is_contiguous()
    assert report.raw_bytes < sum(t.numel() * t.itemsize for n, t in state.items() if n != "expanded") + 8192


@BOTH_WAYS
def test_A10_an_expanded_tensor_stays_small(tmp_path: Path, through: Through) -> None:
    state, report = through(torch.ones(1, 1000).expand(1000, 1000), tmp_path, CPU)
    assert report.raw_bytes == 4000
    assert isinstance(state, torch.Tensor)
    assert state.stride() == (0, 1)


@BOTH_WAYS
def test_A10_ties_come_back(tmp_path: Path, device: torch.device, through: Through) -> None:
    weight = torch.nn.Parameter(torch.randn(100, 10, device=device))
    state = {"embedding": weight, "head": weight, "rows": weight.detach()[10:20], "columns": weight.detach()[:, 2:4]}
    loaded, report = through(state, tmp_path, device)
    assert_same_bits(loaded, state)
    assert report.raw_bytes == weight.nbytes


# A11

ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_REFUSED = re.compile(r"torch\.(bits.*|q.*|u?int[1-7])")


def is_refused(dtype: torch.dtype) -> bool:
    """Whether a dtype is quantised, opaque bits, or an integer of less than a byte."""
    return _REFUSED.fullmatch(str(dtype)) is not None


def random_tensor(dtype: torch.dtype, numel: int, device: torch.device) -> torch.Tensor:
    """Random bytes, seen as that dtype."""
    content = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    if dtype == torch.bool:
        content &= 1
    return content.to(device).view(dtype)


@BOTH_WAYS
def test_A11_every_dtype_of_torch(tmp_path: Path, device: torch.device, through: Through) -> None:
    """A dtype that a later torch adds fails here, until someone has thought about it."""
    dtypes = [dtype for dtype in ALL_DTYPES if not is_refused(dtype)]
    assert len(dtypes) >= 22
    state = {str(dtype): [random_tensor(dtype, n, device) for n in (0, 1, 7, 4097)] for dtype in dtypes}
    loaded, _ = through(state, tmp_path, device)
    assert_same_bits(loaded, state)


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if is_refused(d)], ids=str)
def test_A11_a_dtype_without_plain_bytes_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop some of them
        tensor = torch.empty(4, dtype=dtype)
    root = tmp_path / "root"
    with tidegate.CheckpointEngine(root) as engine, pytest.raises(tidegate.UnsupportedStateError) as caught:
        engine.save_async({"model": {"w": torch.ones(3), "odd": tensor}}, step=0)
    assert caught.value.path == "model.odd"
    assert "model.odd" in str(caught.value)
    with pytest.raises(tidegate.UnsupportedStateError, match=r"model\.odd"):
        tidegate.save({"model": {"odd": tensor}}, tmp_path / "x.tg")
    assert list(tmp_path.iterdir()) == [], "before a byte is written"


# A12


def test_A12_a_meta_tensor_is_refused_by_path(tmp_path: Path) -> None:
    state = {"a": torch.ones(4), "b": torch.empty(4, device="meta")}
    root = tmp_path / "root"
    with tidegate.CheckpointEngine(root) as engine:
        with pytest.raises(tidegate.UnsupportedStateError, match="meta") as caught:
            engine.save_async(state, step=0)
        assert caught.value.path == "b"
        assert engine.steps() == []
        with pytest.raises(tidegate.UnsupportedStateError, match="meta"):
            tidegate.save(state, tmp_path / "x.tg")
        assert list(tmp_path.iterdir()) == []
        engine.save_async({"a": state["a"]}, step=0).result(60)


@BOTH_WAYS
@pytest.mark.parametrize("loads_inside", [True, False])
def test_A12_inference_mode(tmp_path: Path, device: torch.device, through: Through, loads_inside: bool) -> None:
    """Saved under inference mode, with inference tensors in it; what comes back trains, wherever it was loaded."""
    model = torch.nn.Linear(5, 3).to(device)
    with torch.inference_mode():
        state = {"model": model.state_dict(), "ema": model.weight * 0.5}
        assert state["ema"].is_inference()
        expected = {name: t.detach().clone() for name, t in (("weight", model.weight), ("ema", state["ema"]))}
        loaded, _ = through(state, tmp_path, device)
    if not loads_inside:
        loaded, _ = through(state, tmp_path, device)
    assert isinstance(loaded, dict)
    assert_same_bits(loaded["model"]["weight"], expected["weight"].clone())
    assert_same_bits(loaded["ema"], expected["ema"].clone())
    tensors = [*loaded["model"].values(), loaded["ema"]]
    assert not any(tensor.is_inference() for tensor in tensors)
    fresh = torch.nn.Linear(5, 3).to(device)
    fresh.load_state_dict(loaded["model"], assign=True)
    for tensor in tensors:
        tensor.requires_grad_()
    optimizer = torch.optim.AdamW([*fresh.parameters(), loaded["ema"]])
    (fresh(torch.ones(2, 5, device=device)).sum() + loaded["ema"].square().sum()).backward()
    optimizer.step()
    assert not torch.equal(fresh.weight.detach(), expected["weight"])


# A13


def keyed_state() -> dict[object, object]:
    """Keys that are text only elsewhere, and containers of every kind."""
    t = [torch.full((3,), float(i)) for i in range(8)]
    return {
        0: t[0],
        "0": t[1],
        (1, 2): t[2],
        1.5: t[3],
        True: t[4],
        None: t[5],
        b"0": t[6],
        "lists": [(t[7], [1, (2,)]), [], (), {}],
        -1: {"": 1, "a.b": {"c": 2}, "a": {"b.c": 3}},
        "ordered": collections.OrderedDict([("b", 1), ("a", t[0])]),
    }


@BOTH_WAYS
def test_A13_keys_and_containers_keep_their_types(tmp_path: Path, through: Through) -> None:
    state = keyed_state()
    loaded, _ = through(state, tmp_path, CPU)
    assert_same_bits(loaded, state)
    assert isinstance(loaded, dict)
    assert [type(key) for key in loaded] == [type(key) for key in state]


@BOTH_WAYS
def test_A13_an_optimizers_integer_keys(tmp_path: Path, device: torch.device, through: Through) -> None:
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, device=device)).sum().backward()
    optimizer.step()
    loaded, _ = through(optimizer.state_dict(), tmp_path, device)
    assert_same_bits(loaded, optimizer.state_dict())
    assert isinstance(loaded, dict)
    assert list(loaded["state"]) == [0, 1]
    torch.optim.AdamW(model.parameters()).load_state_dict(loaded)


@BOTH_WAYS
def test_A13_a_named_tuple(tmp_path: Path, through: Through) -> None:
    state = {"at": Point(torch.ones(2), 3)}
    with torch.serialization.safe_globals([Point]):
        loaded, _ = through(state, tmp_path, CPU)
    assert_same_bits(loaded, state)
    with pytest.raises(tidegate.LoadError, match=r"test_layouts:Point.*safe_globals"):
        through(state, tmp_path, CPU)


@pytest.mark.parametrize("key", [object(), torch.ones(1), len], ids=["object", "tensor", "function"])
def test_A13_a_key_of_another_type_is_refused_by_name(tmp_path: Path, key: object) -> None:
    root = tmp_path / "root"
    with tidegate.CheckpointEngine(root) as engine, pytest.raises(tidegate.UnsupportedStateError) as caught:
        engine.save_async({"model": {key: torch.ones(1)}}, step=0)
    assert caught.value.path.startswith("model[")
    assert not root.exists()


# A19


def odd_floats(dtype: torch.dtype) -> torch.Tensor:
    """NaNs of several payloads and signs, zeros of both signs, infinities, subnormals; all there are in 8 bits."""
    size = dtype.itemsize
    if size == 1:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    carrier = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits = 8 * size
    mantissa = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}[dtype]
    infinity = ((1 << (bits - 1)) - 1) >> mantissa << mantissa
    patterns = [0, 1, (1 << mantissa) - 1, infinity, infinity | 1, infinity | 1 << (mantissa - 1), infinity | 5]
    if dtype == torch.float32:
        patterns += [0x7FC00001, 0x7F800001, 0x7FC12345]
    signed = [*patterns, *(p - (1 << (bits - 1)) for p in patterns)]
    return torch.tensor(signed, dtype=carrier).view(dtype)


FLOATS = [dtype for dtype in ALL_DTYPES if dtype.is_floating_point and "float4" not in str(dtype)]


@BOTH_WAYS
@pytest.mark.parametrize("num_copies", [1, 3000])
def test_A19_nan_bits_and_signed_zeros(tmp_path: Path, device: torch.device, through: Through, num_copies: int) -> None:
    state = {str(dtype): odd_floats(dtype).repeat(num_copies).to(device) for dtype in FLOATS}
    state["complex"] = torch.view_as_complex(odd_floats(torch.float32)[: 2 * 8].reshape(8, 2)).to(device)
    plain = [math.nan, -math.nan, -0.0, math.inf, 5e-324]
    loaded, _ = through({"tensors": state, "plain": plain}, tmp_path, device)
    assert_same_bits(loaded, {"tensors": state, "plain": plain})


@pytest.mark.parametrize(("before", "after"), [(0x7FC00001, 0x7FC00002), (0, -0x80000000)])
def test_A19_a_change_that_no_comparison_sees_is_saved(before: int, after: int) -> None:
    """A NaN with another payload, a zero with another sign: between two saves of one engine."""
    tensor = torch.full((1000,), before, dtype=torch.int32).view(torch.float32)
    with tidegate.CheckpointEngine(MemoryStore()) as engine:
        engine.save_async({"x": tensor}, step=1).result(60)
        tensor.view(torch.int32)[500] = after
        engine.save_async({"x": tensor}, step=2).result(60)
        assert_same_bits(engine.load(2), {"x": tensor})
        tensor.view(torch.int32)[500] = before
        assert_same_bits(engine.load(1), {"x": tensor})
