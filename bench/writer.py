"""Does our writer reach what the disk takes, and does it leave a Python thread alone?

    python -m bench.writer [--tiny] [--seconds N] [--folder DIR]

In turn, each into a new file, until it is durable: a plain loop of O_DIRECT writes with 1, 4, 8 and 16 threads, each
with the best of three piece sizes; LocalStore with appends of 16 and 64 MiB; with a GPU also what comes from its memory
(by LocalStore after a copy to page-locked memory, by KvikIO alone, and by LocalStore with KvikIO). LocalStore is also
measured in another thread while the main thread counts.

    of plain = bytes a second / those of the best plain loop, round by round    of LocalStore to be at least 0.90
    beside   = bytes a second beside a counting thread / beside an idle one
    loop     = counts a second beside the writer / counts a second alone        to be at least 0.95
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.storage.device_file import load_kvikio
from tidegate.storage.errors import StorageError
from tidegate.storage.local import LocalStore

from .counting import count_for, count_until
from .plots import bars, beside
from .rig import TimeBudget, Times, arguments, print_table, say, write_results
from .write_ways import MIB, Source, Way, all_ways, make_source, plain_loop

BOUND = 0.90
LOOP_BOUND = 0.95
DEFAULT_SECONDS = 90.0
PLAIN_THREADS = (1, 4, 8, 16)
PLAIN_PIECES = (4 * MIB, 8 * MIB, 16 * MIB)
BESIDE = ("LocalStore, 64 MiB appends", "LocalStore, device through host", "LocalStore, device by KvikIO")
HEAD = ("writer", "GB/s", "min", "max", "of plain", "beside", "loop")


@dataclass(slots=True)
class Series:
    """What one way took, round by round."""

    seconds: list[float] = field(default_factory=list)
    seconds_beside: list[float] = field(default_factory=list)
    loop_rates: list[float] = field(default_factory=list)

    def json(self, num_bytes: int, best_plain: list[float]) -> dict[str, object]:
        """For the results file and the table; rates in bytes a second."""
        found: dict[str, object] = {
            **Times(tuple(self.seconds)).json(),
            "bytes_per_s": num_bytes / statistics.median(self.seconds),
            "min_bytes_per_s": num_bytes / max(self.seconds),
            "max_bytes_per_s": num_bytes / min(self.seconds),
            "of_plain": _median_ratio(best_plain, self.seconds),
        }
        if self.loop_rates:
            found["beside"] = _median_ratio(self.seconds, self.seconds_beside)
            found["loop"] = statistics.median(self.loop_rates)
        return found


def _median_ratio(numbers: list[float], by: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numbers, by, strict=True))


def count_beside(way: Way) -> tuple[float, float]:
    """Count while another thread writes; return the seconds that it took, and counts a second."""
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(way()))
    thread.start()
    counted = count_until(lambda: not thread.is_alive())
    thread.join()
    return took[0], counted.per_s


def best_pieces(folder: Path, source: Source, num_bytes: int) -> dict[int, int]:
    """Find the best piece length for each number of threads of the plain loop."""
    found = {}
    for num_threads in PLAIN_THREADS:
        times = {
            piece: min(plain_loop(folder, source, num_bytes, num_threads, piece) for _ in range(2))
            for piece in PLAIN_PIECES
            if piece <= len(source.host)
        }
        found[num_threads] = min(times, key=times.__getitem__)
    return found


def measure(ways: dict[str, Way], num: int, budget: TimeBudget) -> dict[str, Series]:
    """Take turns; the first turn warms up."""
    found = {name: Series() for name in ways}
    round_s = 0.0
    for i in range(1 + num):
        if i > 1 and not budget.allows(i - 1, round_s):
            break
        start_s = time.perf_counter()
        for name, way in ways.items():
            seconds = way()
            if name in BESIDE:
                alone_per_s = count_for(seconds).per_s
                beside_s, beside_per_s = count_beside(way)
            if i > 0:
                found[name].seconds.append(seconds)
            if i > 0 and name in BESIDE:
                found[name].seconds_beside.append(beside_s)
                found[name].loop_rates.append(beside_per_s / alone_per_s)
        round_s = time.perf_counter() - start_s
    return found


def report(series: dict[str, Series], num_bytes: int) -> dict[str, object]:
    """Print the table and return the results. The best plain loop is the one with the best median."""
    plain = {name: found for name, found in series.items() if name.startswith("plain")}
    best = min(plain, key=lambda name: statistics.median(plain[name].seconds))
    results = {name: found.json(num_bytes, plain[best].seconds) for name, found in series.items()}
    rows = []
    for name, found in results.items():
        rates = [float(found[key]) / 1e9 for key in ("bytes_per_s", "min_bytes_per_s", "max_bytes_per_s")]  # type: ignore[arg-type]
        rows.append((name, *rates, found["of_plain"], found.get("beside", ""), found.get("loop", "")))
    print_table(HEAD, rows)
    ours = results[BESIDE[0]]
    summary = {"bound": BOUND, "of_plain": ours["of_plain"], "best_plain": best}
    summary |= {"loop_bound": LOOP_BOUND, "loop": ours["loop"], "beside": ours["beside"]}
    print(summary, flush=True)
    return {"num_bytes": num_bytes, "summary": summary, "ways": results}


def main() -> None:
    """Find the best plain loop, take turns, write the results."""
    args = arguments(__doc__).parse_args()
    num_bytes, num = (16 * MIB, 1) if args.tiny else (1 << 30, 7)
    budget = TimeBudget(args.seconds or DEFAULT_SECONDS)
    source = make_source(num_bytes)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        pieces = best_pieces(folder, source, num_bytes)
        say(f"best pieces of the plain loop, in MiB: { {n: piece // MIB for n, piece in pieces.items()} }")
        with all_ways(folder, source, num_bytes, pieces) as ways:
            results = report(measure(ways, num, budget), num_bytes)
        if source.device is not None:
            store = LocalStore(folder / "auto")
            results["auto"] = store.prepare_for_device(source.device.get_device())
            store.close()
            say(str(results["auto"]))
            try:
                results["kvikio"] = load_kvikio().mode
            except StorageError as exc:
                results["kvikio"] = str(exc)
        path = write_results("writer-tiny" if args.tiny else "writer", results, checkpoints=folder)
    ways_found: dict[str, dict[str, float]] = results["ways"]  # type: ignore[assignment]
    rates = {name: found["bytes_per_s"] / 1e9 for name, found in ways_found.items()}
    bars(beside(path), "What does the disk take?", rates, unit="GB/s, durable")
    print(f"written to {path}", flush=True)


if __name__ == "__main__":
    main()
