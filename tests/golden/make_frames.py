"""Write golden frames: `python -m tests.golden.make_frames`. A file that is there is never written again.

Add an entry whenever the writer's bytes change. Never delete one: tests/codec/test_golden.py decodes them for ever.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from tests.codec.rans_chunks import encoded as encoded_body
from tests.codec.rans_chunks import every_kind, header_of, of_scales
from tests.contract.codec_contract import CONTENTS, widened
from tidegate.codec.base import ZSTD_CODEC, FrameHeader, frame_bound_bytes
from tidegate.codec.blocked import BlockKind, pack_table
from tidegate.codec.digest import digest
from tidegate.codec.frame import encode_frame
from tidegate.codec.planes import extract_plane
from tidegate.codec.rans_units import TILE_BYTES
from tidegate.codec.registry import codec_named
from tidegate.codec.words import WordType

FOLDER = Path(__file__).parent / "frames"
INDEX = FOLDER / "index.json"

Octets = NDArray[np.uint8]


def chunks() -> Iterator[tuple[str, str, WordType, Octets]]:
    """Name, codec, word type and bytes of each frame that the CPU's encoder makes."""
    rng = np.random.default_rng(2026)
    yield "raw-empty", "raw", WordType.U8, np.empty(0, dtype=np.uint8)
    yield "raw-one-value", "raw", WordType.F64, CONTENTS["nan-payloads"](WordType.F64, 1, rng)
    yield "raw-escape", "zstd", WordType.F32, CONTENTS["random-bits"](WordType.F32, 500, rng)
    yield "zstd-all-kinds", "zstd", WordType.F32, widened(700, rng)
    yield "zstd-nan", "zstd", WordType.BF16, CONTENTS["nan-payloads"](WordType.BF16, 1000, rng)
    for word in WordType:
        name = f"zstd-{word.name.lower()}"
        yield name, "zstd", word, CONTENTS["zero-runs"](word, 2400 // word.itemsize, rng)
    for word in (WordType.U8, WordType.BF16, WordType.F32, WordType.F64):
        name = f"deflate-{word.name.lower()}"
        yield name, "deflate", word, CONTENTS["zero-runs"](word, 2400 // word.itemsize, rng)
    for word in WordType:
        # Short enough to be small, long enough to shrink; some bytes more than whole tiles.
        octets = CONTENTS["zero-runs"](word, 12_000 // word.itemsize, rng)
        octets[2048:4096] = 0
        yield f"rans-{word.name.lower()}", "rans", word, octets
    yield "rans-kinds-bf16", "rans", WordType.BF16, every_kind(WordType.BF16, rng)
    for word in WordType:
        octets = CONTENTS["zero-runs"](word, 4800 // word.itemsize - 3, rng)
        yield f"planes-{word.name.lower()}", "planes:sign=zstd,exponent=zstd,mantissa=deflate", word, octets
    yield "rans-tables-bf16", "rans", WordType.BF16, of_two_scales()


def of_two_scales() -> Octets:
    """Five groups of segments with two tables, nearly all of whose tiles are zero."""
    scales = np.repeat([0, -9, 0, -9, 0], 8).tolist()
    octets = of_scales(WordType.BF16, scales, np.random.default_rng(9))
    tiles = octets.reshape(-1, TILE_BYTES)
    tiles[np.arange(len(tiles)) % 16 > 0] = 0
    return octets[: -15 * TILE_BYTES - 6]


def encoded(codec: str, word: WordType, raw: Octets) -> bytes:
    """The frame of a chunk, without padding."""
    out = torch.zeros(frame_bound_bytes(raw.size), dtype=torch.uint8)
    header = encode_frame(codec_named(codec), torch.from_numpy(raw.copy()), word, out)
    return out.numpy()[: header.frame_bytes].tobytes()


def of_another_writer(word: WordType, raw: Octets) -> bytes:
    """A frame of several blocks a plane; its Zstandard frames have a checksum and keep their size to themselves."""
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=False, write_checksum=True)
    blocks = []
    for plane in range(word.itemsize):
        octets = extract_plane(raw, word, plane, np.empty(raw.size // word.itemsize, dtype=np.uint8)).tobytes()
        blocks += [compressor.compress(octets[begin : begin + 4096]) for begin in range(0, len(octets), 4096)]
    kinds = np.full(len(blocks), BlockKind.CODED, dtype=np.uint8)
    table = pack_table(4096, word.itemsize, kinds, np.array([len(block) for block in blocks], dtype=np.int64))
    body = table.tobytes() + b"".join(block + bytes(-len(block) % 16) for block in blocks)
    header = FrameHeader(ZSTD_CODEC, 1, word, raw.size, len(body), digest(raw), digest(body))
    return header.pack() + body


def of_another_rans_writer(word: WordType, raw: Octets) -> bytes:
    """A frame of short segments, with 14-bit probabilities."""
    body = encoded_body(raw, word, segment_tiles=16, log2_sum=14)
    assert body is not None
    return header_of(raw, word, body).pack() + body.tobytes()


def write(index: dict[str, dict[str, str | int]], name: str, word: WordType, raw: Octets, frame: bytes) -> None:
    """Write one frame and its entry, unless it is there."""
    path = FOLDER / f"{name}.tgf"
    if path.exists():
        return
    path.write_bytes(frame)
    index[name] = {"word": word.name, "raw_bytes": raw.size, "sha256": hashlib.sha256(raw).hexdigest()}


def main() -> None:
    """Write what is missing."""
    FOLDER.mkdir(exist_ok=True)
    index = json.loads(INDEX.read_text()) if INDEX.exists() else {}
    for name, codec, word, raw in chunks():
        write(index, name, word, raw, encoded(codec, word, raw))
    raw = np.repeat(np.random.default_rng(7).integers(0, 500, 700).astype("<u2"), 13).view(np.uint8)
    write(index, "zstd-small-blocks", WordType.U16, raw, of_another_writer(WordType.U16, raw))
    for word in (WordType.F32, WordType.F64):
        raw = every_kind(word, np.random.default_rng(8), segment_tiles=16)
        write(index, f"rans-kinds-{word.name.lower()}", word, raw, of_another_rans_writer(word, raw))
    INDEX.write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    main()
