"""The public API: save_async, wait, load, steps, budgets, busy, failures, exit."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.states import filled, random_state
from tests.kit.stores import FailOnceStore, GateStore
from tidegate.errors import SaveOSError, WaitTimeoutError
from tidegate.storage.errors import StoreFullError
from tidegate.storage.local import LocalStore
from tidegate.storage.memory import MemoryStore

CHUNK = 1 << 16
HOME = {"cuda:0": "cuda:0"}
"""Every tensor back to the device that it was saved from."""


@pytest.mark.parametrize("codec", ["auto", "zstd", "rans", "raw"])
def test_what_is_saved_comes_back(tmp_path: Path, device: torch.device, codec: str) -> None:
    state = random_state(3 << 20, device)
    with tidegate.CheckpointEngine(tmp_path, codec=codec, chunk_bytes=CHUNK) as engine:
        future = engine.save_async(state, step=12, metadata={"run": "r1"})
        report = future.result(60)
        assert report.step == 12
        assert report.raw_bytes >= 3 << 20
        assert engine.steps() == [12]
        assert_same_bits(engine.load(map_location=HOME), state)
        assert_same_bits(engine.load(12, map_location=HOME), state)
    manifest = json.loads(next(tmp_path.rglob("manifest.json")).read_text())
    assert manifest["metadata"] == {"run": "r1"}


def test_one_file(tmp_path: Path, device: torch.device) -> None:
    state = random_state(1 << 20, device)
    report = tidegate.save(state, tmp_path / "model.tg")
    assert report.stored_bytes == (tmp_path / "model.tg").stat().st_size
    assert_same_bits(tidegate.load(tmp_path / "model.tg", map_location=HOME), state)
    tidegate.save({"other": torch.ones(3)}, tmp_path / "model.tg")
    assert_same_bits(tidegate.load(str(tmp_path / "model.tg")), {"other": torch.ones(3)})
    assert [p.name for p in tmp_path.iterdir()] == ["model.tg"]


@pytest.mark.parametrize("snapshot", ["auto", "device", "lazy", "host"])
def test_training_goes_on_while_the_save_runs(tmp_path: Path, device: torch.device, snapshot: str) -> None:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 8))
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    store = GateStore(LocalStore(tmp_path))
    with tidegate.CheckpointEngine(store, snapshot=snapshot, chunk_bytes=CHUNK) as engine:  # type: ignore[arg-type]
        engine.attach(optimizer)
        expected = {}
        for step in range(6):
            model(torch.randn(16, 256, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            expected[step] = cloned(state)
            engine.wait()
            store.shut()
            engine.save_async(state, step=step)
            store.open()
        engine.wait()
        for step, state in expected.items():
            assert_same_bits(engine.load(step, map_location=HOME), state)


def cloned(state: object) -> object:
    """A deep copy by way of tidegate's rival."""
    import copy

    return copy.deepcopy(state)


def test_lazy_mode_copies_nothing_of_the_optimizer_and_fences_its_step(tmp_path: Path, device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.zeros(CHUNK, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    gate = GateStore(LocalStore(tmp_path))
    host_budget = 16 * CHUNK
    with tidegate.CheckpointEngine(gate, snapshot="lazy", chunk_bytes=CHUNK, host_budget_bytes=host_budget) as engine:
        engine.attach(optimizer)
        gate.shut()
        future = engine.save_async({"w": weight}, step=1)
        assert not future.is_staged or future.done()
        stepped = threading.Event()

        def step() -> None:
            optimizer.step()
            stepped.set()

        thread = threading.Thread(target=step)
        thread.start()
        gate.open()
        assert stepped.wait(30)
        thread.join()
        report = future.result(30)
        assert report.snapshot == "lazy"
        assert weight.detach().eq(-1).all()
        expected = {"w": torch.nn.Parameter(torch.zeros(CHUNK, device=device))}
        assert_same_bits(engine.load(1, map_location=HOME), expected)


def test_a_torn_snapshot_fails_the_save(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(64 * CHUNK // 4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gate = GateStore(LocalStore(tmp_path))
    options = {"snapshot": "lazy", "codec": "raw"}
    with tidegate.CheckpointEngine(gate, chunk_bytes=CHUNK, host_budget_bytes=8 * CHUNK, **options) as engine:  # type: ignore[arg-type]
        engine.attach(optimizer)
        gate.shut()
        engine.save_async({"model": {"w": weight}}, step=1)
        with torch.no_grad():
            weight.add_(1)  # outside the fence
        gate.open()
        with pytest.raises(tidegate.errors.TornSnapshotError, match=r"model\.w") as caught:
            engine.wait()
        assert caught.value.fqn == "model.w"
        assert engine.steps() == []
        assert list(tmp_path.rglob("*.tg")) == []
        engine.save_async({"w": weight}, step=2)
        engine.wait()
        assert engine.steps() == [2]


def test_a_state_larger_than_the_budget_is_streamed(tmp_path: Path) -> None:
    state = filled(3.0, num_tensors=3, num_bytes=5 << 20)
    budget = 1 << 20
    with tidegate.CheckpointEngine(tmp_path, host_budget_bytes=budget, codec="raw") as engine:
        engine.save_async(state, step=1)
        report = engine.wait()
        assert report is not None
        assert report.peak_host_bytes <= budget
        assert_same_bits(engine.load(), state)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_pipelined_equals_sequential(tmp_path: Path, codec: str) -> None:
    state = random_state(5 << 20)
    tidegate.save(state, tmp_path / "sequential.tg", codec=codec)
    with tidegate.CheckpointEngine(tmp_path / "root", codec=codec, chunk_bytes=CHUNK) as engine:
        engine.save_async(state, step=0)
        engine.wait()
        assert_same_bits(engine.load(), tidegate.load(tmp_path / "sequential.tg"))


def test_the_same_state_gives_the_same_object(tmp_path: Path) -> None:
    state = random_state(5 << 20)
    with tidegate.CheckpointEngine(tmp_path, chunk_bytes=CHUNK) as engine:
        for step in range(3):
            engine.save_async(state, step=step)
        engine.wait()
    objects = [p.read_bytes() for p in sorted(tmp_path.rglob("*.tg"))]
    assert len(objects) == 3
    assert objects[0] == objects[1] == objects[2]


def test_stages_overlap(tmp_path: Path) -> None:
    """While the store holds the first chunk back, later chunks are encoded: the timeline shows it."""
    state = filled(1.0, num_tensors=12, num_bytes=CHUNK)
    gate = GateStore(LocalStore(tmp_path))
    with tidegate.CheckpointEngine(gate, chunk_bytes=CHUNK, codec="raw") as engine:
        gate.shut()
        future = engine.save_async(state, step=0)
        gate.await_waiting(2)
        gate.open()
        report = future.result(30)
    first_write = next(s for s in report.timeline if s.stage == "write" and s.chunk == 0)
    later_encodes = [s for s in report.timeline if s.stage == "encode" and s.chunk > 0]
    assert len(later_encodes) == 11
    assert any(s.start_s < first_write.end_s and s.end_s > first_write.start_s for s in later_encodes)
    assert {s.stage for s in report.timeline} == {"stage", "encode", "write"}
    assert 0.0 < report.overlap <= 1.0


def test_busy_wait_skip_error(tmp_path: Path) -> None:
    state = filled(1.0)
    for mode in ("skip", "error"):
        gate = GateStore(LocalStore(tmp_path / mode))
        with tidegate.CheckpointEngine(gate, on_busy=mode) as engine:  # type: ignore[arg-type]
            gate.shut()
            first = engine.save_async(state, step=1)
            if mode == "skip":
                assert engine.save_async(state, step=2).cancelled()
            else:
                with pytest.raises(tidegate.SaveError, match="step 1 is still in flight"):
                    engine.save_async(state, step=2)
            with pytest.raises(WaitTimeoutError):
                engine.wait(timeout=0.01)
            gate.open()
            first.result(30)
            engine.wait()
            engine.save_async(state, step=3).result(30)
            assert engine.steps() == [1, 3]


def test_a_failed_save_surfaces_once_and_leaves_nothing(tmp_path: Path) -> None:
    failure = StoreFullError("no space left", key="k", errno=28)
    store = FailOnceStore(LocalStore(tmp_path))
    store.fail("append", 2, failure)
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec="raw") as engine:
        future = engine.save_async(filled(1.0), step=1)
        with pytest.raises(SaveOSError) as caught:
            future.result(30)
        assert caught.value.errno == 28
        assert caught.value.__cause__ is failure
        with pytest.raises(tidegate.SaveError, match="step 1"):
            engine.save_async(filled(2.0), step=2)
        engine.save_async(filled(2.0), step=2)
        assert engine.wait() is not None
        assert engine.steps() == [2]
    assert len(list(tmp_path.rglob("*.tg"))) == 1
    assert not list(tmp_path.rglob("*.partial"))


def test_a_committed_step_is_refused_or_swapped(tmp_path: Path) -> None:
    with tidegate.CheckpointEngine(tmp_path) as engine:
        engine.save_async(filled(1.0), step=5).result(30)
        with pytest.raises(tidegate.StepExistsError, match="step 5") as caught:
            engine.save_async(filled(2.0), step=5)
        assert caught.value.step == 5
        assert_same_bits(engine.load(5), filled(1.0))
        engine.save_async(filled(2.0), step=5, overwrite=True).result(30)
        engine.wait()
        assert_same_bits(engine.load(5), filled(2.0))
        assert engine.steps() == [5]
    assert len(list(tmp_path.rglob("*.tg"))) == 1, "the attempt that was replaced is gone"


def test_verify_decode(tmp_path: Path) -> None:
    state = random_state(1 << 20)
    with tidegate.CheckpointEngine(tmp_path, verify="decode", chunk_bytes=CHUNK) as engine:
        engine.save_async(state, step=0).result(30)
        assert_same_bits(engine.load(), state)


def test_into_fills_the_callers_tensors(tmp_path: Path, device: torch.device) -> None:
    state = random_state(1 << 20, device)
    with tidegate.CheckpointEngine(tmp_path, chunk_bytes=CHUNK) as engine:
        engine.save_async(state, step=0).result(30)
        target = cloned(state)
        tensor = target["optimizer"]["state"][0]["master"]  # type: ignore[index]
        tensor.zero_()
        loaded = engine.load(into=target)
        assert loaded["optimizer"]["state"][0]["master"] is tensor  # type: ignore[index]
        assert_same_bits(loaded, state)
        with pytest.raises(tidegate.LoadError, match="model"):
            engine.load(into={**target, "model": {}})  # type: ignore[dict-item]


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(tmp_path: Path) -> None:
    with tidegate.CheckpointEngine(tmp_path) as engine:
        engine.save_async(filled(1.0), step=1).result(30)
        engine.save_async(filled(2.0), step=2).result(30)
        path = next(tmp_path.glob("step-0000000002/*/*.tg"))
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
        with pytest.warns(tidegate.CheckpointWarning, match="step 2 is damaged"):
            state = engine.load()
        assert_same_bits(state, filled(1.0))
        with pytest.raises(tidegate.CorruptCheckpointError, match=r"t0") as caught:
            engine.load(2)
        assert caught.value.key.endswith("rank-00000.tg")


def test_nothing_there(tmp_path: Path) -> None:
    with tidegate.CheckpointEngine(tmp_path / "none") as engine:
        assert engine.wait() is None
        assert engine.steps() == []
        with pytest.raises(tidegate.CheckpointNotFoundError, match="no checkpoint is committed"):
            engine.load()
        with pytest.raises(tidegate.CheckpointNotFoundError, match="step 3"):
            engine.load(3)
    with pytest.raises(tidegate.CheckpointNotFoundError):
        tidegate.load(tmp_path / "none.tg")
    with pytest.raises(tidegate.ConfigError, match="folder"):
        tidegate.load(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "lzma"}, {"snapshot": "now"}, {"chunk_bytes": 5}, {"chunk_bytes": 70_000}, {"chunk_bytes": 1 << 40},
        {"host_budget_bytes": 0}, {"watermarks": (0.5, 0.9)}, {"verify": "no"}, {"on_busy": "drop"}, {"keep_last": 0},
        {"keep_every": 5}, {"io": "fast"}, {"keep_last": True}, {"process_group": "world"},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(tidegate.ConfigError) as caught:
        tidegate.CheckpointEngine(tmp_path, **options)  # type: ignore[arg-type]
    assert next(iter(options)) in str(caught.value) or "keep_last" in str(caught.value)


@pytest.mark.parametrize("step", [-1, 10**10, 1.5, "3", True, None])
def test_wrong_steps_are_refused(step: object) -> None:
    with tidegate.CheckpointEngine(MemoryStore()) as engine, pytest.raises(tidegate.ConfigError, match="step is"):
        engine.save_async({}, step=step)  # type: ignore[arg-type]


@pytest.mark.parametrize("metadata", [{"a": {1, 2}}, {"a": float("nan")}, {"a": torch.ones(1)}])
def test_metadata_must_be_json(metadata: dict[str, object]) -> None:
    with tidegate.CheckpointEngine(MemoryStore()) as engine, pytest.raises(tidegate.ConfigError, match="metadata"):
        engine.save_async({}, step=0, metadata=metadata)  # type: ignore[arg-type]


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    engine = tidegate.CheckpointEngine(tmp_path)
    engine.close()
    engine.close()
    with pytest.raises(tidegate.ConfigError, match="closed"):
        engine.save_async({}, step=0)


def test_ans_says_what_to_install() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(tidegate.errors.CodecUnavailableError, match="cu1"):
        tidegate.CheckpointEngine(MemoryStore(), codec="ans")


def test_a_forked_child_is_told(tmp_path: Path) -> None:
    script = """
        import os, sys, warnings, tidegate, torch
        warnings.simplefilter("ignore")
        engine = tidegate.CheckpointEngine(sys.argv[1])
        engine.save_async({"x": torch.ones(3)}, step=0)
        engine.wait()
        pid = os.fork()
        if pid == 0:
            try:
                engine.save_async({}, step=1)
            except tidegate.ConfigError as exc:
                os._exit(0 if "fork" in str(exc) else 3)
            os._exit(4)
        _, status = os.waitpid(pid, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=True, timeout=60)


def test_no_threads_or_files_stay_behind(tmp_path: Path) -> None:
    state = filled(1.0)

    def run() -> None:
        with tidegate.CheckpointEngine(tmp_path / "warm") as engine:
            for step in range(3):
                engine.save_async(state, step=step, overwrite=True)
            engine.load()

    def held() -> tuple[int, int]:
        gc.collect()  # what other tests dropped without closing it
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    run()
    num_threads, num_files = held()
    for _ in range(3):
        run()
    assert held() <= (num_threads, num_files)
    assert held()[1] <= num_files


def test_an_engine_that_cannot_be_made_leaves_no_thread() -> None:
    gc.collect()
    num_threads = threading.active_count()
    for root, options in (("gs://bucket/run", {}), ("memory://x", {"codec": "none"})):
        with pytest.raises(tidegate.ConfigError):
            tidegate.CheckpointEngine(root, **options)  # type: ignore[arg-type]
    assert threading.active_count() <= num_threads


def test_no_warning_in_a_plain_save(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tidegate.save(filled(1.0), tmp_path / "x.tg")
        tidegate.load(tmp_path / "x.tg")
