"""How small and how fast does each codec make each component of a training state: rans beside nvCOMP's ANS and ZSTD?

    python -m bench.codecs [--tiny] [--seconds N] [--models dense moe]

A dense and a mixture-of-experts model are trained on the spot. Weights, master weights, m, v and the last gradients are
each laid one tensor after another and cut into chunks of 64 MiB; each codec encodes and decodes them on the GPU, and
every chunk must come back bit for bit. Ratios are raw bytes over whole frames; speeds are raw bytes over GPU time, by
CUDA events:

    encode   one chunk after the other on one stream
    lanes    two encoders on streams of their own, as the engine does
    own      nvCOMP's batched C API alone on the same blocks, at the better of two batch sizes (not of rans)
    ours/own lanes over own                               to be at least 0.95 for ans and zstd

Beside them stand the figures of NVIDIA's blog post on nvCOMP for checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict

import torch

import tidegate
from tidegate.codec.availability import unavailable_reason
from tidegate.codec.errors import CodecError
from tidegate.codec.nvcomp_codecs import NVCOMP_CODECS
from tidegate.codec.words import WordType, word_of
from tidegate.storage.sink import SinkStore

from .codec_tables import (
    BESIDE_NVCOMP,
    CLAIMS,
    HEAD,
    HEAD_WHOLE,
    Cell,
    Own,
    plot,
    plot_whole,
    rows_of,
    summary,
)
from .coding import CodingRig, chunks_of
from .models import Training, num_zeros, train
from .nvcomp_alone import NvcompAlone, exponent_plane
from .rig import TimeBudget, arguments, print_table, repeat_on_gpu, require_cuda, say, write_results

CODECS = ("rans", "ans", "zstd", "gdeflate", "deflate", "lz4", "bitcomp", "cascaded", "raw")
CHUNKS_A_BATCH = (1, 4)
BLOG_BLOCK_BYTES = 64 << 10
BLOG_CHECKPOINT = ("weights", "m", "v", "gradients")
"""What NVIDIA counts as a checkpoint: no master weights."""

SAVED = ("rans", "ans", "zstd", "auto")
DEFAULT_SECONDS = 150.0


def own_of(codec: str, word: WordType, chunks: Sequence[torch.Tensor], num: int, *, plain: bool = False) -> Own:
    """Time nvCOMP alone. `plain`: on untyped bytes in blocks of 64 KiB, as nvCOMP's own interface does by default."""
    raw_bytes = sum(chunk.numel() for chunk in chunks)
    splits = NVCOMP_CODECS[codec].splits_planes and not plain
    regions = [exponent_plane(chunk, word) for chunk in chunks] if splits else list(chunks)
    found = []
    for chunks_a_batch in CHUNKS_A_BATCH[:1] if plain else CHUNKS_A_BATCH:
        batch_bytes = regions[0].numel() * chunks_a_batch
        block_bytes = BLOG_BLOCK_BYTES if plain else None
        kind = WordType.U8 if plain else word
        alone = NvcompAlone(codec, kind, regions, batch_bytes=batch_bytes, block_bytes=block_bytes)
        stream = torch.cuda.Stream()
        compress = repeat_on_gpu(lambda alone=alone, on=stream: alone.compress(on), stream=stream, num=num)  # type: ignore[misc]
        decompress = repeat_on_gpu(lambda alone=alone, on=stream: alone.decompress(on), stream=stream, num=num)  # type: ignore[misc]
        alone.check()
        untouched_bytes = raw_bytes - alone.raw_bytes
        ratio = raw_bytes / (alone.stored_bytes() + untouched_bytes)
        found.append(Own(raw_bytes / compress.median_s, raw_bytes / decompress.median_s, ratio, chunks_a_batch))
    return max(found, key=lambda own: own.compress_bytes_per_s)


def cell_of(
    model: str, role: str, zeros: float, chunks: Sequence[torch.Tensor], word: WordType, codec: str, rig: CodingRig,
    num: int, budget: TimeBudget,
) -> Cell:  # fmt: skip
    """Measure one component with one codec. Raises where a chunk does not come back bit for bit."""
    found = rig.measure(chunks, word, codec, num, budget)
    speeds = [found.raw_bytes / times.median_s for times in (found.encode, found.lanes, found.decode)]
    is_beside = codec in BESIDE_NVCOMP
    return Cell(
        model=model,
        component=role,
        codec=codec,
        zeros=zeros,
        raw_bytes=found.raw_bytes,
        stored_bytes=found.stored_bytes,
        ratio=found.ratio,
        encode_bytes_per_s=speeds[0],
        lanes_bytes_per_s=speeds[1],
        decode_bytes_per_s=speeds[2],
        encode_s=found.encode.json(),
        lanes_s=found.lanes.json(),
        decode_s=found.decode.json(),
        num_raw_frames=found.num_raw_frames,
        refused_blocks=found.refused_blocks,
        own=own_of(codec, word, chunks, len(found.encode.values_s)) if is_beside else None,
        plain=own_of(codec, word, chunks, 1, plain=True) if is_beside else None,
    )


def whole(model: str, training: Training, codecs: Sequence[str], cells: Sequence[Cell]) -> dict[str, object]:
    """Ratios of checkpoints: summed over the components that NVIDIA counts, and of real saves of the whole state."""
    as_counted = {}
    for codec in codecs:
        parts = [c for c in cells if c.codec == codec and c.component in BLOG_CHECKPOINT]
        if len(parts) < len(BLOG_CHECKPOINT):
            continue
        as_counted[codec] = sum(c.raw_bytes for c in parts) / sum(c.stored_bytes for c in parts)
    plain = {}
    for codec in BESIDE_NVCOMP:
        parts = [c for c in cells if c.codec == codec and c.component in BLOG_CHECKPOINT and c.plain is not None]
        stored = sum(c.raw_bytes / c.plain.ratio for c in parts if c.plain is not None)
        if parts:
            plain[codec] = sum(c.raw_bytes for c in parts) / stored
    saved = {}
    for codec in SAVED:
        if codec not in (*codecs, "auto"):
            continue
        with (
            closing(SinkStore(name=f"{model}-{codec}")) as store,
            tidegate.CheckpointEngine(store, codec=codec, snapshot="device") as engine,
        ):
            report = engine.save_async(training.state(), step=0).result()
            saved[codec] = {"ratio": report.ratio, "raw_bytes": report.raw_bytes, "stored_bytes": report.stored_bytes}
    return {"as_nvidia_counts": as_counted, "nvcomp_plain": plain, "saved": saved}


def measure_model(
    model: str, device: torch.device, codecs: Sequence[str], *, tiny: bool, budget: TimeBudget
) -> tuple[dict[str, object], list[Cell]]:
    """Train one model and measure all of its components."""
    training = train(f"{model}-tiny" if tiny else model, device, steps=3 if tiny else 100, keep_gradients=True)
    chunk_bytes, num = (1 << 20, 1) if tiny else (64 << 20, 5)
    roles = training.components()
    moments = roles["m"] + roles["v"]
    moments_zero = num_zeros(moments) / sum(tensor.numel() for tensor in moments)
    say(f"{model}: {moments_zero:.1%} of m and v is exactly zero")
    rig = CodingRig(codecs, chunk_bytes, device)
    cells: list[Cell] = []
    failures: list[str] = []
    num_left = len(roles) * len(codecs)
    for role, tensors in roles.items():
        zeros = num_zeros(tensors) / sum(tensor.numel() for tensor in tensors)
        chunks, word = chunks_of(tensors, chunk_bytes), word_of(tensors[0].dtype)
        for codec in codecs:
            try:
                cells.append(cell_of(model, role, zeros, chunks, word, codec, rig, num, budget.share(num_left)))
                print_table(HEAD, [cells[-1].cells()])
            except (RuntimeError, CodecError) as exc:  # a codec that fails is a finding; the others go on
                failures.append(f"{model}, {role}, {codec}: {type(exc).__name__}: {exc}"[:500])
                say(failures[-1])
            num_left -= 1
    found: dict[str, object] = {
        "parameters": training.num_parameters,
        "loss": training.loss.item(),
        "zeros_of_m_and_v": moments_zero,
        "failures": failures,
    }
    del rig
    torch.cuda.empty_cache()
    return found | whole(model, training, codecs, cells), cells


def main() -> None:
    """Train, measure, write the results after every model."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=("dense", "moe"), default=["dense", "moe"])
    args = parser.parse_args()
    device = require_cuda()
    reasons = {codec: unavailable_reason(codec, device) for codec in CODECS}
    codecs = [codec for codec, reason in reasons.items() if reason is None]
    missing = {codec: reason for codec, reason in reasons.items() if reason is not None}
    say(f"codecs: {', '.join(codecs)}" + "".join(f"; not {codec}: {reason}" for codec, reason in missing.items()))
    budget = TimeBudget(args.seconds or DEFAULT_SECONDS)
    models: dict[str, dict[str, object]] = {}
    cells: list[Cell] = []
    for i, model in enumerate(args.models):
        share = budget.share(len(args.models) - i)
        models[model], found = measure_model(model, device, codecs, tiny=args.tiny, budget=share)
        torch.cuda.empty_cache()
        cells += found
        results: dict[str, object] = {"summary": summary(models, cells), "claims": CLAIMS, "not_available": missing}
        results |= {"models": models, "cells": [asdict(cell) | {"ours_of_own": cell.ours_of_own} for cell in cells]}
        path = write_results("codecs-tiny" if args.tiny else "codecs", results)
        plot(path, model, cells)
    plot_whole(path, models)
    print_table(HEAD, [cell.cells() for cell in cells])
    print_table(HEAD_WHOLE, list(rows_of(models)))
    print(f"{summary(models, cells)}\nwritten to {path}", flush=True)
    if any(one["failures"] for one in models.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
