"""The law of a pipeline, max(encode, write) plus one chunk, against what saves took; for overlap.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tidegate
from tidegate.report import busy_s
from tidegate.storage.sink import SinkStore

AUTO = "auto"
BOUND = 1.05

Reports = Mapping[str, Sequence[tidegate.SaveReport]]
"""The measured saves of every codec."""


@dataclass(frozen=True, slots=True)
class Sink:
    """A sink to be measured: its rate (infinite: no limit), and whether it takes device memory."""

    bytes_per_s: float
    from_device: bool

    def store(self, name: str) -> SinkStore:
        """Open one."""
        return SinkStore(bytes_per_s=self.bytes_per_s, from_device=self.from_device, name=name)

    @property
    def is_limited(self) -> bool:
        """Whether it has a rate."""
        return math.isfinite(self.bytes_per_s)

    @property
    def label(self) -> str:
        """For tables and plots."""
        rate = f"{self.bytes_per_s / 1e9:g}" if self.is_limited else "no limit"
        return f"{rate} {'device' if self.from_device else 'host'}"


@dataclass(frozen=True, slots=True)
class Alone:
    """Busy seconds of a codec's stages with no limit on the sink, and the chunks of the save."""

    encode_s: float
    copy_s: float
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one codec did at one sink: medians in seconds, the stages alone, and the figures that the bound is on."""

    sink: str
    is_limited: bool
    codec: str
    raw_bytes: int
    stored_bytes: int
    wall_s: float
    walls_s: list[float]
    encode_alone_s: float
    copy_alone_s: float
    write_alone_s: float
    chunk_s: float
    num_chunks: int
    stall_s: float
    first_encode_s: float
    last_write_s: float
    law: float
    law_with_copy: float
    auto: float | None
    by_codec: dict[str, int]
    notes: tuple[str, ...]

    def cells(self) -> Sequence[object]:
        """For the table."""
        seconds = (self.wall_s, self.encode_alone_s, self.copy_alone_s, self.write_alone_s, self.stall_s)
        milliseconds = [1e3 * value for value in seconds]
        ratio = self.raw_bytes / self.stored_bytes
        laws = (self.law, self.law_with_copy, "" if self.auto is None else self.auto)
        return (self.sink, self.codec, self.raw_bytes / 1e9, ratio, *milliseconds, *laws)


def alone(reports: Reports) -> dict[str, Alone]:
    """Medians of the stages' busy times."""
    found = {}
    for codec, saves in reports.items():
        encode_s = statistics.median(busy_s(r.timeline, "encode") for r in saves)
        copy_s = statistics.median(busy_s(r.timeline, "copy") for r in saves)
        num_chunks = len({span.chunk for span in saves[-1].timeline if span.stage == "write"})
        found[codec] = Alone(encode_s, copy_s, max(1, num_chunks))
    return found


def judge(reports: Reports, sink: Sink, single: Mapping[str, Alone]) -> list[Row]:
    """One row a codec."""
    walls = {codec: statistics.median(r.wall_s for r in saves) for codec, saves in reports.items()}
    best_s = min(wall_s for codec, wall_s in walls.items() if codec != AUTO)
    return [
        _row(
            codec,
            saves,
            sink,
            _mixed(saves[-1], single) if codec == AUTO else single[codec],
            walls[codec] / best_s if codec == AUTO else None,
        )
        for codec, saves in reports.items()
    ]


def _mixed(report: tidegate.SaveReport, single: Mapping[str, Alone]) -> Alone:
    """What the stages of a save with several codecs would take alone: of each codec, its share of the bytes."""
    if not report.by_codec.keys() <= single.keys():
        return single[AUTO]
    shares = {codec: total.raw_bytes / report.raw_bytes for codec, total in report.by_codec.items()}
    encode_s = sum(share * single[codec].encode_s for codec, share in shares.items())
    copy_s = sum(share * single[codec].copy_s for codec, share in shares.items())
    return Alone(encode_s, copy_s, single[AUTO].num_chunks)


def _row(codec: str, saves: Sequence[tidegate.SaveReport], sink: Sink, stages: Alone, auto: float | None) -> Row:
    last = saves[-1]
    wall_s = statistics.median(r.wall_s for r in saves)
    write_s = statistics.median(r.stored_bytes for r in saves) / sink.bytes_per_s
    chunk_s = (stages.encode_s + write_s) / stages.num_chunks
    slowest_s = max(stages.encode_s, write_s)
    return Row(
        sink=sink.label,
        is_limited=sink.is_limited,
        codec=codec,
        raw_bytes=last.raw_bytes,
        stored_bytes=last.stored_bytes,
        wall_s=wall_s,
        walls_s=[r.wall_s for r in saves],
        encode_alone_s=stages.encode_s,
        copy_alone_s=stages.copy_s,
        write_alone_s=write_s,
        chunk_s=chunk_s,
        num_chunks=stages.num_chunks,
        stall_s=statistics.median(r.stall_s for r in saves),
        first_encode_s=min((s.start_s for s in last.timeline if s.stage == "encode"), default=0.0),
        last_write_s=max((s.end_s for s in last.timeline if s.stage == "write"), default=0.0),
        law=wall_s / (slowest_s + chunk_s),
        law_with_copy=wall_s / (max(slowest_s, stages.copy_s) + chunk_s),
        auto=auto,
        by_codec={name: total.raw_bytes for name, total in last.by_codec.items()},
        notes=last.notes,
    )


def worst(rows: Sequence[Row]) -> dict[str, object]:
    """The rows in which the figures are largest, among sinks with a limit."""
    limited = [row for row in rows if row.is_limited]
    if not limited:
        return {}
    law = max(limited, key=lambda row: row.law)
    auto = max((row for row in limited if row.auto is not None), key=lambda row: row.auto or 0.0)
    return {
        "bound": BOUND,
        "law": {"value": law.law, "codec": law.codec, "sink": law.sink},
        "law_with_copy": {"value": max(row.law_with_copy for row in limited)},
        "auto": {"value": auto.auto, "sink": auto.sink, "by_codec": auto.by_codec},
    }
