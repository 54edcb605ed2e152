"""A save's timeline in the Trace Event Format, for Perfetto and chrome://tracing.

The format is Google's "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU):
complete events ("ph": "X") with times in microseconds, and metadata events that name the rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import SaveReport, Span

_PROCESS = 1


def write_trace(report: SaveReport, path: str | os.PathLike[str]) -> None:
    """Write a report's timeline; see `SaveReport.write_trace`."""
    events: list[dict[str, object]] = [_named("process_name", 0, f"tidegate save of step {report.step}")]
    row = 0
    for stage in dict.fromkeys(span.stage for span in report.timeline):
        for spans in _rows([span for span in report.timeline if span.stage == stage]):
            row += 1
            events.append(_named("thread_name", row, stage))
            events += [_event(span, row) for span in spans]
    about = {"step": report.step, "url": report.url, "ratio": report.ratio, "overlap": report.overlap}
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}))


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Part spans into rows in which none overlaps another, as a row of the viewer wants it."""
    rows: list[list[Span]] = []
    for span in spans:
        row = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _event(span: Span, row: int) -> dict[str, object]:
    start_us, end_us = span.start_s * 1e6, span.end_s * 1e6
    return {
        "name": f"{span.stage} {span.chunk}",
        "cat": span.stage,
        "ph": "X",
        "pid": _PROCESS,
        "tid": row,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": {"chunk": span.chunk},
    }


def _named(what: str, row: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": row, "args": {"name": name}}
