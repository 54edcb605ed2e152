"""Tensors that do not shrink, tiny ones, odd lengths and unaligned views, all the way to files and back (A17)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits

CHUNK = 1 << 16
LENGTHS = (1, 33, CHUNK - 1, CHUNK, CHUNK + 1, 1 << 20)


def noise(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Random bytes."""
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).to(device)


def hard_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """One tensor for each thing that has gone wrong elsewhere."""
    return {
        **{f"noise {n}": noise(n, device) for n in LENGTHS},
        "noise as fp32": noise(1 << 20, device).view(torch.float32),
        "noise as bf16": noise((1 << 20) + 2, device).view(torch.bfloat16),
        "integers": torch.randint(-(2**62), 2**62, (1 << 16,), device=device),
        "zeros": torch.zeros(1 << 18, device=device),
        "unaligned": noise((1 << 18) + 1, device)[1:],
        "empty": torch.empty(0, device=device),
    }


@pytest.mark.parametrize("codec", ["auto", "raw", "rans", pytest.param("ans", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("chunk_bytes", [CHUNK, 64 << 20])
def test_A17_what_does_not_shrink_does_not_grow(
    tmp_path: Path, device: torch.device, codec: str, chunk_bytes: int
) -> None:
    state = hard_tensors(device)
    with tidegate.CheckpointEngine(tmp_path, codec=codec, chunk_bytes=chunk_bytes, verify="decode") as engine:
        report = engine.save_async(state, step=0).result(120)
        assert_same_bits(engine.load(map_location=device), state)
    raw_bytes = sum(tensor.nbytes for tensor in state.values())
    assert report.raw_bytes == raw_bytes
    num_chunks = -(-raw_bytes // chunk_bytes)
    assert report.stored_bytes <= 1.01 * raw_bytes + 4096 * (len(state) + num_chunks), "a frame starts on a page"
    assert report.stored_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("num_bytes", LENGTHS)
def test_A17_each_alone_in_a_file(tmp_path: Path, device: torch.device, num_bytes: int) -> None:
    """One tensor a file, so that nothing else is in its chunk. The file has an index and a manifest besides."""
    for name, tensor in (("noise", noise(num_bytes, device)), ("unaligned", noise(num_bytes + 1, device)[1:])):
        path = tmp_path / f"{name}.tg"
        tidegate.save({"x": tensor}, path)
        assert_same_bits(tidegate.load(path, map_location=device), {"x": tensor})
        assert path.stat().st_size <= 1.01 * num_bytes + 4096 + 4096
