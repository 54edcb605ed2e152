"""Loads to a GPU: every codec bit for bit, in place, in part, within bounds, and nothing but honest errors."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

import tidegate
from tests.gpu.chunks import make_chunk
from tests.gpu.frames import NO_BLOCK_TABLE, encode
from tests.hostile.bounds import bounded
from tests.kit.bits import assert_same_bits, physical_bytes
from tests.kit.loading import load, object_of
from tests.kit.loading import saved as kit_saved
from tests.kit.stores import FailOnceStore, FlipStore
from tidegate.cli import main as command
from tidegate.codec import device_decode, nvcomp
from tidegate.codec.base import HEADER_BYTES
from tidegate.codec.blocked import parse_body
from tidegate.codec.device import DeviceDecoder, DeviceEncoder
from tidegate.codec.device_decode import prefix_bytes
from tidegate.codec.digest import digest
from tidegate.codec.errors import CorruptionError
from tidegate.codec.nvcomp_codecs import NVCOMP_CODECS
from tidegate.codec.registry import needs_gpu
from tidegate.codec.words import WordType
from tidegate.container import read_index
from tidegate.lane_frames import BODIES_BYTES
from tidegate.storage import MemoryStore, Store, StoreIOError
from tidegate.storage.local import LocalStore

pytestmark = pytest.mark.gpu

MIB = 1 << 20
CHUNK = MIB
SCRATCH_BYTES = 256 * MIB
"""nvCOMP's, and what PyTorch's allocator rounds up."""


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let frames of a mebibyte come in several pieces."""
    monkeypatch.setattr("tidegate.readers.PIECE_BYTES", 192 << 10)


def mixed_state(device: torch.device) -> dict[str, object]:
    """Several chunks of one tensor, packed chunks, noise, which is stored raw, ties, views, empties, CPU tensors."""
    large = torch.randn(5 * CHUNK // 4 + 3, device=device).mul_(0.02)
    return {
        "large": large,
        "view": large[10:20],
        "tied": large,
        "half": torch.randn(CHUNK, device=device).mul_(0.02).bfloat16(),
        "transposed": torch.randn(300, 200, device=device).t(),
        "gaps": torch.randn(300, 200, device=device)[:, ::3],
        "small": [torch.randn(i % 9, device=device) for i in range(3000)],
        "flags": torch.rand(100_001, device=device) < 0.01,
        "doubles": torch.randn(70_000, dtype=torch.float64, device=device),
        "counts": torch.arange(CHUNK // 8, device=device),
        "complex": torch.randn(1000, dtype=torch.complex64, device=device).conj(),
        "empty": [torch.empty(0, device=device), torch.empty(0, 3, dtype=torch.int64, device=device)],
        "noise": torch.randint(0, 256, (2 * CHUNK,), dtype=torch.uint8, device=device),
        "host": torch.randn(1000),
        "rng": torch.get_rng_state(),
        "step": 3,
    }


saved = partial(kit_saved, chunk_bytes=CHUNK)


def no_reader_is_left() -> bool:
    return not any(thread.name.startswith("tidegate-read") for thread in threading.enumerate())


HOME = {"cuda:0": "cuda:0"}


def test_small_states_come_back(codec: str, device: torch.device, in_pieces: None) -> None:
    state = mixed_state(device)
    store = saved(state, codec)
    for _ in range(3):
        assert_same_bits(load(store, map_location=HOME), state)
    assert_same_bits(load(store, map_location="cuda"), state, device=False)
    assert no_reader_is_left()


def test_small_states_of_every_codec_come_back_on_the_cpu(codec: str, device: torch.device, in_pieces: None) -> None:
    state = mixed_state(device)
    assert_same_bits(load(saved(state, codec)), state, device=False)


def test_small_frames_are_verified_by_the_command_line(codec: str, device: torch.device, tmp_path: Path) -> None:
    saved(mixed_state(device), codec, LocalStore(tmp_path))
    assert command(["verify", str(tmp_path)]) == 0


def copy_of(state: dict[str, object]) -> dict[str, object]:
    """A copy with the same lazy bits: on a GPU, deepcopy resolves them."""
    copied = copy.deepcopy(state)
    complex_one = state["complex"]
    assert isinstance(complex_one, torch.Tensor)
    copied["complex"] = complex_one.conj().clone().conj() if complex_one.is_conj() else complex_one.clone()
    return copied


def test_small_states_are_filled_in_place(codec: str, device: torch.device, in_pieces: None) -> None:
    state = mixed_state(device)
    store = saved(state, codec)
    target = copy_of(state)
    for tensor in (target["large"], target["half"], *target["small"], target["noise"]):  # type: ignore[misc]
        tensor.zero_()
    addresses = {name: t.data_ptr() for name, t in target.items() if isinstance(t, torch.Tensor)}
    loaded = load(store, into=target)
    assert isinstance(loaded, dict)
    for name, address in addresses.items():
        if name != "rng":
            assert loaded[name] is target[name] and loaded[name].data_ptr() == address
    assert_same_bits(loaded, state)


def check_targets_of_any_alignment(codec: str, device: torch.device, store: Store, shift: int) -> None:
    """NaNs keep their payloads: a copy of bf16 between layouts, on a GPU, may go through fp32 and lose them."""
    bits = torch.randint(0, 65536, (768 * 1024,), dtype=torch.int32, device=device).to(torch.int16)
    source = bits.view(torch.bfloat16).reshape(768, 1024)
    assert source.isnan().any()
    saved({"row": source, "t": source.clone(), "gaps": source.clone().t()}, codec, store)
    room = torch.zeros(768 * 1024 + 8, dtype=torch.bfloat16, device=device)
    targets = {
        "row": room[shift : shift + 768 * 1024].view(768, 1024),
        "t": torch.zeros(1024, 768, dtype=torch.bfloat16, device=device).t(),
        "gaps": torch.zeros(1024, 1536 + shift, dtype=torch.bfloat16, device=device)[:, shift::2],
    }
    load(store, into=targets)
    for name, expected in (("row", source), ("t", source), ("gaps", source.t())):
        assert physical_bytes(targets[name].contiguous()) == physical_bytes(expected.contiguous()), name
    assert not room[:shift].any() and not room[shift + 768 * 1024 :].any()


@pytest.mark.parametrize("shift", [0, 1, 3, 8])
def test_small_targets_of_any_alignment_and_strides(codec: str, device: torch.device, shift: int) -> None:
    check_targets_of_any_alignment(codec, device, MemoryStore(), shift)


def test_small_parts(codec: str, device: torch.device, in_pieces: None) -> None:
    state = mixed_state(device)
    store = saved(state, codec)
    for name in ("large", "half", "noise", "small", "transposed", "empty", "host", "step"):
        assert_same_bits(load(store, part=name, map_location=HOME), state[name])
    assert_same_bits(load(store, part="small.2999", map_location=HOME), state["small"][2999])  # type: ignore[index]
    mine = {"view": torch.zeros(10, device=device), "small.8": torch.zeros(8, device=device)}
    loaded = load(store, part=["view", "small.8"], into=mine)
    assert isinstance(loaded, dict) and all(loaded[name] is mine[name] for name in mine)
    assert_same_bits(mine, {"view": state["large"][10:20].clone(), "small.8": state["small"][8]})  # type: ignore[index]


def check_that_queued_work_comes_first(codec: str, device: torch.device, store: Store) -> None:
    """What the caller has queued on tensors that are then loaded into, and what it queues on them afterwards."""
    state = {"a": torch.randn(4 * CHUNK, device=device), "noise": torch.randint(0, 256, (CHUNK,), device=device)}
    saved(state, codec, store)
    busy = torch.randn(4096, 4096, device=device)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for _ in range(3):
            for _ in range(20):
                busy = (busy @ busy).clamp_(-1, 1)
            for tensor in target.values():
                tensor.fill_(7)
            load(store, into=target)
            found = {name: tensor.clone() for name, tensor in target.items()}
            new = load(store, map_location=device)
            del new  # its memory is taken again by the next load
        torch.cuda.current_stream().synchronize()
    assert_same_bits(found, state)


def test_work_queued_on_the_callers_stream_comes_first(codec: str, device: torch.device) -> None:
    check_that_queued_work_comes_first(codec, device, MemoryStore())


def test_many_small_tensors_have_storages_of_their_own(device: torch.device) -> None:
    state = {i: torch.full((1 + i % 5,), i, device=device) for i in range(20_000)}
    loaded = load(saved(state, "zstd"), map_location=HOME)
    assert isinstance(loaded, dict)
    assert_same_bits(loaded, state)
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == len(state)


@pytest.mark.parametrize("is_new", [True, False])
def test_memory_stays_within_its_bounds(codec: str, device: torch.device, tmp_path: Path, is_new: bool) -> None:
    """On the GPU: the bodies in flight, four chunks, and nvCOMP's scratch. On the host: two pieces a thread."""
    chunk_bytes = 16 * MIB
    state = {f"x{i}": torch.randn(24 * MIB, device=device).mul_(0.02).bfloat16() for i in range(16)}
    state |= {f"s{i}": torch.randn(10_000, device=device).mul_(0.02) for i in range(2000)}
    state_bytes = sum(tensor.nbytes for tensor in state.values())
    with tidegate.CheckpointEngine(tmp_path, codec=codec, chunk_bytes=chunk_bytes) as engine:
        engine.save_async(state, step=0)
    target = None if is_new else {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    options = {"map_location": device, "into": target}
    with tidegate.CheckpointEngine(tmp_path) as engine:
        engine.load(**options)  # type: ignore[arg-type]
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        with bounded(limit_bytes=512 * MIB, limit_cpu_s=120):
            loaded = engine.load(**options)  # type: ignore[arg-type]
        extra_bytes = torch.cuda.max_memory_allocated() - before_bytes - (state_bytes if is_new else 0)
        assert extra_bytes <= BODIES_BYTES + 4 * chunk_bytes + SCRATCH_BYTES
    assert_same_bits(loaded, state)


def test_all_memory_comes_back(codec: str, device: torch.device) -> None:
    state = mixed_state(device)
    store = saved(state, codec)

    def held() -> tuple[int, int]:
        load(store, map_location=HOME)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    held()
    allocated_bytes, reserved_bytes = held()
    for _ in range(20):
        last = held()
    assert last[0] == allocated_bytes
    assert last[1] <= reserved_bytes + 64 * MIB


def test_small_damage_is_always_told_and_nothing_else_is(codec: str, device: torch.device, in_pieces: None) -> None:
    state = mixed_state(device)
    inner = saved(state, codec)
    key, num_bytes = object_of(inner)
    store = FlipStore(inner)
    num_found = 0
    for _ in range(40):
        store.flip(key, random.randrange(8 * num_bytes))
        try:
            loaded = load(store, map_location=HOME)
        except tidegate.CorruptCheckpointError:
            num_found += 1
        else:
            assert_same_bits(loaded, state)  # the bit is in padding
        assert no_reader_is_left()
    assert num_found > 20
    assert_same_bits(load(inner, map_location=HOME), state)


def test_nvcomp_never_sees_a_damaged_body(codec: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = saved({"x": (torch.arange(CHUNK // 4, device=device) // 7).float()}, codec)
    key, _ = object_of(inner)
    (entry,) = read_index(inner, key).entries
    calls = []
    real = nvcomp.BatchedCodec.decompress

    def counting(self: nvcomp.BatchedCodec, *arguments: object) -> None:
        calls.append(self)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(nvcomp.BatchedCodec, "decompress", counting)
    load(inner, map_location=HOME)
    assert bool(calls) == (codec in NVCOMP_CODECS)
    calls.clear()
    store = FlipStore(inner)
    for _ in range(20):
        store.flip(key, 8 * HEADER_BYTES + random.randrange(8 * entry.header.body_bytes))
        with pytest.raises(tidegate.CorruptCheckpointError, match="digest"):
            load(store, map_location=HOME)
    assert not calls


@pytest.mark.parametrize("nth", [1, 2, 5, 9])
def test_a_read_that_fails_ends_the_load(codec: str, device: torch.device, nth: int, in_pieces: None) -> None:
    store = FailOnceStore(saved(mixed_state(device), codec))
    num_opening = 3  # manifest, trailer, index
    store.fail("read_into", num_opening + nth, StoreIOError("the disk is on fire", errno=5))
    with pytest.raises(tidegate.LoadError, match=r"frame of chunk .* on fire"):
        load(store, map_location=HOME)
    assert no_reader_is_left()


def test_without_the_gpu_codec_the_cpu_decodes(
    codec: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if needs_gpu(codec):
        pytest.skip(f"no CPU decodes {codec}")
    state = mixed_state(device)
    store = saved(state, codec)
    monkeypatch.setattr(device_decode, "undecodable_reason", lambda header, device: "pretended")
    assert_same_bits(load(store, map_location=HOME), state)
    target = copy_of(state)
    target["large"].zero_()  # type: ignore[attr-defined]
    assert_same_bits(load(store, into=target), state)
    flipped = FlipStore(store)
    flipped.flip(object_of(store)[0], 8 * 5000)
    with pytest.raises(tidegate.CorruptCheckpointError):
        load(flipped, map_location=HOME)


def test_padding_inside_a_body_is_looked_at(
    encoder: DeviceEncoder, decoder: DeviceDecoder, device: torch.device
) -> None:
    """With the whole body on the host, and with no more of it there than its table."""
    chunk = make_chunk("normal", WordType.BF16, CHUNK)
    header, body = encode(encoder, chunk, WordType.BF16, device)
    host = body.cpu()
    if header.codec in NO_BLOCK_TABLE:
        pytest.skip("no block table: test_rans.py and test_planes.py have what those need")
    table = parse_body(header, host.numpy())
    ends = table.offsets + table.stored_bytes
    padded = ends[ends % 16 != 0]
    if not padded.size:
        pytest.skip("this codec's blocks need no padding")
    out = torch.empty(header.raw_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    for at in (int(padded[0]), int(padded[-1]) // 16 * 16 + 15):
        changed = host.clone()
        changed[at] = 1
        forged = dataclasses.replace(header, body_digest=digest(changed.numpy()))
        for num_bytes in (prefix_bytes(header), header.body_bytes):
            with pytest.raises(CorruptionError, match="padding"):
                decoder.decode(forged, changed.to(device), changed.numpy()[:num_bytes], out).wait()
    decoder.decode(header, body, host.numpy()[: prefix_bytes(header)], out).wait()
    assert out.cpu().numpy().tobytes() == chunk.tobytes()


def test_two_gpus(codec: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    state = {f"x{i}": torch.randn(CHUNK, device=f"cuda:{i % 2}") for i in range(6)}
    state |= {f"s{i}": torch.randn(50, device=f"cuda:{i % 2}") for i in range(100)}
    store = saved(state, codec)
    assert_same_bits(load(store, map_location={"cuda:0": "cuda:0", "cuda:1": "cuda:1"}), state)
    swapped = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
    assert_same_bits(load(store, map_location=swapped), state, device=False)
    target = {name: torch.zeros_like(t, device=f"cuda:{i % 3 % 2}") for i, (name, t) in enumerate(state.items())}
    assert_same_bits(load(store, into=target), state, device=False)


def test_a_load_holds_no_device_memory_once_it_is_over(codec: str, device: torch.device) -> None:
    """Not even until the garbage collector runs: bodies and scratch are hundreds of megabytes."""
    store = saved(mixed_state(device), codec)
    load(store, map_location=HOME)
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated(device)
        loaded = load(store, map_location=HOME)
        assert torch.cuda.memory_allocated(device) > before
        del loaded
        assert torch.cuda.memory_allocated(device) <= before
    finally:
        gc.enable()
