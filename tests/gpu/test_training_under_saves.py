"""A checkpoint holds the bits of the call, whatever the training does to the state right after it."""

from __future__ import annotations

import gc

import pytest
import torch

import tidegate
from tests.engine.test_extents import random_tensor
from tests.gpu.test_no_stall import HOME, MIB, TIMEOUT_S, HeldStore
from tests.kit.bits import assert_same_bits
from tests.kit.states import SmallTraining, odd_values, reference
from tidegate.codec.words import DTYPE_OF_NAME
from tidegate.snapshot import SnapshotMode
from tidegate.storage import MemoryStore

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
MODES: list[SnapshotMode] = ["device", "lazy", "host", "auto"]
CODECS = ["raw", "zstd", "rans", "auto", pytest.param("ans", marks=GPU)]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("snapshot", MODES)
@pytest.mark.parametrize("where", DEVICES)
def test_training_goes_on(where: str, snapshot: SnapshotMode, codec: str, fused: bool) -> None:
    """Three saves in a row, and four steps after each before it has read anything, or, lazily, while it reads."""
    if where == "cpu" and codec == "ans":
        pytest.skip("ans encodes on a GPU only")
    training = SmallTraining(torch.device(where), fused=fused, width=1021 if where == "cuda" else 301)
    store = HeldStore()
    expected = []
    with tidegate.CheckpointEngine(store, codec=codec, snapshot=snapshot, chunk_bytes=MIB) as engine:
        engine.attach(training.optimizer)
        for step in range(3):
            training.step()
            state = training.state
            expected.append(reference(state))
            engine.wait()
            with store.held():
                future = engine.save_async(state, step=step)
                training.change_buffers()
                for _ in range(0 if snapshot == "lazy" else 4):
                    training.step()
            for _ in range(4 if snapshot == "lazy" else 0):
                training.step()
            report = future.result(TIMEOUT_S)
            if snapshot != "auto" and (where == "cuda" or snapshot == "lazy"):
                assert snapshot in report.snapshot
            if codec != "auto" and where == "cuda":
                assert codec in report.by_codec
        for step, state in enumerate(expected):
            assert_same_bits(engine.load(step, map_location=HOME), state)
    before, after = expected[0]["masters"][0], expected[1]["masters"][0]  # type: ignore[index]
    assert not torch.equal(before, after), "the training trains"


@pytest.mark.parametrize("codec", ["raw", "auto"])
@pytest.mark.parametrize("snapshot", ["device", "host", "auto"])
@pytest.mark.parametrize("where", DEVICES)
def test_memory_that_is_freed_and_used_again_at_once(where: str, snapshot: SnapshotMode, codec: str) -> None:
    """Storages are emptied, as FSDP does it, and new tensors of their sizes get that memory on the same stream."""
    shapes = [(3 * MIB // 4 + 5,), (1000, 257), *[(211 + i,) for i in range(200)]]
    store = HeldStore()
    with tidegate.CheckpointEngine(store, codec=codec, snapshot=snapshot, chunk_bytes=MIB) as engine:
        for step in range(3):
            if where == "cuda":
                gc.collect()
                torch.cuda.empty_cache()  # so that no other free memory is there than what the state gives up
            state = {i: torch.randn(shape, device=where) for i, shape in enumerate(shapes)}
            expected = reference(state)
            addresses = {tensor.data_ptr() for tensor in state.values()}
            with store.held():
                future = engine.save_async(state, step=step)
                for tensor in state.values():
                    tensor.untyped_storage().resize_(0)
                del state, tensor
                others = [torch.full(shape, float("nan"), device=where) for shape in shapes]
            if where == "cuda":
                assert addresses & {other.data_ptr() for other in others}, "memory was used again"
            report = future.result(TIMEOUT_S)
            assert report.snapshot == ("device" if where == "cuda" and snapshot != "host" else "host")
            assert_same_bits(engine.load(step, map_location=HOME), expected)
            del others


@pytest.mark.parametrize("snapshot", ["device", "lazy", "host", "auto"])
@pytest.mark.parametrize("where", DEVICES)
def test_tensors_are_dropped_and_their_memory_is_used_again(where: str, snapshot: SnapshotMode) -> None:
    """A lazy save keeps alive what it still reads; the others need nothing any more."""
    store = HeldStore()
    with tidegate.CheckpointEngine(store, codec="raw", snapshot=snapshot, chunk_bytes=MIB) as engine:
        for step in range(3):
            parameters = [torch.nn.Parameter(torch.randn(MIB // 2 + i, device=where)) for i in range(4)]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            engine.attach(optimizer)
            expected = reference(parameters)
            with store.held():
                future = engine.save_async(parameters, step=step)
                sizes = [parameter.numel() for parameter in parameters]
                optimizer.param_groups.clear()  # the engine holds the optimizer
                del parameters
                others = [torch.full((size,), float("nan"), device=where) for size in sizes]
            future.result(TIMEOUT_S)
            assert_same_bits(engine.load(step, map_location=HOME), expected)
            del others


@pytest.mark.gpu
@pytest.mark.parametrize("snapshot", MODES)
def test_a_state_from_a_side_stream_that_the_current_one_waits_for(snapshot: SnapshotMode) -> None:
    """Its values come late; afterwards both streams change it, the side stream once it waits for the current one."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    values = [torch.randn(MIB // 2 + i, device="cuda") for i in range(3)]
    with tidegate.CheckpointEngine(MemoryStore(), codec="raw", snapshot=snapshot, chunk_bytes=MIB) as engine:
        for step in range(3):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                state = [torch.full_like(value, step) for value in values]
                torch.cuda._sleep(50_000_000)  # cycles: about 25 ms
                torch._foreach_copy_(state, values)
            current.wait_stream(side)
            future = engine.save_async(state, step=step)
            state[0].zero_()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                state[1].zero_()
                state[2].zero_()
            current.wait_stream(side)
            future.result(TIMEOUT_S)
            assert_same_bits(engine.load(step, map_location=HOME), values)


@pytest.mark.parametrize("budget_bytes", [None, 1], ids=["roomy", "no device memory"])
@pytest.mark.parametrize("where", DEVICES)
def test_data_is_swapped_after_a_lazy_save(where: str, budget_bytes: int | None) -> None:
    """The tensors view other memory from then on; the save reads what they viewed at the call."""
    shapes = [(MIB // 2 + 3,), (300, 1001), *[(211 + i,) for i in range(200)]]
    parameters = [torch.nn.Parameter(torch.randn(shape, device=where)) for shape in shapes]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    expected = reference(parameters)
    store = HeldStore()
    with tidegate.CheckpointEngine(
        store, codec="raw", snapshot="lazy", chunk_bytes=MIB, device_budget_bytes=budget_bytes
    ) as engine:
        engine.attach(optimizer)
        with store.held():
            future = engine.save_async(parameters, step=0)
            for parameter in parameters:
                parameter.data = torch.full_like(parameter, float("nan"))
        assert future.result(TIMEOUT_S).snapshot == "lazy"
        assert_same_bits(engine.load(map_location=HOME), expected)


@pytest.mark.parametrize("owned", [False, True], ids=["copied", "owned"])
@pytest.mark.parametrize("snapshot", MODES)
@pytest.mark.parametrize("where", DEVICES)
def test_tensors_of_every_dtype_and_layout(where: str, snapshot: SnapshotMode, owned: bool) -> None:
    """All of them change after the call; those that an optimizer owns only inside the fence."""
    state = every_kind(torch.device(where))
    parameter = torch.nn.Parameter(torch.zeros(5, device=where))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if owned:
        optimizer.state[parameter] = dict(state)
    with tidegate.CheckpointEngine(MemoryStore(), codec="zstd", snapshot=snapshot, chunk_bytes=MIB) as engine:
        engine.attach(optimizer)
        for step in range(2):
            expected = reference(state)
            future = engine.save_async(state, step=step)
            with engine.fence():
                change_every_byte(state)
            report = future.result(TIMEOUT_S)
            assert ("lazy" in report.snapshot) == (snapshot == "lazy" and owned)
            assert_same_bits(engine.load(step, map_location=HOME), expected)


def every_kind(device: torch.device) -> dict[str, torch.Tensor]:
    """Each dtype in a row, with gaps, transposed, expanded, tied, as a slice, with no dimension, and empty."""
    state = {}
    for name, dtype in DTYPE_OF_NAME.items():
        x = random_tensor(3000, dtype, device)
        state |= {
            name: x,
            f"{name} tied": x,
            f"{name} view": x.as_strided((40, 20), (20, 1), 7),
            f"{name} gaps": random_tensor(2400, dtype, device).as_strided((3, 400), (800, 2), 1),
            f"{name} transposed": random_tensor(2400, dtype, device).as_strided((40, 60), (1, 40)),
            f"{name} expanded": random_tensor(5, dtype, device).as_strided((30, 5), (0, 1)),
            f"{name} scalar": random_tensor(5, dtype, device).as_strided((), (), 3),
            f"{name} one": random_tensor(1, dtype, device).as_strided((), ()),
            f"{name} empty": random_tensor(0, dtype, device).as_strided((3, 0, 2), (2, 2, 1)),
        }
    large = random_tensor(3 * MIB, torch.bfloat16, device)
    state["large gaps"] = large.as_strided((1024, 1000), (2048, 2), 3)
    state["large"] = random_tensor(MIB + 1, torch.float32, device)
    state |= {f"odd {dtype}": odd_values(dtype, 1001, device) for dtype in (torch.bfloat16, torch.float32)}
    return state


def change_every_byte(state: dict[str, torch.Tensor]) -> None:
    """Invert all memory that is viewed, each storage once."""
    for storage in {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in state.values()}.values():
        if storage.nbytes():
            raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            raw.bitwise_xor_(1)  # a bool stays 0 or 1
