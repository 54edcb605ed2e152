"""A sink keeps what makes a checkpoint exist, and nothing of what is in it."""

from __future__ import annotations

import pytest
import torch

import tidegate
from tests.kit.store_checks import listing
from tidegate.storage.sink import SinkStore


def test_checkpoints_commit_and_are_retired_in_a_sink() -> None:
    sink = SinkStore(bytes_per_s=10e9)
    state = {"w": torch.randn(100_000), "lr": 0.1}
    with tidegate.CheckpointEngine(sink, keep_last=2) as engine:
        for step in range(4):
            engine.save_async(state, step=step)
            engine.wait()
        assert engine.steps() == [2, 3]
        steps = {key.partition("/")[0] for key in listing(sink)}
        assert steps == {"step-0000000002", "step-0000000003"}
        with pytest.raises(tidegate.LoadError, match="keeps no bytes"):
            engine.load(step=3)
    assert sink.taken_bytes > 1_000_000
    sink.close()
