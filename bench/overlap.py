"""Does a save last as long as the slower of encoding and writing, and no longer?

    python -m bench.overlap [--tiny] [--rates 2 5 10 25 50] [--codecs raw zstd ans] [--seconds N]

A trained state goes to a sink that takes bytes at a set rate and drops them. The stages are also measured alone:
encoding as the busy time of the encoder in the same save to a sink without a limit, writing as stored bytes over the
rate.

    law  = wall / (max(encoding alone, writing alone) + one chunk's time)     to be at most 1.05
    auto = wall with codec="auto" / the shortest wall of a fixed codec        to be at most 1.05

`auto` mixes codecs as the sink asks for, so its encoding alone is that of each codec by its share of the bytes.
One chunk's time is what the mean chunk takes in both stages alone: none can be written before it is encoded. Where the
sink takes host memory, frames also cross the bus; `with copy` is the law with that stage among the max. So that a save
lasts about half a second at every rate, slow sinks get a part of the state: its first parameters with all that belongs
to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import tidegate

from .law import AUTO, BOUND, Alone, Reports, Row, Sink, alone, judge, worst
from .models import train
from .plots import beside, grouped_bars, timeline
from .rig import TimeBudget, arguments, print_table, require_cuda, say, write_results
from .states import State, num_bytes_of, trained_state

CODECS = ("raw", "zstd", "ans", "rans")
RATES_GB_PER_S = (2.0, 5.0, 10.0, 25.0, 50.0)
TINY_RATES_GB_PER_S = (2.0, 25.0)
FROM_DEVICE_AT_GB_PER_S = 25.0
SECONDS_OF_RAW_WRITE = 0.6
SHOWN_SINK = "10 host"
NUM_WARM_UPS = 2
HEAD: tuple[str, ...] = ("sink GB/s", "codec", "raw GB", "ratio", "wall ms", "encode", "copy", "write", "stall")
HEAD += ("law", "with copy", "auto")


def part_of(state: State, num_bytes: float) -> State:
    """The first parameters of a state, of about `num_bytes`; at least one, at most all."""
    part: State = {}
    room_bytes = num_bytes
    for name, tensors in state.items():
        if room_bytes > 0:
            part[name] = tensors
            room_bytes -= num_bytes_of({name: tensors})
    return part


def reports_of(state: State, sink: Sink, codecs: Sequence[str], num: int) -> Reports:
    """Save with every codec in turn, so that a machine whose speed drifts drifts for all alike. Blocks."""
    found: dict[str, list[tidegate.SaveReport]] = {codec: [] for codec in codecs}
    with ExitStack() as stack:
        engines = {}
        for codec in codecs:
            store = stack.enter_context(closing(sink.store(codec)))
            engine = tidegate.CheckpointEngine(store, codec=codec, snapshot="device", keep_last=1)
            engines[codec] = stack.enter_context(engine)
        for step in range(NUM_WARM_UPS + num):
            for codec, engine in engines.items():
                engine.save_async(state, step=step)
                report = engine.wait()
                if report is not None and step >= NUM_WARM_UPS:
                    found[codec].append(report)
    return found


def measure(
    state: State, rates: Sequence[float], codecs: Sequence[str], num: int
) -> Iterator[tuple[list[Row], Reports]]:
    """Yield the rows of one sink after the other, and its reports."""
    single: dict[tuple[int, bool], dict[str, Alone]] = {}
    sinks = [
        Sink(rate * 1e9, from_device)
        for rate in sorted(rates, reverse=True)  # the hardest first, should the time run out
        for from_device in (False, True)
        if not from_device or rate >= FROM_DEVICE_AT_GB_PER_S
    ]
    for sink in sinks:
        part = part_of(state, sink.bytes_per_s * SECONDS_OF_RAW_WRITE)
        key = (len(part), sink.from_device)
        if key not in single:
            free = Sink(math.inf, sink.from_device)
            reports = reports_of(part, free, codecs, num)
            single[key] = alone(reports)
            yield judge(reports, free, single[key]), reports
        reports = reports_of(part, sink, codecs, num)
        yield judge(reports, sink, single[key]), reports


def plot(path: Path, rows: Sequence[Row], reports: Reports) -> None:
    """The law by sink and codec; the timeline of one save, also as a trace for Perfetto."""
    limited = [row for row in rows if row.is_limited]
    laws = {codec: [row.law for row in limited if row.codec == codec] for codec in reports}
    sinks = list(dict.fromkeys(row.sink for row in limited))
    title, unit = "Does a save last as long as its slower half?", "wall / (max(encode, write) + a chunk)"
    grouped_bars(beside(path), title, sinks, laws, unit=unit, limits={f"{BOUND}": BOUND})
    report = list(reports.values())[-1][-1]
    title = f"{report.url}, {report.raw_bytes / 1e9:.2g} GB"
    timeline(beside(path, "timeline"), title, report.timeline, stall_s=report.stall_s)
    report.write_trace(path.with_suffix(".trace.json"))


def main() -> None:
    """Train, measure, judge, write the results after every sink."""
    parser = arguments(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", help="GB/s of the sinks")
    parser.add_argument("--codecs", nargs="+", default=CODECS, help="the fixed codecs; auto is always measured too")
    args = parser.parse_args()
    rates = args.rates or (TINY_RATES_GB_PER_S if args.tiny else RATES_GB_PER_S)
    training = train("dense-tiny" if args.tiny else "large", require_cuda(), steps=3 if args.tiny else 20)
    budget, codecs = TimeBudget(args.seconds), (*args.codecs, AUTO)
    rows: list[Row] = []
    shown: Reports = {}
    for new, reports in measure(trained_state(training), rates, codecs, 1 if args.tiny else 3):
        say(f"sink: {new[0].sink}")
        print_table(HEAD, [row.cells() for row in new])
        rows += new
        if not shown or new[0].sink == SHOWN_SINK:
            shown = reports
        results = {"parameters": training.num_parameters, "worst": worst(rows), "saves": [asdict(r) for r in rows]}
        path = write_results("overlap-tiny" if args.tiny else "overlap", results)
        if budget.left_s <= 0:
            break
    plot(path, rows, shown)
    print(f"largest: {worst(rows)}\nwritten to {path}", flush=True)


if __name__ == "__main__":
    main()
