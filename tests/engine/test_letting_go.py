"""What a save does not need any more, it does not keep."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.stores import GateStore
from tidegate.pipeline import Pipeline
from tidegate.storage.local import LocalStore
from tidegate.storage.memory import MemoryStore
from tidegate.storage.sink import SinkStore

CHUNK = 1 << 16
HOME = {"cuda:0": "cuda:0"}


@pytest.mark.parametrize("snapshot", ["host", "auto"])
def test_copied_tensors_are_let_go_while_the_save_still_writes(
    tmp_path: Path, device: torch.device, snapshot: str
) -> None:
    """A run that makes a new state for every save would hold two of them otherwise."""
    gate = GateStore(LocalStore(tmp_path))
    with tidegate.CheckpointEngine(gate, snapshot=snapshot, codec="raw", chunk_bytes=CHUNK) as engine:  # type: ignore[arg-type]
        state = {"w": torch.randn(4 * CHUNK // 4, device=device), "b": torch.randn(5, device=device)}
        expected = copy.deepcopy(state)
        held = [weakref.ref(tensor) for tensor in state.values()]
        gate.shut()
        future = engine.save_async(state, step=1)
        del state
        gate.await_waiting(2)
        if device.type == "cuda":
            torch.cuda.synchronize()
        gate.permit(1)
        gate.await_waiting(2)
        assert not future.done()
        assert [ref() for ref in held] == [None, None]
        gate.open()
        engine.wait()
        assert_same_bits(engine.load(map_location=HOME), expected)


@pytest.mark.parametrize("kind", ["memory", "sink", "folder"])
def test_a_save_leaves_no_pipeline_behind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the encoder, whose memory on a GPU the next engine needs: also where no collector runs."""
    alive: weakref.WeakSet[Pipeline] = weakref.WeakSet()

    class Watched(Pipeline):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.add(self)
            made.append(kind)

    made: list[str] = []
    monkeypatch.setattr(sys.modules["tidegate.save"], "Pipeline", Watched)
    store = {"memory": MemoryStore, "sink": lambda: SinkStore(bytes_per_s=1e9), "folder": lambda: LocalStore(tmp_path)}
    with closing(store[kind]()) as opened, tidegate.CheckpointEngine(opened, chunk_bytes=1 << 16) as engine:
        gc.disable()
        try:
            engine.save_async({"a": torch.randn(100_000)}, step=1).result()
            engine.wait()
            assert made == [kind]
            assert not list(alive)
        finally:
            gc.enable()
