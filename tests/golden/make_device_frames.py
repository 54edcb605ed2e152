"""Write golden frames of the GPU's codecs: `python -m tests.golden.make_device_frames [FOLDER]`, on an NVIDIA GPU.

As make_frames.py: a file that is there is never written again, and tests/gpu/test_golden_on_gpu.py decodes them for
ever, with the major version of nvCOMP that wrote them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tests.contract.codec_contract import CONTENTS
from tidegate.codec.availability import device_codecs
from tidegate.codec.device import DeviceEncoder
from tidegate.codec.words import WordType

FOLDER = Path(__file__).parent / "device_frames"
CHUNK_BYTES = 1 << 20
WORDS = (WordType.U8, WordType.F8, WordType.F16, WordType.BF16, WordType.F32, WordType.F64)

Octets = NDArray[np.uint8]


def chunks() -> Iterator[tuple[str, WordType, Octets]]:
    """Name, word type and bytes of what every codec encodes."""
    rng = np.random.default_rng(2026)
    for word in WORDS:
        parts = [CONTENTS[name](word, 3000, rng) for name in ("normal-floats", "zero-runs", "nan-payloads")]
        yield word.name.lower(), word, np.concatenate(parts)


def main() -> None:
    """Write what is missing."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / "index.json"
    index = json.loads(path.read_text()) if path.exists() else {}
    device = torch.device("cuda", 0)
    stream = torch.cuda.Stream(device)
    for codec in sorted(device_codecs(device) - {"raw"}):
        encoder = DeviceEncoder([codec], CHUNK_BYTES, device, stream, num_slots=1)
        for name, word, raw in chunks():
            file = folder / f"{codec}-{name}.tgf"
            if file.exists():
                continue
            on_device = torch.from_numpy(raw).to(device)
            torch.cuda.synchronize()
            ticket = encoder.start(on_device, word, codec)
            header, body = ticket.finish()
            file.write_bytes(header.pack() + body.cpu().numpy().tobytes())
            ticket.release()
            index[file.stem] = {"word": word.name, "sha256": hashlib.sha256(raw).hexdigest()}
    path.write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    main()
