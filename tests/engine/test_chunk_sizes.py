"""How long chunks are: by device, by the memory that there is, and by what the user says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tidegate
from tests.kit.bits import assert_same_bits
from tidegate.chunk_sizes import (
    ENCODER_CHUNKS,
    HOST_CHUNK_BYTES,
    MAX_DEVICE_CHUNK_BYTES,
    ChunkSizes,
    device_chunk_bytes,
    useful_chunk_bytes,
)
from tidegate.codec.base import frame_bound_bytes
from tidegate.codec.words import WordType
from tidegate.delta import DeltaPolicy
from tidegate.device_shapes import CHUNKS_TO_VERIFY, device_shapes
from tidegate.errors import ConfigError
from tidegate.options import NUM_DEVICE_OUTPUTS, Options, split_host_budget
from tidegate.plan import SavePlan, plan_save
from tidegate.planned import PlanCache
from tidegate.resources import Resources
from tidegate.state import describe
from tidegate.storage.memory import MemoryStore

MIB, GIB = 1 << 20, 1 << 30
AVAILABLE_BYTES = 64 * GIB
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("gib", "mib"), [(4, 64), (39.4, 64), (64, 128), (79.2, 128), (94, 128), (128, 256), (139.8, 256), (275, 256)]
)
def test_chunks_of_a_device_are_a_512th_of_it(gib: float, mib: int) -> None:
    assert device_chunk_bytes(int(gib * GIB)) == mib * MIB


@given(
    st.integers(0, 512 * GIB), st.none() | st.integers(-GIB, 64 * GIB), st.sampled_from([16, ENCODER_CHUNKS + 7, 64])
)
def test_an_encoder_has_room_or_chunks_are_the_shortest(total: int, room: int | None, encoder_chunks: int) -> None:
    size = device_chunk_bytes(total, room, encoder_chunks=encoder_chunks)
    assert size in (64 * MIB, 128 * MIB, 256 * MIB)
    if size > HOST_CHUNK_BYTES:
        assert size <= total // 512
        assert encoder_chunks * size <= min(total // 32, total if room is None else room)


@given(st.sampled_from([64 * MIB, 128 * MIB, 256 * MIB]), st.integers(0, 64 * GIB))
def test_an_encoder_is_as_large_as_a_state_needs(size: int, raw_bytes: int) -> None:
    useful = useful_chunk_bytes(size, raw_bytes)
    wanted, found = (ChunkSizes(HOST_CHUNK_BYTES, each).for_state(raw_bytes) for each in (size, useful))
    assert found == wanted
    assert useful == max(HOST_CHUNK_BYTES, found.device_bytes)


@pytest.mark.parametrize(("gib", "mib"), [(1, 64), (2, 64), (2.25, 72), (3.875, 124), (4, 128), (6, 192), (9, 256)])
def test_a_state_between_two_sizes_has_32_long_chunks(gib: float, mib: int) -> None:
    """Not twice as many and more, of half the length: a chunk costs the interpreter the same whatever its length."""
    assert useful_chunk_bytes(MAX_DEVICE_CHUNK_BYTES, int(gib * GIB)) == mib * MIB


@pytest.mark.parametrize("codec", ["rans", "raw", "planes"])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("chunk_bytes", [128 * MIB, MAX_DEVICE_CHUNK_BYTES])
def test_no_encoder_takes_more_chunks_than_is_reckoned(codec: str, verify: bool, chunk_bytes: int) -> None:
    """Of codecs of ours, for nvCOMP is asked about its own only where it is."""
    largest = next(device_shapes((codec,), chunk_bytes, GPU, verify=verify))
    assert largest.num_bytes <= (ENCODER_CHUNKS + verify * CHUNKS_TO_VERIFY) * chunk_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["ans", "zstd", "auto"])
@pytest.mark.parametrize("verify", [False, True])
def test_no_encoder_of_nvcomp_takes_many_more_chunks_than_is_reckoned(codec: str, verify: bool) -> None:
    """Zstd's scratch is the same for chunks of any length: where that is too much, it is the first to go."""
    codecs = ("rans", "zstd", "ans", "raw") if codec == "auto" else (codec,)
    largest = next(device_shapes(codecs, MAX_DEVICE_CHUNK_BYTES, GPU, verify=verify))
    assert largest.num_bytes <= (ENCODER_CHUNKS + 2 + verify * CHUNKS_TO_VERIFY) * MAX_DEVICE_CHUNK_BYTES


def plan(host_mib: int, device_mib: int, extents: list[tuple[str, int]]) -> SavePlan:
    return plan_save(
        [num_bytes for _, num_bytes in extents], [WordType.F32] * len(extents), [device for device, _ in extents],
        [""] * len(extents), ChunkSizes(host_mib * MIB, device_mib * MIB),
    )  # fmt: skip


def test_each_device_has_its_own_size() -> None:
    extents = [("cuda:0", 600 * MIB), ("cuda:1", 300 * MIB), ("cpu", 8 * GIB)]
    found = plan(64, 256, extents)
    lengths = {
        device: [chunk.num_bytes // MIB for chunk in found.chunks if chunk.first_extent == i]
        for i, (device, _) in enumerate(extents)
    }
    assert lengths == {"cuda:0": [256, 256, 88], "cuda:1": [256, 44], "cpu": [64] * 128}


def test_small_extents_share_chunks_of_their_device() -> None:
    extents = [("cuda:0", 16 * MIB)] * 32 + [("cpu", 16 * MIB)] * 512
    found = plan(64, 256, extents)
    assert [c.num_bytes // MIB for c in found.chunks if c.first_extent < 32] == [256, 256]
    assert {c.num_bytes // MIB for c in found.chunks if c.first_extent >= 32} == {64}


@pytest.mark.parametrize(
    ("mib", "on_cpu", "on_gpu"),
    [(16, 4, 4), (640, 40, 40), (1024, 64, 64), (2048, 64, 64), (3000, 64, 93), (4096, 64, 128), (8192, 64, 256)],
)
def test_small_states_have_short_chunks_on_every_device(mib: int, on_cpu: int, on_gpu: int) -> None:
    for device, longest in (("cpu", on_cpu), ("cuda:0", on_gpu)):
        found = plan(64, 256, [(device, mib * MIB)])
        assert max(chunk.num_bytes for chunk in found.chunks) // MIB == longest


@given(
    st.integers(64 * MIB, 32 * GIB),
    st.sampled_from([0, 64 * MIB, 128 * MIB, 256 * MIB]),
    st.sampled_from([None, 1 * MIB, 64 * MIB, 256 * MIB]),
    st.sampled_from([(0.9, 0.7), (1.0, 1.0), (0.5, 0.3)]),
    st.booleans(),
)
def test_the_shares_stay_in_the_budget_and_hold_what_is_in_flight(
    budget: int, device: int, number: int | None, watermarks: tuple[float, float], with_delta: bool
) -> None:
    options = Options(
        host_budget_bytes=budget, chunk_bytes=number, watermarks=watermarks,
        delta=DeltaPolicy() if with_delta else None,
    )  # fmt: skip
    shares = split_host_budget(options, AVAILABLE_BYTES, device)
    assert shares.staging_bytes + shares.output_bytes + shares.delta_bytes + shares.kept_bytes <= budget + 4096
    sizes, high = shares.sizes, watermarks[0]
    assert MIB // 16 <= sizes.host_bytes <= sizes.device_bytes <= max(device, number or HOST_CHUNK_BYTES)
    on_host, on_device = frame_bound_bytes(sizes.host_bytes), frame_bound_bytes(sizes.device_bytes)
    assert math.ceil(shares.output_bytes * high) >= shares.num_outputs * on_host
    assert math.ceil(shares.output_bytes * high) >= min(NUM_DEVICE_OUTPUTS, shares.num_outputs) * on_device
    assert shares.staging_bytes >= 2 * on_device
    if sizes.host_bytes < (number or HOST_CHUNK_BYTES):
        assert sizes.device_bytes == sizes.host_bytes, "those of CUDA tensors shrink first"
    if number is not None or with_delta:
        assert sizes.device_bytes == sizes.host_bytes


def test_a_large_budget_holds_the_longest_chunks_in_few_buffers() -> None:
    short, long = (split_host_budget(Options(), AVAILABLE_BYTES, size * MIB) for size in (64, 256))
    assert long.sizes == ChunkSizes(64 * MIB, 256 * MIB)
    assert long.output_bytes <= max(short.output_bytes, 1.12 * NUM_DEVICE_OUTPUTS * 256 * MIB)
    assert long.output_bytes + long.staging_bytes <= AVAILABLE_BYTES // 2


def test_a_small_budget_shortens_what_is_on_devices_first() -> None:
    """Down from one that holds the longest, chunks of CUDA tensors are halved twice before those of the host are."""
    found = []
    for mib in range(8192, 256, -64):
        sizes = split_host_budget(Options(host_budget_bytes=mib * MIB), AVAILABLE_BYTES, 256 * MIB).sizes
        found.append((sizes.host_bytes // MIB, sizes.device_bytes // MIB))
    assert found == sorted(found, reverse=True)
    assert found[0] == (64, 256)
    assert (64, 64) in found
    assert all(device in (64, 128, 256) for host, device in found if host == 64)
    assert found[-1][0] < 64


@pytest.mark.parametrize("value", [5, 70_000, 1 << 40, 0, True])
def test_a_wrong_size_is_refused(value: int) -> None:
    with pytest.raises(ConfigError, match="chunk_bytes"):
        Options(chunk_bytes=value)
    with pytest.raises(ConfigError, match="chunk_bytes"):
        tidegate.save({}, "/nowhere", chunk_bytes=value)


@pytest.mark.parametrize("number", [None, 1 << 20])
def test_a_state_in_host_memory_asks_no_device(number: int | None) -> None:
    """It could not: this PyTorch may have no CUDA, and the first question would raise."""
    resources = Resources(Options(chunk_bytes=number))
    try:
        sizes = resources.sizes_for(describe({"w": torch.ones(8)}))
        assert sizes == ChunkSizes(number or HOST_CHUNK_BYTES, number or HOST_CHUNK_BYTES)
        assert resources._is_settled is (number is not None)
    finally:
        resources.close()


def test_a_plan_is_made_anew_where_sizes_have_changed() -> None:
    table = describe({"w": torch.zeros(8 * MIB)})
    sizes = [ChunkSizes(4 * MIB, 4 * MIB)]
    plans, pairs = PlanCache(lambda _: sizes[0]), {}
    first = plans.of(table, pairs)
    assert plans.of(table, pairs) is first
    sizes[0] = ChunkSizes(MIB, MIB)
    again = plans.of(table, pairs)
    assert (len(first.plan.chunks), len(again.plan.chunks)) == (8, 32)


def test_one_object_in_chunks_of_the_length_that_was_asked_for(tmp_path: Path, device: torch.device) -> None:
    state = {"w": torch.randn(MIB, device=device)}
    report = tidegate.save(state, tmp_path / "x.tg", chunk_bytes=MIB)
    assert sum(total.num_frames for total in report.by_codec.values()) == 4
    assert_same_bits(tidegate.load(tmp_path / "x.tg", map_location=str(device)), state)


def num_frames(report: tidegate.SaveReport) -> int:
    return sum(total.num_frames for total in report.by_codec.values())


def assert_comes_back(engine: tidegate.CheckpointEngine, state: dict[str, torch.Tensor]) -> None:
    """Compared where it is: gigabytes take long on the CPU."""
    loaded = engine.load(map_location={"cuda:0": "cuda:0"})
    assert isinstance(loaded, dict) and loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())  # integers and plain floats


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("codec", "snapshot", "host_budget"),
    [
        ("rans", "host", None),
        ("rans", "host", GIB),
        ("rans", "device", None),
        ("rans", "device", GIB),
        ("auto", "host", 2 * GIB),
    ],
)
def test_longer_chunks_of_cuda_tensors_in_every_mode(codec: str, snapshot: str, host_budget: int | None) -> None:
    """4 GiB make 32 chunks of 128 MiB where the GPU has 64 GiB or more and there is room for them."""
    state = {"w": torch.randint(0, 200, (4 * GIB,), dtype=torch.uint8, device="cuda"), "i": torch.arange(99)}
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    options = Options(codec=codec, host_budget_bytes=host_budget)
    expected = split_host_budget(
        options, AVAILABLE_BYTES, useful_chunk_bytes(device_chunk_bytes(total_bytes), 4 * GIB)
    ).sizes
    with tidegate.CheckpointEngine(
        MemoryStore(),
        codec=codec,
        snapshot=snapshot,
        host_budget_bytes=host_budget,  # type: ignore[arg-type]
    ) as engine:
        report = engine.save_async(state, step=0).result(300)
        assert snapshot in report.snapshot
        if host_budget is not None:
            assert report.peak_host_bytes <= host_budget
        assert engine._resources.sizes_for(describe(state)) == expected
        assert num_frames(report) == math.ceil(4 * GIB / expected.device_bytes) + 1
        assert_comes_back(engine, state)


@pytest.mark.gpu
def test_what_no_gpu_encodes_has_the_chunks_of_host_memory() -> None:
    state = {"w": torch.zeros(512 * MIB, dtype=torch.int32, device="cuda")}
    with tidegate.CheckpointEngine(MemoryStore(), codec="planes:exponent=zstd") as engine:
        report = engine.save_async(state, step=0).result(300)
        assert num_frames(report) == 2048 // 64
        assert_comes_back(engine, state)


@pytest.mark.gpu
def test_the_encoder_of_longer_chunks_stays_in_its_share() -> None:
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    with tidegate.CheckpointEngine(MemoryStore(), codec="rans", snapshot="host") as engine:
        report = engine.save_async({"w": torch.zeros(2 * GIB, device="cuda")}, step=0).result(60)
        assert 0 < report.peak_device_bytes <= max(total_bytes // 32, 12 * HOST_CHUNK_BYTES)


@pytest.mark.gpu
def test_a_device_without_room_for_longer_chunks_has_short_ones() -> None:
    """All but 3 GiB of the device, beyond what is left to the training, is taken: no room for 16 chunks of 256 MiB."""
    from tidegate.snapshot import headroom_bytes

    torch.cuda.empty_cache()
    state = {"w": torch.ones(2 * GIB, device="cuda")}
    room_bytes = 3 * GIB
    free_bytes = torch.cuda.mem_get_info()[0] - headroom_bytes(GPU) - room_bytes
    taken = torch.empty(free_bytes, dtype=torch.uint8, device="cuda")
    try:
        with tidegate.CheckpointEngine(MemoryStore(), codec="rans") as engine:
            # Its snapshot has no room either: it goes through host memory.
            report = engine.save_async(state, step=0).result(120)
            assert engine._resources.sizes_for(describe(state)).device_bytes <= room_bytes // ENCODER_CHUNKS
            assert 0 < report.peak_device_bytes <= room_bytes
            assert "rans" in report.by_codec
    finally:
        del taken
        torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_device_budget_counts_as_the_devices_memory() -> None:
    with tidegate.CheckpointEngine(MemoryStore(), codec="rans", device_budget_bytes=4 * GIB) as engine:
        table = describe({"w": torch.ones(8, device="cuda")})
        assert engine._resources.sizes_for(table) == ChunkSizes(HOST_CHUNK_BYTES, HOST_CHUNK_BYTES)
