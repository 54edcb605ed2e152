"""What bounds the kernels of rans? Runs them under Nsight Compute: share of memory bandwidth, of issue slots, stalls.

    python -m tests.gpu.profile_rans [--write NAME]

Codes and decodes 512 MiB that look like weights, of bf16 and fp32, once each. Needs `ncu` and the right to read the
GPU's counters. `--write` also puts what it found into NAME.json in $OUT or bench/results.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.rig import print_table, write_results
from tidegate.codec.device import DeviceDecoder, DeviceEncoder
from tidegate.codec.device_decode import prefix_bytes
from tidegate.codec.words import WordType

from .timing import make_chunks

BIG_BYTES = 512 << 20
KERNELS = "look_at_segments|make_rans_tables|code_segments|gather_streams|decode_segments"
SECTIONS = ("SpeedOfLight", "WarpStateStats", "SchedulerStats", "LaunchStats", "Occupancy", "MemoryWorkloadAnalysis")
COLUMNS = {
    "gpu__time_duration.sum": "us",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram %",
    "l1tex__throughput.avg.pct_of_peak_sustained_active": "L1 and shared %",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
    "launch__registers_per_thread": "registers",
    "launch__shared_mem_per_block": "shared bytes",
}
_STALL = "smsp__average_warps_issue_stalled_"
_PER_ISSUE = "_per_issue_active.ratio"


def work() -> None:
    """What is profiled."""
    device, stream = torch.device("cuda", 0), torch.cuda.Stream()
    for word in (WordType.BF16, WordType.F32):
        raw = torch.cat(make_chunks(word, device))[:BIG_BYTES]
        encoder = DeviceEncoder(["rans"], BIG_BYTES, device, stream)
        decoder = DeviceDecoder(BIG_BYTES, device, stream)
        with torch.cuda.stream(stream):
            ticket = encoder.start(raw, word, "rans")
            header, body = ticket.finish()
            stream.synchronize()
            prefix = body[: prefix_bytes(header)].cpu().numpy()
            out = torch.empty_like(raw)
            decoder.decode(header, body, prefix, out)
        torch.cuda.synchronize()
        assert torch.equal(raw, out)


def profile() -> list[dict[str, object]]:
    """Run `work` under ncu; return what it says of each launch."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        sections = [word for name in SECTIONS for word in ("--section", name)]
        command = ["ncu", "--csv", "--page", "raw", "--log-file", str(log), "-k", f"regex:{KERNELS}", *sections]
        # The clocks stay as they are; nothing but the kernels named is replayed.
        command += ["--clock-control", "none", "--target-processes", "all"]
        subprocess.run([*command, sys.executable, "-m", "tests.gpu.profile_rans", "--work"], check=True)
        lines = [line for line in log.read_text().splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    found = []
    for row in rows[1:]:  # the first has the units
        stalls = {
            name[len(_STALL) : -len(_PER_ISSUE)]: float(value.replace(",", "") or 0)
            for name, value in row.items()
            if name.startswith(_STALL) and name.endswith(_PER_ISSUE)
        }
        most = dict(sorted(stalls.items(), key=lambda item: -item[1])[:4])
        found.append(
            {"kernel": row["Kernel Name"].partition("(")[0]}
            | {title: row.get(name, "") for name, title in COLUMNS.items()}
            | {"warps waiting, by reason": most}
        )
    return found


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", metavar="NAME")
    args = parser.parse_args()
    if args.work:
        work()
        return
    found = profile()
    print_table(("kernel", *COLUMNS.values(), "stalls"), [tuple(one.values()) for one in found])
    if args.write:
        print("written to", write_results(args.write, {"bytes": BIG_BYTES, "kernels": found}))


if __name__ == "__main__":
    main()
