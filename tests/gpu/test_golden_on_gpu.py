"""Frames that the GPU's codecs wrote once decode for ever. tests/golden/make_device_frames.py wrote them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tidegate.codec.base import HEADER_BYTES, unpack_header
from tidegate.codec.device import DeviceDecoder
from tidegate.codec.nvcomp import load_nvcomp

FOLDER = Path(__file__).parent.parent / "golden" / "device_frames"
INDEX: dict[str, dict[str, str]] = json.loads((FOLDER / "index.json").read_text())


@pytest.mark.gpu
@pytest.mark.parametrize("name", INDEX)
def test_decodes(name: str, device: torch.device, decoder: DeviceDecoder) -> None:
    frame = (FOLDER / f"{name}.tgf").read_bytes()
    header = unpack_header(frame[:HEADER_BYTES])
    if header.parameter not in (0, load_nvcomp().version[0]):
        pytest.skip(f"it is of nvCOMP {header.parameter}")
    body = torch.frombuffer(bytearray(frame[HEADER_BYTES:]), dtype=torch.uint8)
    out = torch.full((header.raw_bytes,), 0xA5, dtype=torch.uint8, device=device)
    on_device = body.to(device)
    torch.cuda.synchronize()
    decoder.decode(header, on_device, body.numpy(), out).wait()
    assert hashlib.sha256(out.cpu().numpy()).hexdigest() == INDEX[name]["sha256"]
    assert header.word.name == INDEX[name]["word"]


def test_no_file_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.tgf")} == set(INDEX)
