"""What a save does not need any more, it does not keep."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.stores import GateStore
from tidegate.storage.local import LocalStore

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
