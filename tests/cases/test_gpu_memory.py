"""A GPU that the training has filled to the brim (A18)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tidegate.snapshot import SnapshotMode

pytestmark = pytest.mark.gpu

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)


def model() -> dict[str, torch.Tensor]:
    """768 MiB in large tensors, and 20 MiB in small ones, which are gathered into one chunk."""
    large = {f"large{i}": torch.randn(64 * MIB, dtype=torch.bfloat16, device=DEVICE) for i in range(6)}
    return large | {f"small{i}": torch.randn(10_000, dtype=torch.bfloat16, device=DEVICE) for i in range(1000)}


def fill_but(free_bytes: int) -> list[torch.Tensor]:
    """Take all memory of the GPU but so many bytes."""
    torch.cuda.empty_cache()
    taken = []
    size = 1 << 37
    while size >= 2 * MIB:
        room = torch.cuda.mem_get_info(DEVICE)[0] - free_bytes
        if size > room:
            size //= 2
            continue
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("snapshot", ["auto", "device", "lazy", "host"])
@pytest.mark.parametrize("free_mib", [200, 20])
def test_A18_no_memory_is_left(tmp_path: Path, free_mib: int, snapshot: SnapshotMode) -> None:
    """No OOM reaches the training thread; what was done instead is told; the bits are right."""
    state = model()
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    optimizer = torch.optim.SGD([state["large0"].requires_grad_()], lr=0.0)
    expected["large0"].requires_grad_()
    with tidegate.CheckpointEngine(tmp_path, snapshot=snapshot) as engine:
        engine.attach(optimizer)
        taken = fill_but(free_mib * MIB)
        try:
            before_bytes = torch.cuda.mem_get_info(DEVICE)[0]
            assert before_bytes < (free_mib + 16) * MIB
            for step in range(2):
                report = engine.save_async(state, step=step).result(300)
                assert report.peak_device_bytes <= free_mib * MIB
                assert report.notes or snapshot == "host", "it says what it did instead"
            with engine.fence(), torch.no_grad():
                state["large1"].add_(1)  # training goes on
            torch.cuda.synchronize()
        finally:
            taken.clear()
            torch.cuda.empty_cache()
        for step in range(2):
            assert_same_bits(engine.load(step), expected)


@pytest.mark.parametrize("budget_mib", [1, 300, 2000])
def test_A18_extra_memory_stays_within_the_budget(tmp_path: Path, budget_mib: int) -> None:
    """Beside the budget there is 1 MiB, in which small tensors are gathered on the GPU."""
    state = model()
    with tidegate.CheckpointEngine(tmp_path, device_budget_bytes=budget_mib * MIB, chunk_bytes=16 * MIB) as engine:
        engine.save_async(state, step=0).result(300)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before_bytes = torch.cuda.memory_allocated(DEVICE)
        for step in (1, 2):
            report = engine.save_async(state, step=step).result(300)
            assert report.peak_device_bytes <= budget_mib * MIB
        assert torch.cuda.max_memory_allocated(DEVICE) - before_bytes <= (budget_mib + 1) * MIB
        assert_same_bits(engine.load(2, map_location=DEVICE), state)
