"""What the GPU tests share: a device, a stream, and one encoder of each codec, since those are large."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tidegate.codec.availability import unavailable_reason
from tidegate.codec.device import DEVICE_CODEC_NUMBERS, DeviceDecoder, DeviceEncoder

CHUNK_BYTES = 4 << 20


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip(f"no NVIDIA GPU that torch {torch.__version__} can use")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@pytest.fixture(scope="session", params=DEVICE_CODEC_NUMBERS)
def codec(request: pytest.FixtureRequest, device: torch.device) -> str:
    reason = unavailable_reason(request.param, device)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="session")
def encoder(codec: str, device: torch.device, stream: torch.cuda.Stream) -> Iterator[DeviceEncoder]:
    yield DeviceEncoder([codec], CHUNK_BYTES, device, stream)


@pytest.fixture(scope="session")
def decoder(device: torch.device, stream: torch.cuda.Stream) -> DeviceDecoder:
    return DeviceDecoder(16 << 20, device, stream)
