"""Which codec is the CPU to use: how small and how fast are rans and zstd on the values of a training state?

    python -m bench.cpu_codecs [--tiny] [--seconds N]

Weights, moments, and what of them is zero: drawn, not trained, so that the share of zeros is what it says. Every chunk
must come back bit for bit. Speeds are raw bytes over the CPU time of one thread that makes or reads a body, so that
other processes count little; rans with its compiled loops, and in NumPy, as where numba is not installed. Beside the
ratios stands that of plain Zstandard, level 1 and 3, on the same byte planes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from tidegate.codec import rans_numpy
from tidegate.codec.base import Codec, FrameHeader
from tidegate.codec.rans import RansCodec
from tidegate.codec.rans_ready import LOOPS
from tidegate.codec.words import WordType
from tidegate.codec.zstd import ZstdCodec

from .plots import beside, grouped_bars
from .rig import TimeBudget, arguments, print_table, say, write_results

Octets = NDArray[np.uint8]
HEAD = ("values", "codec", "ratio", "encode MB/s", "decode MB/s")
LEVELS = (1, 3)


def states_of(num_bytes: int) -> Iterator[tuple[str, WordType, Octets]]:
    """Name, word type and bytes of each kind of values."""
    rng = np.random.default_rng(0)
    num_rows, num_columns = num_bytes // 4096, 1024
    scale = np.exp(rng.normal(-9, 1.0, (num_rows, 1)) + rng.normal(0, 0.7, (1, num_columns)))
    drawn = rng.standard_normal((16, num_rows, num_columns), dtype=np.float32)
    m = (drawn[0] * scale).astype(np.float32)
    v = (np.square(drawn).mean(0) * scale**2).astype(np.float32)
    weights = (drawn.reshape(-1)[: num_bytes // 2] * np.float32(0.02)).astype(np.float32)
    yield "weights, bf16", WordType.BF16, bf16(weights)
    yield "weights, fp32", WordType.F32, octets(weights[: num_bytes // 4])
    yield "m", WordType.F32, octets(m)
    yield "v", WordType.F32, octets(v)
    for share in (0.03, 0.1, 0.3):
        holes = rng.random(m.shape) < share
        yield f"m, {share:.0%} zeros scattered", WordType.F32, octets(np.where(holes, np.float32(0), m))
    holes = rng.random(weights.shape) < 0.1
    yield "weights, bf16, 10% zeros scattered", WordType.BF16, bf16(np.where(holes, np.float32(0), weights))
    rows = rng.random((num_rows, 1)) < 0.12
    yield "m, 12% zero rows", WordType.F32, octets(np.where(rows, np.float32(0), m))
    yield "v, 12% zero rows", WordType.F32, octets(np.where(rows, np.float32(0), v))


def octets(values: NDArray[np.float32]) -> Octets:
    """The bytes of an array."""
    return np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint8)


def bf16(values: NDArray[np.float32]) -> Octets:
    """The bytes of an array's values, rounded to bf16."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy()


def measure(codec: Codec, raw: Octets, word: WordType, num: int, budget: TimeBudget) -> dict[str, float]:
    """Ratio and speeds of a codec on one chunk. Raises where it does not come back bit for bit."""
    body, out = np.empty_like(raw), np.empty_like(raw)
    encode: list[float] = []
    decode: list[float] = []
    while len(encode) <= num and budget.allows(len(encode), (encode[-1] + decode[-1]) if encode else 0.0):
        start_s = time.thread_time()
        body_bytes = codec.encode_body(raw, word, body)
        encode.append(time.thread_time() - start_s)
        if body_bytes is None:
            raise RuntimeError(f"{codec.name} did not shrink a chunk of {word.name}")
        header = FrameHeader(codec.number, codec.version, word, raw.size, body_bytes, 0, 0)
        start_s = time.thread_time()
        codec.decode_body(header, body[:body_bytes], out)
        decode.append(time.thread_time() - start_s)
    if out.tobytes() != raw.tobytes():
        raise RuntimeError(f"{codec.name} did not bring a chunk of {word.name} back bit for bit")
    encode_s, decode_s = (statistics.median(times[1:] or times) for times in (encode, decode))
    return {
        "ratio": raw.size / header.frame_bytes,
        "encode_bytes_per_s": raw.size / encode_s,
        "decode_bytes_per_s": raw.size / decode_s,
        "num": len(encode),
    }


def plain_ratios(raw: Octets, word: WordType) -> dict[str, float]:
    """What Zstandard itself makes of the byte planes, by level; a plane that does not shrink stays as it is."""
    bits = 8 * word.itemsize
    values = raw.view(f"<u{word.itemsize}")
    rotated = values << values.dtype.type(1) | values >> values.dtype.type(bits - 1)
    planes = [(rotated >> rotated.dtype.type(bit)).astype(np.uint8).tobytes() for bit in range(0, bits, 8)]
    ratios = {}
    for level in LEVELS:
        compressor = zstandard.ZstdCompressor(level=level)
        stored = sum(min(len(compressor.compress(plane)), len(plane)) for plane in planes)
        ratios[f"level {level}"] = raw.size / stored
    return ratios


def main() -> None:
    """Measure, write the results."""
    args = arguments(__doc__).parse_args()
    num_bytes, num = (1 << 20, 1) if args.tiny else (32 << 20, 5)
    budget = TimeBudget(args.seconds)
    codecs: dict[str, Codec] = {"rans, NumPy": RansCodec(rans_numpy), "zstd": ZstdCodec()}
    compiled = LOOPS.wait()
    if compiled is None:
        say("numba is not installed: rans in NumPy only")
    else:
        codecs = {"rans": RansCodec(compiled), **codecs}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, word, raw in states_of(num_bytes):
        cells = {label: measure(codec, raw, word, num, budget.share(10)) for label, codec in codecs.items()}
        found[name] = cells | {"plain zstd": plain_ratios(raw, word)}
        print_table(
            HEAD,
            [
                (name, label, f"{c['ratio']:.4f}", c["encode_bytes_per_s"] / 1e6, c["decode_bytes_per_s"] / 1e6)
                for label, c in cells.items()
            ],
        )
    path = write_results("cpu-codecs-tiny" if args.tiny else "cpu-codecs", {"chunk_bytes": num_bytes, "values": found})
    series: dict[str, list[float | None]] = {
        label: [cells[label]["encode_bytes_per_s"] / 1e6 for cells in found.values()] for label in codecs
    }
    title = "How fast does one thread of the CPU encode?"
    grouped_bars(beside(path), title, [name.replace(", ", "\n") for name in found], series, unit="encode (MB/s)")
    print(f"written to {path}", flush=True)


if __name__ == "__main__":
    main()
