"""The results of codecs.py: rows, tables and plots, beside the figures of NVIDIA's blog post."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .plots import beside, grouped_bars

BESIDE_NVCOMP = ("ans", "zstd")
BOUND = 0.95

CLAIMS: dict[str, object] = {
    "source": "https://developer.nvidia.com/blog/cut-checkpoint-costs-with-about-30-lines-of-python-and-nvidia-nvcomp/",
    "ratio": {
        "dense": {"ans": 1.25, "zstd": 1.27, "lz4": 1.00, "bitcomp": 1.00},
        "moe": {"ans": 1.39, "zstd": 1.40},
    },
    "zeros": {"moe": [0.12, 0.14]},
    "compress_bytes_per_s": {"ans": 181e9, "zstd": 16e9},
}
HEAD = ("model", "component", "codec", "zeros", "ratio", "encode GB/s", "lanes", "own", "ours/own", "decode", "own")
HEAD_WHOLE = ("model", "codec", "ratio, as NVIDIA counts", "NVIDIA's figure", "ratio of the whole state saved")


@dataclass(frozen=True, slots=True)
class Own:
    """What nvCOMP alone did on the same blocks: the better of the batch sizes."""

    compress_bytes_per_s: float
    decompress_bytes_per_s: float
    ratio: float
    chunks_a_batch: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One component with one codec."""

    model: str
    component: str
    codec: str
    zeros: float
    raw_bytes: int
    stored_bytes: int
    ratio: float
    encode_bytes_per_s: float
    lanes_bytes_per_s: float
    decode_bytes_per_s: float
    encode_s: dict[str, float | int]
    lanes_s: dict[str, float | int]
    decode_s: dict[str, float | int]
    num_raw_frames: int
    refused_blocks: int
    own: Own | None
    plain: Own | None

    @property
    def ours_of_own(self) -> float | None:
        """Speed with lanes over that of nvCOMP alone."""
        return None if self.own is None else self.lanes_bytes_per_s / self.own.compress_bytes_per_s

    def cells(self) -> tuple[object, ...]:
        """For the table."""
        own = self.own
        speeds = (self.encode_bytes_per_s / 1e9, self.lanes_bytes_per_s / 1e9)
        beside_own = ("", "") if own is None else (own.compress_bytes_per_s / 1e9, self.ours_of_own)
        decodes = (self.decode_bytes_per_s / 1e9, "" if own is None else own.decompress_bytes_per_s / 1e9)
        names = (self.model, self.component, self.codec)
        return (*names, self.zeros, f"{self.ratio:.4f}", *speeds, *beside_own, *decodes)


def summary(models: Mapping[str, Mapping[str, object]], cells: Sequence[Cell]) -> dict[str, object]:
    """What the bounds are on."""
    found: dict[str, object] = {"bound": BOUND, "exact": not any(one["failures"] for one in models.values())}
    for codec in BESIDE_NVCOMP:
        ratios = [cell.ours_of_own for cell in cells if cell.codec == codec and cell.ours_of_own is not None]
        if ratios:
            found[codec] = {"worst_ours_of_own": min(ratios), "best_ours_of_own": max(ratios)}
    return found


def plot(path: Path, model: str, cells: Sequence[Cell]) -> None:
    """Ratios and speeds of one model."""
    mine = [cell for cell in cells if cell.model == model]
    roles = list(dict.fromkeys(cell.component for cell in mine))
    codecs = list(dict.fromkeys(cell.codec for cell in mine))
    by_key = {(cell.codec, cell.component): cell for cell in mine}

    def series(name: str) -> dict[str, list[float | None]]:
        scale = 1.0 if name == "ratio" else 1e9
        return {c: [getattr(by_key[c, r], name) / scale if (c, r) in by_key else None for r in roles] for c in codecs}

    title = f"How small does each codec make each component? ({model})"
    grouped_bars(beside(path, f"{model}-ratio"), title, roles, series("ratio"), unit="raw / stored bytes")
    for name, verb in (("lanes_bytes_per_s", "encode"), ("decode_bytes_per_s", "decode")):
        title = f"How fast does each codec {verb} each component? ({model})"
        grouped_bars(beside(path, f"{model}-{verb}"), title, roles, series(name), unit=f"{verb} (GB/s)", log=True)


def plot_whole(path: Path, models: dict[str, dict[str, object]]) -> None:
    """Whole checkpoints beside NVIDIA's figures."""
    claims: dict[str, dict[str, float]] = CLAIMS["ratio"]  # type: ignore[assignment]
    groups = [(model, codec) for model in models for codec in ("rans", "ans", "zstd", "lz4", "bitcomp")]
    counted: dict[str, dict[str, float]] = {m: found["as_nvidia_counts"] for m, found in models.items()}  # type: ignore[misc]
    series = {
        "measured here": [counted[model].get(codec) for model, codec in groups],
        "NVIDIA's figure": [claims.get(model, {}).get(codec) for model, codec in groups],
    }
    title = "How small does a checkpoint become? (weights, m, v, gradients)"
    names = [f"{model}\n{codec}" for model, codec in groups]
    grouped_bars(beside(path, "whole"), title, names, series, unit="raw / stored bytes")


def rows_of(models: dict[str, dict[str, object]]) -> Iterator[tuple[object, ...]]:
    """The rows of the table of whole checkpoints."""
    claims: dict[str, dict[str, float]] = CLAIMS["ratio"]  # type: ignore[assignment]
    for model, found in models.items():
        counted: dict[str, float] = found["as_nvidia_counts"]  # type: ignore[assignment]
        saved: dict[str, dict[str, float]] = found["saved"]  # type: ignore[assignment]
        for codec in dict.fromkeys((*counted, *saved)):
            claim = claims.get(model, {}).get(codec, "")
            ratio = f"{counted[codec]:.4f}" if codec in counted else ""
            yield (model, codec, ratio, claim, f"{saved[codec]['ratio']:.4f}" if codec in saved else "")
