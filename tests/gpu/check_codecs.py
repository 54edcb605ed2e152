"""How fast are the kernels and the codecs on this GPU, and how small do chunks become?

Run it as `python -m tests.gpu.check_codecs [--sweep]`. Prints one line a measurement: medians of GPU time over chunks
that do not fit the L2 cache together. `--sweep` also tries nvCOMP's settings.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from tidegate.codec import device_blocks
from tidegate.codec.availability import unavailable_reason
from tidegate.codec.device import DeviceDecoder, DeviceEncoder
from tidegate.codec.device_plan import lay_out
from tidegate.codec.device_report import digest_words
from tidegate.codec.kernels import Kernels, kernels_of
from tidegate.codec.nvcomp import AnsTuning, load_nvcomp
from tidegate.codec.words import WordType

CHUNK_BYTES = 64 << 20
NUM_CHUNKS = 8
REPEATS = 24


def make_chunks(word: WordType, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    dtype = {WordType.BF16: torch.bfloat16, WordType.F32: torch.float32, WordType.F64: torch.float64}[word]
    values = [torch.randn(CHUNK_BYTES // word.itemsize, generator=generator, device=device) for _ in range(NUM_CHUNKS)]
    return [value.mul_(0.02).to(dtype).view(torch.uint8) for value in values]


def report(name: str, num_bytes: int, seconds: list[float], **more: object) -> None:
    middle = statistics.median(seconds)
    rest = " ".join(f"{key}={value}" for key, value in more.items())
    print(
        f"{name:44s} {num_bytes / middle / 1e9:8.1f} GB/s  {middle * 1e6:9.1f} us "
        f"(min {min(seconds) * 1e6:.1f}, max {max(seconds) * 1e6:.1f}) {rest}",
        flush=True,
    )


def timed(stream: torch.cuda.Stream, work: Callable[[int], object]) -> list[float]:
    """GPU time of each call. The stream is held up first, so that the host's launching is not measured."""
    spans = []
    hold_up(stream)
    for i in range(REPEATS + 4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        work(i % NUM_CHUNKS)
        end.record(stream)
        spans.append((start, end))
    stream.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in spans[4:]]


def hold_up(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms


def measure_kernels(kernels: Kernels, stream: torch.cuda.Stream, device: torch.device) -> None:
    raws = make_chunks(WordType.BF16, device)
    zeros = torch.zeros(CHUNK_BYTES, dtype=torch.uint8, device=device)
    outs = [torch.empty(CHUNK_BYTES + 4096, dtype=torch.uint8, device=device) for _ in range(NUM_CHUNKS)]
    words = torch.zeros(digest_words(CHUNK_BYTES), dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    report("copy_ (ceiling)", CHUNK_BYTES, timed(stream, lambda i: outs[i][:CHUNK_BYTES].copy_(raws[i])))
    report(
        "piece_digests",
        CHUNK_BYTES,
        timed(stream, lambda i: kernels.piece_digests(raws[i].data_ptr(), CHUNK_BYTES, words.data_ptr())),
    )
    for word in (WordType.BF16, WordType.F32, WordType.F64):
        layout = lay_out("zstd", word, CHUNK_BYTES, 65536)
        rows = [(raw.data_ptr(), out.data_ptr()) for raw, out in zip(raws, outs, strict=True)]
        report(
            f"split_planes {word.name}",
            CHUNK_BYTES,
            timed(stream, lambda i, rows=rows, layout=layout: kernels.split_planes(*rows[i], layout, rotate=True)),
        )
        stride, planes = layout.plane_stride, layout.num_planes
        report(
            f"join_planes {word.name}",
            CHUNK_BYTES,
            timed(
                stream,
                lambda i, rows=rows, stride=stride, planes=planes: kernels.join_planes(
                    rows[i][1], stride, planes, rows[i][0], CHUNK_BYTES, rotate=True
                ),
            ),
        )
    for codec, size in (("zstd", 65536), ("ans", 1 << 20)):
        layout = lay_out(codec, WordType.U8, CHUNK_BYTES, size)
        for name, source in (("random", raws), ("zeros", [zeros] * NUM_CHUNKS)):
            report(
                f"find_constant_blocks {codec} {name}",
                CHUNK_BYTES,
                timed(
                    stream,
                    lambda i, source=source, layout=layout: kernels.find_constant_blocks(
                        source[i].data_ptr(), layout, words.data_ptr()
                    ),
                ),
            )


def measure_codec(
    codec: str, word: WordType, stream: torch.cuda.Stream, device: torch.device, block_bytes: int | None, label: str
) -> None:
    raws = make_chunks(word, device)
    torch.cuda.synchronize()
    encoder = DeviceEncoder(codec, CHUNK_BYTES, device, stream, block_bytes=block_bytes)
    decoder = DeviceDecoder(CHUNK_BYTES, device, stream)
    spans, starts, stored, frames = [], [], 0, []
    for i in range(NUM_CHUNKS + 2):
        hold_up(stream)
        before = time.perf_counter()
        ticket = encoder.start(raws[i % NUM_CHUNKS], word)
        starts.append(time.perf_counter() - before)
        header, body = ticket.finish()
        if i >= 2:
            spans.append(ticket.encode_s)
            stored += header.body_bytes
            if len(frames) < 4:
                frames.append((header, body.clone(), body.cpu().numpy()))
        ticket.release()
    refused = ticket.refused_blocks
    torch.cuda.synchronize()
    out = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)
    decodes = []
    for i in range(10):
        header, body, prefix = frames[i % len(frames)]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        hold_up(stream)
        start.record(stream)
        check = decoder.decode(header, body, prefix, out, body_verified=True)
        end.record(stream)
        check.wait()
        decodes.append(start.elapsed_time(end) / 1e3)
    ratio = f"{NUM_CHUNKS * CHUNK_BYTES / stored:.4f}"
    host = f"{statistics.median(starts) * 1e6:.0f}us"
    held = f"{encoder.device_bytes >> 20}MiB/{decoder.device_bytes >> 20}MiB"
    report(
        f"encode {codec} {word.name} {label}", CHUNK_BYTES, spans, ratio=ratio, host=host, held=held, refused=refused
    )
    report(f"decode {codec} {word.name} {label}", CHUNK_BYTES, decodes[2:])


def measure_pipelined(codec: str, stream: torch.cuda.Stream, device: torch.device) -> None:
    raws = make_chunks(WordType.BF16, device)
    torch.cuda.synchronize()
    encoder = DeviceEncoder(codec, CHUNK_BYTES, device, stream)
    walls = []
    for _ in range(4):
        before = time.perf_counter()
        open_ticket = encoder.start(raws[0], WordType.BF16)
        for i in range(1, 16):
            next_ticket = encoder.start(raws[i % NUM_CHUNKS], WordType.BF16)
            open_ticket.finish()
            open_ticket.release()
            open_ticket = next_ticket
        open_ticket.finish()
        open_ticket.release()
        walls.append(time.perf_counter() - before)
    report(f"16 chunks, two slots, wall: {codec} BF16", 16 * CHUNK_BYTES, walls[1:])


def sweep(stream: torch.cuda.Stream, device: torch.device) -> None:
    torch.cuda.mem_get_info(device)
    zstd = load_nvcomp().zstd()
    for count in (1, 512, 2048, 8192, 16384):
        sizes = [(kib, zstd.compress_temp_bytes(count, kib << 10) >> 20) for kib in (4, 8, 16, 32, 64)]
        print(f"zstd scratch, {count} blocks: (KiB a block, MiB) {sizes}")
    for word in (WordType.BF16, WordType.F32):
        for kib in (4, 8, 16, 32, 64):
            measure_codec("zstd", word, stream, device, kib << 10, f"{kib}K")
    tunings = [AnsTuning(), AnsTuning(0, 1, 0), AnsTuning(16, 1, 0), AnsTuning(16, 2, 0), AnsTuning(0, 1, 2)]
    for word in (WordType.BF16, WordType.F32):
        for kib in (64, 128, 256, 512, 1024):
            for tuning in tunings:
                device_blocks.ANS_TUNING = tuning
                counts = f"{tuning.max_sub_chunk_count},{tuning.states_per_lane},{tuning.histogram_reduction_log2}"
                measure_codec("ans", word, stream, device, kib << 10, f"{kib}K {counts}")
    device_blocks.ANS_TUNING = AnsTuning()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    stream = torch.cuda.Stream(device)
    print(torch.cuda.get_device_name(device), torch.__version__)
    for codec in ("raw", "zstd", "ans"):
        print(codec, unavailable_reason(codec, device))
    kernels = kernels_of(device)
    with torch.cuda.stream(stream), kernels.on(stream):
        measure_kernels(kernels, stream, device)
    for codec in ("raw", "zstd", "ans"):
        if unavailable_reason(codec, device) is None:
            for word in (WordType.BF16, WordType.F32, WordType.F64):
                measure_codec(codec, word, stream, device, None, "default")
            measure_pipelined(codec, stream, device)
    if arguments.sweep:
        sweep(stream, device)


if __name__ == "__main__":
    main()
