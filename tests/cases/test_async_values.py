"""What an asynchronous save holds, how its failure is told, and that the last one is not lost (A01, A02, A03)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import ended, script
from tests.kit.states import filled
from tests.kit.stores import FailOnceStore, GateStore
from tidegate.storage import StoreIOError
from tidegate.storage.local import LocalStore

CHUNK = 1 << 16
_GPU_KINDS = ("pinned", "cuda")


def live_tensors(kind: str) -> list[torch.Tensor]:
    """64 tensors, some of many elements and one of a single one, filled with 0."""
    device = "cuda" if kind == "cuda" else "cpu"
    tensors = [torch.zeros(CHUNK // 4, device=device) for _ in range(63)] + [torch.zeros(1, 1, device=device)]
    if kind == "pinned":
        return [tensor.pin_memory() for tensor in tensors]
    return [tensor.share_memory_() for tensor in tensors] if kind == "shared" else tensors


@pytest.mark.parametrize("snapshot", ["auto", "host", "lazy"])
@pytest.mark.parametrize("kind", ["cpu", "shared", *(pytest.param(k, marks=pytest.mark.gpu) for k in _GPU_KINDS)])
def test_A01_a_save_holds_the_values_of_the_call(tmp_path: Path, kind: str, snapshot: str) -> None:
    """Everything changes right after the call, while no byte has reached the store."""
    tensors = live_tensors(kind)
    array = np.zeros(1000)
    gate = GateStore(LocalStore(tmp_path, sync=False))
    with tidegate.CheckpointEngine(gate, snapshot=snapshot, chunk_bytes=CHUNK, codec="raw") as engine:  # type: ignore[arg-type]
        for k in range(10):
            engine.wait()
            gate.shut()
            engine.save_async({"tensors": tensors, "array": array}, step=k)
            torch._foreach_add_(tensors, 1)
            array += 1
            gate.open()
        engine.wait()
        for k in range(10):
            state = engine.load(k)
            assert_same_bits(
                state,
                {"tensors": [torch.full(t.shape, float(k)) for t in tensors], "array": np.full(1000, float(k))},
            )


@pytest.mark.parametrize("error", [StoreIOError("the disk failed", errno=5), OSError(5, "the disk failed")])
def test_A02_a_failed_save_is_told_once_and_harms_no_other(tmp_path: Path, error: Exception) -> None:
    store = FailOnceStore(LocalStore(tmp_path, sync=False))
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec="raw") as engine:
        engine.save_async(filled(1.0), step=1).result(60)
        store.fail("append", 2, error)
        second = engine.save_async(filled(2.0), step=2)
        caught = second.exception(60)
        assert isinstance(caught, tidegate.SaveError)
        assert isinstance(caught, OSError)
        assert caught.errno == 5
        assert "step 2" in str(caught)
        assert_same_bits(engine.load(), filled(1.0))
        with pytest.raises(tidegate.SaveError, match="step 2"):
            engine.wait()
        assert engine.wait() is None, "it is told once"

        with pytest.raises(tidegate.UnsupportedStateError, match=r"cfg\.f") as refused:
            engine.save_async({"cfg": {"f": lambda: 1}}, step=3)
        assert refused.value.path == "cfg.f"
        assert_same_bits(engine.load(), filled(1.0))

        engine.save_async(filled(4.0), step=4)
        report = engine.wait()
        assert report is not None
        assert report.step == 4
        assert engine.steps() == [1, 4]
        assert_same_bits(engine.load(1), filled(1.0))
        assert_same_bits(engine.load(4), filled(4.0))
    assert len(list(tmp_path.rglob("*.tg"))) == 2


def test_A02_close_tells_what_nobody_has_heard(tmp_path: Path) -> None:
    store = FailOnceStore(LocalStore(tmp_path, sync=False))
    store.fail("seal", 1, StoreIOError("the disk failed", errno=5))
    engine = tidegate.CheckpointEngine(store)
    engine.save_async(filled(1.0), step=1)
    with pytest.raises(tidegate.SaveError, match="step 1"):
        engine.close()
    with pytest.raises(ValueError, match="in the loop") as caught, tidegate.CheckpointEngine(store) as engine:
        store.fail("seal", 1, StoreIOError("the disk failed", errno=5))
        engine.save_async(filled(1.0), step=1)
        raise ValueError("in the loop")
    assert any("step 1" in note for note in caught.value.__notes__)


def test_A02_a_plain_save_that_is_refused_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.tg"
    tidegate.save(filled(1.0), path)
    before = path.read_bytes()
    with pytest.raises(tidegate.UnsupportedStateError, match=r"cfg\.f"):
        tidegate.save({"cfg": {"f": lambda: 1}}, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.tg"]


_SCRIPT = """
    import sys, threading, torch, tidegate
    from tests.kit.states import filled
    from tests.kit.stores import FailOnceStore, SlowStore
    from tidegate.storage import LocalStore, StoreFullError

    root, ending, rate = sys.argv[1], sys.argv[2], float(sys.argv[3])

    class Held(SlowStore):
        # Nothing is written before the script's last line.
        def create(self, key, **options):
            at_the_end.wait()
            return super().create(key, **options)

    at_the_end = threading.Event()
    store = Held(LocalStore(root), bytes_per_s=rate)
    if ending.startswith("fail"):
        store.inner = FailOnceStore(store.inner)
        store.inner.fail("append", 1, StoreFullError("no space left on device", errno=28))
    def train():
        engine = tidegate.CheckpointEngine(store, codec="raw", chunk_bytes=1 << 16)
        future = engine.save_async(filled(7.0, num_bytes=1 << 18), step=7)
        print("saved" if future.done() else "in flight", flush=True)
        return engine
    engine = train()
    if ending.endswith("drop"):
        import gc
        del engine
        gc.collect()
    at_the_end.set()
    if ending == "exit":
        sys.exit(3)
    if ending == "raise":
        raise ValueError("the training failed")
    if ending == "close":
        engine.close()
"""


@pytest.mark.slow
def test_A03_the_last_save_is_drained_however_the_script_ends(tmp_path: Path) -> None:
    endings = {"fall off": 0, "exit": 3, "raise": 1, "close": 0, "drop": 0}
    # 1 MiB at 4 MB/s: a quarter of a second goes by after the last line.
    children = {ending: script(_SCRIPT, tmp_path / ending, ending, 4e6) for ending in endings}
    for ending, code in endings.items():
        done = ended(children[ending])
        assert done.returncode == code, done.stderr
        assert done.stdout == "in flight\n"
        assert ("the training failed" in done.stderr) == (ending == "raise")
        assert "lost" not in done.stderr
        with tidegate.CheckpointEngine(tmp_path / ending) as engine:
            assert engine.steps() == [7]
            assert_same_bits(engine.load(), filled(7.0, num_bytes=1 << 18))


def test_A03_a_last_save_that_fails_is_told_on_stderr(tmp_path: Path) -> None:
    failing = [script(_SCRIPT, tmp_path / ending, ending, 1e9) for ending in ("fail", "fail and drop")]
    late = script(_SCRIPT, tmp_path / "late", "exit", 1e4, environment={"TIDEGATE_EXIT_TIMEOUT_S": "0.2"})
    for child, ending in zip(failing, ("fail", "fail and drop"), strict=True):
        done = ended(child)
        assert done.returncode == 0
        assert "tidegate: the last save was lost: save of step 7 failed" in done.stderr
        assert "no space left on device" in done.stderr
        assert_nothing_is_there(tmp_path / ending, done)
    done = ended(late)
    assert done.returncode == 3
    assert "tidegate: the last save was lost: the save of step 7 has not ended after 0.2 s" in done.stderr
    assert_nothing_is_there(tmp_path / "late", done)


def assert_nothing_is_there(root: Path, done: subprocess.CompletedProcess[str]) -> None:
    """What is not committed is not found."""
    with tidegate.CheckpointEngine(root) as engine:
        assert engine.steps() == [], done.stderr
        with pytest.raises(tidegate.CheckpointNotFoundError):
            engine.load()

