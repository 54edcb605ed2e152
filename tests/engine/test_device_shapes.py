"""Which codecs are used where: on the CPU, on a GPU with little room, for small chunks."""

from __future__ import annotations

import itertools

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tidegate.codec.device import device_encoder_bytes
from tidegate.codec.registry import codec_names, needs_gpu
from tidegate.container import read_index
from tidegate.device_shapes import (
    AUTO_CODECS,
    SMALL_CHUNK_BYTES,
    device_shapes,
    host_codec_name,
    small_host_codec_name,
)
from tidegate.storage.memory import MemoryStore

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("codec", ["auto", *codec_names()])
def test_the_cpu_encodes_what_every_machine_decodes(codec: str) -> None:
    for name in (host_codec_name(codec), small_host_codec_name(codec)):
        assert not needs_gpu(name)
        assert name in (codec, "zstd")


def test_auto_has_a_codec_for_every_machine_before_any_other() -> None:
    assert not needs_gpu(AUTO_CODECS[0])
    assert set(AUTO_CODECS) <= set(codec_names())


@pytest.mark.parametrize("chunk_bytes", [64 << 10, 4 << 20, 64 << 20])
@pytest.mark.parametrize("verify", [False, True])
def test_shapes_count_what_their_encoders_take(chunk_bytes: int, verify: bool) -> None:
    """Of rans and raw, for nvCOMP is asked about its own only where it is."""
    shapes = list(device_shapes(("rans", "raw"), chunk_bytes, GPU, verify=verify))
    assert [(shape.num_lanes, shape.num_slots) for shape in shapes] == [(2, 2), (1, 3), (1, 2), (1, 1)]
    for shape in shapes:
        lane_bytes = device_encoder_bytes(shape.codecs, chunk_bytes, shape.num_slots, device=GPU)
        assert shape.num_bytes >= shape.num_lanes * (lane_bytes + shape.num_slots * chunk_bytes)
    assert all(before.num_bytes > after.num_bytes for before, after in itertools.pairwise(shapes))


def test_a_codec_beside_another_takes_no_more_than_alone() -> None:
    both, one = (device_encoder_bytes(codecs, 4 << 20, 2, device=GPU) for codecs in (("rans", "raw"), ("rans",)))
    assert both == one


def test_rans_on_the_cpu_leaves_small_chunks_to_zstd() -> None:
    state = {
        "large": torch.randn(1 << 18),
        "exact": torch.randn(SMALL_CHUNK_BYTES // 2).to(torch.bfloat16),
        "small": torch.randn(SMALL_CHUNK_BYTES // 2 - 64).to(torch.float16),
        "step": torch.tensor(7.0, dtype=torch.float16),
    }
    store = MemoryStore()
    with tidegate.CheckpointEngine(store, codec="rans", chunk_bytes=1 << 20, verify="decode") as engine:
        report = engine.save_async(state, step=0).result(60)
        assert_same_bits(engine.load(), state)
    key = next(stat.key for stat in store.list() if stat.key.endswith(".tg"))
    headers = [entry.header for entry in read_index(store, key).entries]
    assert {header.codec for header in headers if header.raw_bytes >= SMALL_CHUNK_BYTES} == {8}
    assert 8 not in {header.codec for header in headers if header.raw_bytes < SMALL_CHUNK_BYTES}
    assert {"rans", "zstd"} <= set(report.by_codec)
