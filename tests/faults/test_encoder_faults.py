"""Faults between store and training thread: the encoder raises, host memory runs out. Nothing leaks, saves go on."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import tidegate
from tests.faults.rig import CHUNK, all_keys, assert_nothing_lent, held_keys
from tests.kit.bits import assert_same_bits
from tests.kit.states import filled
from tidegate.codec.base import Codec, FrameHeader
from tidegate.codec.errors import CodecUnavailableError, CorruptionError
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType
from tidegate.encode import HostEncoder
from tidegate.errors import CodecUnavailableError as PublicCodecUnavailableError
from tidegate.storage import MemoryStore
from tidegate.storage.aligned import aligned_buffer

NUM_CHUNKS = 6


class FailingCodec:
    """Writes as another codec does, but for one chunk, where it raises."""

    def __init__(self, inner: Codec) -> None:
        self.name, self.number, self.version = inner.name, inner.number, inner.version
        self.error: BaseException | None = None
        self.nth = 0
        self.num_calls = 0
        self._inner = inner
        self._lock = threading.Lock()

    def encode_body(self, raw: NDArray[np.uint8], word: WordType, out: NDArray[np.uint8]) -> int | None:
        with self._lock:
            self.num_calls += 1
            error = self.error if self.num_calls == self.nth else None
        if error is not None:
            raise error
        return self._inner.encode_body(raw, word, out)

    def decode_body(self, header: FrameHeader, body: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        self._inner.decode_body(header, body, out)


def failing_engine(
    store: MemoryStore, snapshot: str, **options: object
) -> tuple[tidegate.CheckpointEngine, FailingCodec]:
    """An engine whose CPU encoder uses a FailingCodec."""
    engine = tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, snapshot=snapshot, **options)  # type: ignore[arg-type]
    codec = FailingCodec(codec_named("zstd"))
    resources = engine._resources
    resources._host_encoder = HostEncoder(
        codec, resources._workers, resources.options.num_encode_threads, resources.staging, resources.outputs,
        verify=False,
    )
    return engine, codec


ERRORS: dict[str, tuple[BaseException, type[tidegate.CheckpointError]]] = {
    "codec": (CorruptionError("a bug"), tidegate.SaveError),
    "missing": (CodecUnavailableError("a library went away"), PublicCodecUnavailableError),
    "runtime": (RuntimeError("CUDA error: unspecified launch failure"), tidegate.SaveError),
    "memory": (MemoryError(), tidegate.SaveError),
}


@pytest.mark.parametrize("snapshot", ["host", "lazy"])
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("host_budget_bytes", [None, 1 << 20], ids=["roomy", "tight"])
def test_an_encoder_that_raises(name: str, snapshot: str, host_budget_bytes: int | None) -> None:
    error, public = ERRORS[name]
    store = MemoryStore()
    threads = threading.active_count()
    weight = torch.nn.Parameter(torch.zeros(NUM_CHUNKS * CHUNK // 4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    engine, codec = failing_engine(store, snapshot, host_budget_bytes=host_budget_bytes)
    with engine:
        engine.attach(optimizer)
        engine.save_async({"w": weight}, step=0)
        engine.wait()
        assert codec.num_calls == NUM_CHUNKS
        for nth in range(1, NUM_CHUNKS + 1):
            codec.error, codec.nth, codec.num_calls = error, nth, 0
            weight.grad = torch.ones_like(weight)
            future = engine.save_async({"w": weight}, step=nth)
            optimizer.step()  # the fence opens although the save fails
            with pytest.raises(public) as caught:
                future.result(60)
            assert caught.value.__cause__ is error
            with pytest.raises(public):
                engine.wait()
            assert future.is_staged
            assert_nothing_lent(engine)
            assert engine.steps() == [0]
            assert all_keys(store) == held_keys(store)
        assert_same_bits(engine.load(), {"w": torch.nn.Parameter(torch.zeros(NUM_CHUNKS * CHUNK // 4))})
        codec.error = None
        engine.save_async({"w": weight}, step=NUM_CHUNKS + 1)
        engine.wait()
        loaded = engine.load()
        assert_same_bits(loaded, {"w": weight})
        assert weight.detach().eq(-NUM_CHUNKS).all()
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    "failure", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")], ids=["python", "mmap"]
)
def test_no_host_memory(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    """The nth buffer cannot be allocated, on whichever thread that is: staging's, the frames', the index's."""
    store = MemoryStore()
    state = filled(1.0, num_tensors=NUM_CHUNKS, num_bytes=CHUNK)
    num_failures = 0
    nth = 0
    while num_failures == nth:
        nth += 1
        with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec="raw", keep_last=1) as engine:
            with monkeypatch.context() as patched:
                num_failures += allocation_fails(patched, engine, state, nth, failure)
            assert_nothing_lent(engine)
            assert all_keys(store) == held_keys(store)
            engine.save_async(state, step=1000 + nth)
            engine.wait()
            assert_same_bits(engine.load(), state)
    assert num_failures > NUM_CHUNKS, "each chunk has a buffer or two"


def allocation_fails(
    patched: pytest.MonkeyPatch, engine: tidegate.CheckpointEngine, state: object, nth: int, failure: Exception
) -> bool:
    """Save while the nth allocation fails; whether there were so many."""
    num_calls = 0
    lock = threading.Lock()

    def allocate(num_bytes: int) -> memoryview:
        nonlocal num_calls
        with lock:
            num_calls += 1
            is_last = num_calls == nth
        if is_last:
            raise failure
        return aligned_buffer(num_bytes)

    for module in ("buffers", "container"):
        patched.setattr(f"tidegate.{module}.aligned_buffer", allocate)
    try:
        engine.save_async(state, step=nth)
        engine.wait()
    except tidegate.SaveError as exc:
        assert exc.__cause__ is failure
        assert engine.wait() is None, "it is told once"
        return True
    return False
