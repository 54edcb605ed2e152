"""Frames that a store takes from device memory: the same bytes, no slot lost, and wrong ones are caught before that."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.stores import WrappedStore
from tests.kit.wrapping import WrappedWriter
from tidegate import encode as host_encode
from tidegate.codec.availability import unavailable_reason
from tidegate.codec.base import HEADER_BYTES, FrameHeader
from tidegate.codec.device import DEVICE_CODEC_NUMBERS, DeviceEncoder
from tidegate.codec.device import Ticket as DeviceTicket
from tidegate.codec.frame import encode_frame
from tidegate.codec.words import WordType
from tidegate.storage import DeviceBytes, MemoryStore, ObjectWriter, SinkStore, StorageError, Store, StoreIOError
from tidegate.storage.device_file import load_kvikio
from tidegate.storage.device_writer import LocalDeviceWriter
from tidegate.storage.workers import WorkerPool

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
HOME = {"cuda:0": "cuda:0"}
MIB = 1 << 20
TIMEOUT_S = 60.0


class DeviceTakingStore(WrappedStore):
    """Keeps objects in host memory and takes bytes from device memory too: late, one append after the other.

    A thread of its own reads each on a stream of its own, behind a kernel that runs for a while. So what has not been
    written yet when it is handed over, or is overwritten before its future is done, is stored wrong.

    Attributes:
        num_taken: Appends so far.
        num_from_device: Those of them from device memory.
        fail_at: Which append fails, counted from the next; 0 for none.
        fails_at_once: Whether that one raises, instead of the future that it returns.
    """

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.pool = WorkerPool(1, "device-taking-store")
        self.num_taken = self.num_from_device = self.fail_at = 0
        self.fails_at_once = False
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def prepare_for_device(self, device: int) -> str:
        return "device memory is read late"

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        return _DeviceTakingWriter(self, super().create(key, size_hint_bytes=size_hint_bytes, replace=replace), key)

    def close(self) -> None:
        self.pool.close()
        super().close()

    def failure(self) -> StorageError | None:
        """Count an append; its error, if it is the one that fails."""
        self.num_taken += 1
        self.fail_at -= 1
        return StoreIOError("the device failed", errno=5) if self.fail_at == 0 else None

    def read(self, data: DeviceBytes) -> bytes:
        """Bring bytes of a device over, late."""
        if self._stream is None:
            raise RuntimeError("there is no device")
        self.num_from_device += 1
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(2_000_000)  # cycles: about 1 ms
            return torch.as_tensor(_CudaArray(data), device="cuda").cpu().numpy().tobytes()


class _CudaArray:
    def __init__(self, data: DeviceBytes) -> None:
        self.__cuda_array_interface__ = {
            "data": (data.address, False), "shape": (data.num_bytes,), "typestr": "|u1", "version": 3, "strides": None,
        }  # fmt: skip


class _DeviceTakingWriter(WrappedWriter):
    def __init__(self, store: DeviceTakingStore, inner: ObjectWriter, key: str) -> None:
        super().__init__(inner, key)
        self._store = store
        self._futures: list[Future[None]] = []
        self._error: StorageError | None = None
        self._is_aborted = threading.Event()

    def append(self, data: memoryview) -> Future[None]:
        return self._queue(lambda: bytes(data))

    def append_device(self, data: DeviceBytes) -> Future[None]:
        return self._queue(lambda: self._store.read(data))

    def seal(self) -> None:
        wait(self._futures)
        if self._error is not None:
            raise self._error
        super().seal()

    def abort(self) -> None:
        self._is_aborted.set()
        wait(self._futures)
        super().abort()

    def _queue(self, read: Callable[[], bytes]) -> Future[None]:
        error = self._store.failure()
        if error is not None and self._store.fails_at_once:
            self._error = error
            raise error
        self._futures.append(self._store.pool.submit(self._take, read, error))
        return self._futures[-1]

    def _take(self, read: Callable[[], bytes], error: StorageError | None) -> None:
        self._error = self._error or error
        if self._error is None and self._is_aborted.is_set():
            self._error = StorageError(f"{self.key} was aborted", key=self.key)
        if self._error is not None:
            raise self._error
        self.inner.append(memoryview(read())).result()


def state_on(where: str, num_mib: int = 12) -> dict[str, object]:
    """Of several word types: what shrinks much, a little, and not at all; small tensors that share a chunk."""
    numel = num_mib * MIB // 16
    return {
        "w": torch.randn(numel + 3, device=where).mul_(0.02).to(torch.bfloat16),
        "m": torch.randn(numel, device=where).mul_(1e-4),
        "random": torch.randint(0, 256, (numel + 5,), dtype=torch.uint8, device=where),
        "zeros": torch.zeros(numel, device=where),
        "small": [torch.randn(100 + i, device=where) for i in range(50)],
        "count": torch.arange(numel // 2, device=where),
    }


def skip_unless_it_works(codec: str) -> None:
    reason = unavailable_reason("zstd" if codec == "auto" else codec, torch.device("cuda", 0))
    if reason is not None:
        pytest.skip(reason)


def need_kvikio() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import
        try:
            load_kvikio()
        except StorageError as exc:
            pytest.skip(str(exc))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["raw", "zstd", "rans", "ans", "auto"])
def test_kvikio_writes_what_our_own_threads_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    need_kvikio()
    skip_unless_it_works(codec)
    num_appended = 0
    append_device = LocalDeviceWriter.append_device

    def counted(self: LocalDeviceWriter, data: DeviceBytes) -> Future[None]:
        nonlocal num_appended
        num_appended += 1
        return append_device(self, data)

    monkeypatch.setattr(LocalDeviceWriter, "append_device", counted)
    state = state_on("cuda")
    files = []
    for io in ("gds", "buffered"):
        root = tmp_path / io
        with tidegate.CheckpointEngine(root, codec=codec, chunk_bytes=MIB, io=io) as engine:  # type: ignore[arg-type]
            for step in range(2):
                num_appended = 0
                report = engine.save_async(state, step=step).result(TIMEOUT_S)
                num_frames = sum(totals.num_frames for totals in report.by_codec.values())
                assert num_appended == (num_frames if io == "gds" else 0)
                assert_same_bits(engine.load(step, map_location=HOME), state)
        files.append([path.read_bytes() for path in sorted(root.rglob("*.tg"))])
    if codec != "auto":  # which chooses by what it measures
        assert files[0][0] == files[0][1] == files[1][0] == files[1][1]


@pytest.mark.parametrize("codec", ["raw", "zstd", "auto"])
@pytest.mark.parametrize("where", DEVICES)
def test_a_sink_takes_what_the_report_says(where: str, codec: str) -> None:
    store = SinkStore(from_device=True)
    with tidegate.CheckpointEngine(store, codec=codec, chunk_bytes=MIB) as engine:
        for step in range(2):
            before_bytes = store.taken_bytes
            report = engine.save_async(state_on(where), step=step).result(TIMEOUT_S)
            sizes = {stat.key.rpartition("/")[2]: stat.num_bytes for stat in store.list(f"step-{step:010d}/")}
            assert sum(sizes.values()) == report.stored_bytes
            assert store.taken_bytes - before_bytes == sizes["rank-00000.tg"]
            frames_bytes = sum(totals.stored_bytes for totals in report.by_codec.values())
            assert 0 < sizes["rank-00000.tg"] - frames_bytes < MIB // 4, "beside the frames there is an index"
            has_host_copies = any(span.stage == "copy" for span in report.timeline) and report.peak_host_bytes > 0
            assert not (where == "cuda" and has_host_copies), "no frame went through host memory"


@pytest.mark.parametrize("codec", ["raw", "zstd", "rans", "auto", pytest.param("ans", marks=GPU)])
@pytest.mark.parametrize("where", DEVICES)
def test_a_store_that_reads_device_memory_late_gets_whole_frames(where: str, codec: str) -> None:
    if codec == "ans" and where == "cpu":
        pytest.skip("ans encodes on a GPU only")
    store = DeviceTakingStore()
    plain = MemoryStore()
    state = state_on(where)
    objects = []
    for target in (store, plain):
        with tidegate.CheckpointEngine(target, codec=codec, chunk_bytes=MIB) as engine:
            for step in range(3):
                engine.save_async(state, step=step).result(TIMEOUT_S)
                assert_same_bits(engine.load(step, map_location=HOME), state)
        objects += contents(target)
    assert (store.num_from_device > 0) == (where == "cuda")
    assert codec == "auto" or len(set(objects)) == 1, "the same bytes as through host memory, save after save"
    store.close()


def contents(store: Store) -> list[bytes]:
    """All objects that hold frames."""
    keys = [stat.key for stat in store.list() if stat.key.endswith(".tg")]
    return [store.read_all(key, limit_bytes=1 << 30) for key in keys]


@pytest.mark.parametrize("at_once", [True, False], ids=["raises", "future"])
@pytest.mark.parametrize("where", DEVICES)
def test_a_write_that_fails_in_the_middle(where: str, at_once: bool) -> None:
    """The save fails, nothing of it stays, and the next one has all slots and all memory that there were."""
    store = DeviceTakingStore()
    state = state_on(where)
    with tidegate.CheckpointEngine(store, codec="raw", chunk_bytes=MIB) as engine:
        engine.save_async(state, step=0).result(TIMEOUT_S)
        num_appends = store.num_taken
        assert num_appends > 8
        keys = {stat.key for stat in store.list()}
        before_bytes = memory_bytes(where)
        for nth in (1, 2, 5, num_appends - 1, num_appends):
            store.fail_at, store.fails_at_once = nth, at_once
            failed = engine.save_async(state, step=nth).exception(TIMEOUT_S)
            assert isinstance(failed, tidegate.SaveError)
            assert "the device failed" in str(failed)
            with pytest.raises(tidegate.SaveError, match="the device failed"):
                engine.wait()
            assert engine.wait() is None, "it is told once"
            assert {stat.key for stat in store.list()} == keys
            assert memory_bytes(where) <= before_bytes
            engine.save_async(state, step=0, overwrite=True).result(TIMEOUT_S)
            engine.wait()
            keys = {stat.key for stat in store.list()}
        assert engine.steps() == [0]
        assert_same_bits(engine.load(map_location=HOME), state)
        assert memory_bytes(where) <= before_bytes
    store.close()


def memory_bytes(where: str) -> int:
    if where == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize("from_device", [True, False], ids=["from device", "through host"])
@pytest.mark.parametrize("codec", [*DEVICE_CODEC_NUMBERS, "auto"])
def test_every_codec_decodes_before_it_is_written(codec: str, from_device: bool) -> None:
    skip_unless_it_works(codec)
    store = DeviceTakingStore() if from_device else MemoryStore()
    state = state_on("cuda", num_mib=6)
    with tidegate.CheckpointEngine(store, codec=codec, chunk_bytes=MIB, verify="decode") as engine:
        for step in range(2):
            report = engine.save_async(state, step=step).result(TIMEOUT_S)
            assert codec == "auto" or codec.partition(":")[0] in report.by_codec
            assert_same_bits(engine.load(step, map_location=HOME), state)
    store.close()


def flip(raw: torch.Tensor) -> None:
    """Change one bit in device memory, after all that is queued there and before all that will be."""
    torch.cuda.synchronize(raw.device)
    raw[raw.numel() // 2 :][:1].bitwise_xor_(1)
    torch.cuda.synchronize(raw.device)


@pytest.mark.gpu
@pytest.mark.parametrize("from_device", [True, False], ids=["from device", "through host"])
@pytest.mark.parametrize("codec", DEVICE_CODEC_NUMBERS)
def test_an_encoder_that_codes_other_values_is_caught(
    monkeypatch: pytest.MonkeyPatch, codec: str, from_device: bool
) -> None:
    """One bit of one chunk is another while it is encoded: the frame is sound, but it is not the chunk's.

    A damaged body would be no test of every codec: most of nvCOMP's decoders trust their input.
    """
    skip_unless_it_works(codec)
    start = DeviceEncoder.start
    num_started = 0

    def wrong(self: DeviceEncoder, raw: torch.Tensor, word: WordType, codec: str) -> DeviceTicket:
        nonlocal num_started
        num_started += 1
        if num_started != 4:
            return start(self, raw, word, codec)
        flip(raw)
        ticket = start(self, raw, word, codec)
        flip(raw)
        return ticket

    monkeypatch.setattr(DeviceEncoder, "start", wrong)

    def begin_again() -> None:
        nonlocal num_started
        num_started = 0

    check_caught(codec, from_device, begin_again)
    assert num_started >= 4


@pytest.mark.gpu
@pytest.mark.parametrize("from_device", [True, False], ids=["from device", "through host"])
def test_a_body_that_changes_in_device_memory_is_caught(monkeypatch: pytest.MonkeyPatch, from_device: bool) -> None:
    """One bit of a raw frame's body flips when it is encoded already, before it is checked."""
    finish = DeviceTicket.finish
    seen: list[DeviceTicket] = []

    def damaging(self: DeviceTicket) -> tuple[FrameHeader, torch.Tensor]:
        header, body = finish(self)
        if self not in seen:
            seen.append(self)
            if len(seen) == 4:
                flip(body)
        return header, body

    monkeypatch.setattr(DeviceTicket, "finish", damaging)
    check_caught("raw", from_device, seen.clear)
    assert len(seen) >= 4


def check_caught(codec: str, from_device: bool, begin_again: Callable[[], None]) -> None:
    """Assert that `verify="decode"` fails a save that is committed without it."""
    for verify in ("checksum", "decode"):
        begin_again()
        store = DeviceTakingStore() if from_device else MemoryStore()
        state = state_on("cuda")
        with tidegate.CheckpointEngine(store, codec=codec, chunk_bytes=MIB, snapshot="device", verify=verify) as engine:  # type: ignore[arg-type]
            future = engine.save_async(state, step=0)
            if verify == "checksum":
                future.result(TIMEOUT_S)
                assert engine.steps() == [0], "so it is the decoding that catches it"
                continue
            failed = future.exception(TIMEOUT_S)
            assert isinstance(failed, tidegate.SaveError)
            assert engine.steps() == []
            assert list(store.list()) == []
            with pytest.raises(tidegate.SaveError):
                engine.wait()
            engine.save_async(state, step=1).result(TIMEOUT_S)  # only the fourth chunk of all was wrong
            assert_same_bits(engine.load(map_location=HOME), state)
        store.close()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_body_that_changes_on_the_cpu_is_caught(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    lock = threading.Lock()
    num_encoded = 0

    def damaging(codec: object, raw: torch.Tensor, word: WordType, out: torch.Tensor) -> FrameHeader:
        nonlocal num_encoded
        header = encode_frame(codec, raw, word, out)  # type: ignore[arg-type]
        with lock:
            num_encoded += 1
            if num_encoded == 4:
                out[HEADER_BYTES + header.body_bytes // 2] ^= 1
        return header

    monkeypatch.setattr(host_encode, "encode_frame", damaging)
    store = MemoryStore()
    state = state_on("cpu")
    with tidegate.CheckpointEngine(store, codec=codec, chunk_bytes=MIB, verify="decode") as engine:
        failed = engine.save_async(state, step=0).exception(TIMEOUT_S)
        assert isinstance(failed, tidegate.SaveError)
        assert list(store.list()) == []
        with pytest.raises(tidegate.SaveError):
            engine.wait()
        engine.save_async(state, step=1).result(TIMEOUT_S)
        assert_same_bits(engine.load(), state)
