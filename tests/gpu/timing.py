"""How the checks of this folder measure: GPU time by events, over chunks that do not fit the L2 cache together."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tidegate.codec.words import WordType

CHUNK_BYTES = int(os.environ.get("CHUNK_MIB", "64")) << 20
NUM_CHUNKS = 8
REPEATS = 24
REPORTED: list[dict[str, object]] = []
"""Every measurement of this process, for a file."""


def make_chunks(word: WordType, device: torch.device) -> list[torch.Tensor]:
    """NUM_CHUNKS chunks that look like weights: uint8[CHUNK_BYTES]."""
    generator = torch.Generator(device).manual_seed(1)
    dtype = {WordType.BF16: torch.bfloat16, WordType.F32: torch.float32, WordType.F64: torch.float64}[word]
    values = [torch.randn(CHUNK_BYTES // word.itemsize, generator=generator, device=device) for _ in range(NUM_CHUNKS)]
    chunks = [value.mul_(0.02).to(dtype).view(torch.uint8) for value in values]
    torch.cuda.synchronize(device)
    return chunks


def report(name: str, num_bytes: int, seconds: list[float], **more: object) -> None:
    """Print one measurement."""
    middle = statistics.median(seconds)
    REPORTED.append(
        {"name": name, "bytes": num_bytes, "median_s": middle, "min_s": min(seconds), "max_s": max(seconds), **more}
    )
    rest = " ".join(f"{key}={value}" for key, value in more.items())
    print(
        f"{name:48s} {num_bytes / middle / 1e9:8.1f} GB/s  {middle * 1e6:9.1f} us "
        f"(min {min(seconds) * 1e6:.1f}, max {max(seconds) * 1e6:.1f}) {rest}",
        flush=True,
    )


def report_host(name: str, seconds: list[float]) -> None:
    """Print one measurement of host time."""
    ordered = sorted(seconds)
    late = ordered[int(0.99 * (len(ordered) - 1))]
    print(
        f"{name:48s} {statistics.median(ordered) * 1e6:8.1f} us of host time "
        f"(min {ordered[0] * 1e6:.1f}, 99 % {late * 1e6:.1f}, max {ordered[-1] * 1e6:.1f})",
        flush=True,
    )


def timed(stream: torch.cuda.Stream, work: Callable[[int], object], repeats: int = REPEATS) -> list[float]:
    """GPU time of each call. The stream is held up first, so that the host's launching is not measured."""
    spans = []
    hold_up(stream)
    for i in range(repeats + 4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        work(i % NUM_CHUNKS)
        end.record(stream)
        spans.append((start, end))
    stream.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in spans[4:]]


def hold_up(stream: torch.cuda.Stream) -> None:
    """Keep a stream busy for about 10 ms."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # cycles


@contextmanager
def busy_python_thread() -> Iterator[None]:
    """Beside a thread that runs Python all the time, as a training loop may."""
    stop = False

    def spin() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


def seconds_of(work: Callable[[], object]) -> float:
    """Host time of one call."""
    before = time.perf_counter()
    work()
    return time.perf_counter() - before
