"""Write golden chains: `python -m tests.golden.make_chains VERSION`. One that is there is never changed.

A root of three steps, each a difference to the one before, with derived tensors of every rule and residuals of both
kinds. As for make_checkpoints.py, every value is made from patterns.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import tidegate
from tests.golden.make_checkpoints import CHUNK, pattern, write_expected
from tidegate.delta import DeltaPolicy

FOLDER = Path(__file__).parent / "chains"
NUMEL = 50_003
STEPS = (1, 2, 3)


def state(step: int) -> dict[str, object]:
    """What a step holds. Little changes from one to the next."""
    values = np.resize(np.frombuffer(pattern(3000, 7), dtype="<i2"), NUMEL)
    steps = np.resize(np.frombuffer(pattern(4001, 11), dtype=np.uint8), NUMEL) % 37
    bits = (values / 32_768).astype("<f4").view("<u4") + 0x3FF0 + steps.astype("<u4") * step
    master = torch.from_numpy(bits.view("<f4").copy())
    octets = np.resize(np.frombuffer(pattern(2000, 9), dtype=np.uint8), 100_000).copy()
    octets[:: 5000 + step] ^= 0x81
    return {
        "bf16": master.to(torch.bfloat16),
        "f16": master.to(torch.float16),
        "master": master,
        "octets": torch.from_numpy(octets),
        "again": torch.from_numpy(octets.copy()),
        "step": step,
    }


def main() -> None:
    """Write a version: a root, and what each step holds."""
    folder = FOLDER / sys.argv[1]
    folder.mkdir(parents=True)
    with tidegate.CheckpointEngine(folder / "root", codec="zstd", chunk_bytes=CHUNK, delta=DeltaPolicy()) as engine:
        for step in STEPS:
            engine.save_async(state(step), step=step)
    for step in STEPS:
        write_expected(folder, f"step-{step}", state(step))


if __name__ == "__main__":
    main()
