"""What all tests share: the device fixture, the GPU marker, and a printed seed."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest
import torch

SEED = int(os.environ.get("TIDEGATE_TEST_SEED", "20261129"))


def pytest_configure() -> None:
    """Make Ctrl-C interrupt, here and in child processes, also where a shell started us with it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return f"tidegate seed {SEED} (TIDEGATE_TEST_SEED), torch {torch.__version__}, GPU {gpu}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers in every run."""
    random.seed(SEED)
    np.random.seed(SEED % 2**32)
    torch.manual_seed(SEED)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Runs a test body on the CPU, and on a GPU where there is one."""
    return torch.device(request.param)
