"""Frames that were written once decode for ever. tests/golden/make_frames.py wrote them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.contract.codec_contract import poisoned
from tidegate.codec.frame import decode_frame
from tidegate.codec.words import WordType

FOLDER = Path(__file__).parent.parent / "golden" / "frames"
INDEX: dict[str, dict[str, str | int]] = json.loads((FOLDER / "index.json").read_text())


@pytest.mark.parametrize("name", INDEX)
def test_decodes(name: str) -> None:
    entry = INDEX[name]
    frame = torch.from_numpy(np.fromfile(FOLDER / f"{name}.tgf", dtype=np.uint8))
    out = poisoned(int(entry["raw_bytes"]))
    header = decode_frame(frame, out)
    assert hashlib.sha256(out.numpy()).hexdigest() == entry["sha256"]
    assert header.word is WordType[str(entry["word"])]
    assert header.frame_bytes == frame.numel()


def test_no_file_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.tgf")} == set(INDEX)
    assert len(INDEX) >= 15
