"""Loads on the CPU: where bytes land, what comes back bit for bit, how errors end a load, and what it costs."""

from __future__ import annotations

import _thread
import random
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import tidegate
from tests.hostile.bounds import bounded
from tests.kit.bits import assert_same_bits, physical_bytes
from tests.kit.loading import load, object_of
from tests.kit.loading import saved as kit_saved
from tests.kit.stores import FailOnceStore, FlipStore, WrappedStore
from tidegate.bits import copy_bits, is_stored_row, stored_row
from tidegate.errors import LoadOSError
from tidegate.storage import Store, StoreIOError
from tidegate.storage.local import LocalStore
from tidegate.tensors import TensorSpec

CHUNK = 1 << 20
MIB = 1 << 20
CODECS = pytest.mark.parametrize("codec", ["raw", "zstd", "rans"])
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


saved = partial(kit_saved, chunk_bytes=CHUNK)


def mixed_state() -> dict[str, object]:
    """Several chunks of one tensor, packed chunks, ties, views, empties, arrays."""
    large = torch.randn(5 * CHUNK // 4 + 3)
    return {
        "large": large,
        "view": large[10:20],
        "half": torch.randn(CHUNK).bfloat16(),
        "small": [torch.randn(i % 7) for i in range(2000)],
        "flags": torch.rand(1001) < 0.5,
        "empty": [torch.empty(0), torch.empty(0, 3, dtype=torch.int64)],
        "array": np.arange(100.0),
        "noise": torch.randint(0, 256, (2 * CHUNK,), dtype=torch.uint8),
        "step": 3,
    }


class AddressStore(WrappedStore):
    """Notes where reads of at least 1 MiB put their bytes."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.addresses: set[int] = set()

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        super().read_into(key, offset, out)
        if out.nbytes >= MIB:
            self.addresses.add(np.frombuffer(out, np.uint8).ctypes.data)


@CODECS
def test_what_was_saved_comes_back(codec: str) -> None:
    state = mixed_state()
    store = saved(state, codec)
    for _ in range(3):
        assert_same_bits(load(store), state)
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("tidegate-read") for name in names)


def test_raw_frames_are_read_to_where_they_belong() -> None:
    store = AddressStore(saved({"x": (x := torch.randn(3 * CHUNK // 4))}, "raw"))
    loaded = load(store)
    assert_same_bits(loaded, {"x": x})
    start = loaded["x"].data_ptr()  # type: ignore[index]
    assert store.addresses == {start, start + CHUNK, start + 2 * CHUNK}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(512, 1024),
        lambda: torch.zeros(1024, 512).t(),
        lambda: torch.zeros(2, 8, 256, 128).to(memory_format=torch.channels_last),
        lambda: torch.zeros(256, 1024, dtype=torch.complex64).conj(),
        lambda: torch.zeros(512 * 1024 + 7)[7:],
        lambda: torch.nn.Parameter(torch.zeros(512, 1024)),
    ],
    ids=["contiguous", "transposed", "channels-last", "conjugated", "offset", "parameter"],
)
def test_a_tensor_laid_out_as_stored_is_filled_in_place(make: object) -> None:
    target: torch.Tensor = make()  # type: ignore[operator]
    source = torch.empty_like(target) if not target.is_conj() else torch.empty_like(target.conj()).conj()
    with torch.no_grad():
        source.normal_()
    store = AddressStore(saved({"x": source}, "raw"))
    if isinstance(target, torch.nn.Parameter):
        source = torch.nn.Parameter(source)
    version = target._version
    loaded = load(store, into={"x": target})
    assert loaded["x"] is target  # type: ignore[index]
    assert target._version > version
    assert physical_bytes(target) == physical_bytes(source)
    assert target.data_ptr() in store.addresses


@CODECS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pattern_of_bits_reaches_tensors_of_any_strides(dtype: torch.dtype, codec: str) -> None:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (64 * 48 * dtype.itemsize,), dtype=torch.uint8)
    source = bits.view(dtype).reshape(64, 48)
    store = saved({"x": source, "t": source.clone().t(), "gaps": source[:, ::2]}, codec)
    targets = {
        "x": torch.zeros(48, 64, dtype=dtype).t(),
        "t": torch.zeros(48, 128, dtype=dtype)[:, ::2],
        "gaps": torch.zeros(64, 48, dtype=dtype)[:, 1::2],
    }
    loaded = load(store, into=targets)
    assert isinstance(loaded, dict)
    for name, expected in (("x", source), ("t", source.t()), ("gaps", source[:, ::2])):
        assert loaded[name] is targets[name]
        assert physical_bytes(loaded[name].contiguous()) == physical_bytes(expected.contiguous())


def test_conjugated_and_negated_values_stay_what_they_are() -> None:
    x = torch.randn(40, dtype=torch.complex64)
    state = {"conj": x.conj(), "neg": x.clone().conj().imag, "plain": x.clone()}
    assert state["conj"].is_conj() and state["neg"].is_neg()
    store = saved(state)
    targets = {"conj": torch.zeros_like(x), "neg": torch.zeros(40), "plain": torch.zeros_like(x).conj()}
    load(store, into=targets)
    for name, expected in state.items():
        assert targets[name].tolist() == expected.tolist(), name


def test_a_row_is_seen_only_where_the_stored_bytes_are_one() -> None:
    x = torch.zeros(4, 6)
    spec = TensorSpec("float32", (4, 6))
    assert is_stored_row(x, spec)
    assert is_stored_row(x.t(), TensorSpec("float32", (6, 4), (1, 6)))
    assert not is_stored_row(x.t(), TensorSpec("float32", (6, 4)))
    assert not is_stored_row(torch.zeros(6, 4), TensorSpec("float32", (6, 4), (1, 6)))
    assert not is_stored_row(torch.zeros(8, 6)[::2], spec)
    overlapping = torch.zeros(9).as_strided((4, 6), (1, 1))
    assert not is_stored_row(overlapping, TensorSpec("float32", (4, 6), (1, 1)))
    assert not is_stored_row(torch.zeros(3, dtype=torch.complex64).conj(), TensorSpec("complex64", (3,)))


@pytest.mark.parametrize("kind", ["plain", "transposed", "conjugated", "negated", "parameter"])
def test_a_row_is_the_memory_of_its_tensor(kind: str) -> None:
    x = torch.arange(24).to(torch.complex64).view(4, 6)
    tensor, strides = {
        "plain": (x, None),
        "transposed": (x.t(), (1, 6)),
        "conjugated": (x.conj(), None),
        "negated": (torch._neg_view(x), None),
        "parameter": (torch.nn.Parameter(x), None),
    }[kind]
    spec = TensorSpec("complex64", tuple(tensor.shape), strides, conj=tensor.is_conj(), neg=tensor.is_neg())
    assert is_stored_row(tensor, spec)
    row = stored_row(tensor, spec)
    assert row.data_ptr() == x.data_ptr() and row.dtype == torch.uint8 and row.shape == (24 * 8,)
    assert not row.requires_grad


def test_bits_are_copied_through_lazy_flags() -> None:
    nan = torch.tensor([0x7FA00001], dtype=torch.int32).view(torch.float32)
    source, target = torch.complex(nan, nan).conj(), torch.zeros(1, dtype=torch.complex64).conj()
    copy_bits(target, source)
    assert target.conj().view(torch.int64).tolist() == source.conj().view(torch.int64).tolist()


@CODECS
def test_damage_is_always_told_and_nothing_else_is(codec: str) -> None:
    state = mixed_state()
    inner = saved(state, codec)
    key, num_bytes = object_of(inner)
    store = FlipStore(inner)
    num_found = 0
    for _ in range(60):
        store.flip(key, random.randrange(8 * num_bytes))
        try:
            loaded = load(store)
        except tidegate.CorruptCheckpointError:
            num_found += 1
        else:
            assert_same_bits(loaded, state)  # the bit is in padding
    assert num_found > 30


@pytest.mark.parametrize("nth", [1, 3, 6])
@CODECS
def test_a_read_that_fails_names_its_frame_and_ends_the_load(codec: str, nth: int) -> None:
    store = FailOnceStore(saved(mixed_state(), codec))
    num_opening = 3  # manifest, trailer, index
    store.fail("read_into", num_opening + nth, StoreIOError("the disk is on fire", errno=5))
    with pytest.raises(LoadOSError, match=r"frame of chunk .* on fire") as info:
        load(store)
    assert info.value.errno == 5 and info.value.fqn and info.value.key.endswith(".tg")
    assert not any(thread.name.startswith("tidegate-read") for thread in threading.enumerate())


def test_an_interrupted_load_leaves_no_thread(tmp_path: Path) -> None:
    class Interrupting(WrappedStore):
        is_armed = True

        def read_into(self, key: str, offset: int, out: memoryview) -> None:
            if key.endswith(".tg") and threading.current_thread() is not threading.main_thread() and self.is_armed:
                self.is_armed = False
                _thread.interrupt_main()
            super().read_into(key, offset, out)

    state = mixed_state()
    inner = saved(state, store=LocalStore(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        load(Interrupting(inner))
    assert not any(thread.name.startswith("tidegate-read") for thread in threading.enumerate())
    assert_same_bits(load(inner), state)


@pytest.mark.parametrize("map_location", ["cuda:99", "nothing", 5])
def test_a_device_that_is_not_there_is_refused(map_location: object) -> None:
    store = saved({"x": torch.ones(3)})
    with pytest.raises(tidegate.ConfigError, match="map_location"):
        load(store, map_location=map_location)


@CODECS
def test_a_load_needs_little_more_than_the_state(tmp_path: Path, codec: str) -> None:
    """Beside the state, two buffers a thread; and tensors that are filled in place take nothing new."""
    state = {f"x{i}": torch.randn(8 * MIB // 4) for i in range(8)}
    inner = saved(state, codec, LocalStore(tmp_path))
    load(inner)
    buffers_bytes = 2 * 8 * 2 * CHUNK
    with bounded(limit_bytes=64 * MIB + buffers_bytes + 16 * MIB, limit_cpu_s=60):
        loaded = load(inner)
    assert_same_bits(loaded, state)
    with bounded(limit_bytes=buffers_bytes + 16 * MIB, limit_cpu_s=60):
        load(inner, into=loaded)
    assert_same_bits(loaded, state)
