"""The trace of a save is one that Perfetto reads, and says what the report says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch

import tidegate


def test_a_trace_holds_every_span_once_and_rows_do_not_overlap(tmp_path: Path) -> None:
    state = {"a": torch.randn(3 << 20), "b": torch.randn(1 << 20, dtype=torch.bfloat16)}
    report = tidegate.save(state, tmp_path / "model.tg")
    path = tmp_path / "save.trace.json"
    report.write_trace(path)
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(report.timeline) > 0
    assert {event["cat"] for event in events} == {span.stage for span in report.timeline}
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    named = {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert named == set(rows)
    assert max(end for spans in rows.values() for _, end in spans) <= report.wall_s * 1e6
