"""10,000 mutations of a checkpoint root and of a file: each load is bit-exact or an error of ours, and costs little."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.conftest import SEED
from tests.hostile import fuzz
from tests.hostile.bounds import bounded

NUM_MUTATIONS = 10_000
NUM_BLOCKS = 4
LIMIT_BYTES = 200 << 20
LIMIT_EACH_S = 20.0


@pytest.mark.slow
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_ten_thousand_mutations(block: int) -> None:
    """To see one again: python -m tests.hostile.fuzz SEED NUMBER."""
    num_each = NUM_MUTATIONS // NUM_BLOCKS
    found: Counter[str] = Counter()
    fuzz.run(SEED, 0)
    with bounded(LIMIT_BYTES, limit_cpu_s=200.0):
        for number in range(block * num_each, (block + 1) * num_each):
            start_s = time.perf_counter()
            found[fuzz.run(SEED, number)] += 1
            took_s = time.perf_counter() - start_s
            assert took_s < LIMIT_EACH_S, f"seed {SEED}, mutation {number} took {took_s:.1f} s"
    assert found["CorruptCheckpointError"] > num_each // 4
    assert found["same"] > num_each // 50, "damage to padding, to the other step, or to nothing that matters"
    assert found["older"] > num_each // 50, "the newest was damaged and the one before was loaded"
    assert found["other"] > 0, "a forged manifest that holds together"
