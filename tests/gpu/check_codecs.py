"""How fast are the kernels and the codecs on this GPU, how small do chunks become, and what does a call cost the host?

    python -m tests.gpu.check_codecs [--sweep] [--only kernels,rans,deltas,codecs,nvcomp,lanes,host,copy] [--write NAME]

Prints one line a measurement: medians of GPU time over chunks that do not fit the L2 cache together, GB/s of raw bytes.
`lanes` is nvCOMP's call beside one encoder and two side by side. `--sweep` also tries nvCOMP's settings; `--write` also
puts everything into NAME.json in $OUT or bench/results.
"""

from __future__ import annotations

import argparse

import torch

from bench.rig import write_results
from tidegate.codec.availability import device_codecs, unavailable_reason
from tidegate.codec.device import DEVICE_CODEC_NUMBERS, DeviceDecoder, DeviceEncoder
from tidegate.codec.device_plan import lay_out
from tidegate.codec.device_report import digest_words
from tidegate.codec.kernels import Kernels, kernels_of
from tidegate.codec.nvcomp_codecs import NVCOMP_CODECS, nvcomp_codec
from tidegate.codec.words import WordType

from .check_copies import measure_copies
from .check_deltas import measure_deltas
from .check_host import measure_host
from .check_nvcomp import measure_lanes, measure_nvcomp, sweep
from .check_rans import measure_rans
from .timing import CHUNK_BYTES, NUM_CHUNKS, REPORTED, hold_up, make_chunks, report, seconds_of, timed

PARTS = ("kernels", "rans", "deltas", "codecs", "nvcomp", "lanes", "host", "copy")
WORDS = (WordType.BF16, WordType.F32, WordType.F64)


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
    rows = [(raw.data_ptr(), out.data_ptr()) for raw, out in zip(raws, outs, strict=True)]
    for word in WORDS:
        layout = lay_out("zstd", word, CHUNK_BYTES, 65536)
        stride, planes = layout.plane_stride, layout.num_planes

        def split(i: int, layout=layout) -> None:
            kernels.split_planes(*rows[i], layout, rotate=True)

        def join(i: int, stride=stride, planes=planes) -> None:
            kernels.join_planes(rows[i][1], stride, planes, rows[i][0], CHUNK_BYTES, rotate=True)

        report(f"split_planes {word.name}", CHUNK_BYTES, timed(stream, split))
        report(f"join_planes {word.name}", CHUNK_BYTES, timed(stream, join))
    for codec, size in (("zstd", 65536), ("ans", 1 << 20)):
        layout = lay_out(codec, WordType.U8, CHUNK_BYTES, size)
        for name, sources in (("random", raws), ("zeros", [zeros] * NUM_CHUNKS)):

            def find(i: int, sources=sources, layout=layout) -> None:
                kernels.find_constant_blocks(sources[i].data_ptr(), layout, words.data_ptr())

            report(f"find_constant_blocks {codec} {name}", CHUNK_BYTES, timed(stream, find))


def measure_codec(
    codec: str, word: WordType, stream: torch.cuda.Stream, device: torch.device, block_bytes: int | None, label: str
) -> None:
    raws = make_chunks(word, device)
    sizes = None if block_bytes is None else {codec: block_bytes}
    encoder = DeviceEncoder([codec], CHUNK_BYTES, device, stream, block_bytes=sizes)
    decoder = DeviceDecoder(CHUNK_BYTES, device, stream)
    spans, stored, refused, frames = [], 0, 0, []
    for i in range(NUM_CHUNKS + 2):
        hold_up(stream)
        ticket = encoder.start(raws[i % NUM_CHUNKS], word, codec)
        header, body = ticket.finish()
        if i >= 2:
            spans.append(ticket.encode_s)
            stored += header.body_bytes
            refused += ticket.refused_blocks
            if len(frames) < 4:
                frames.append((header, body.clone(), body.cpu().numpy()))
        ticket.release()
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
    held = f"{encoder.device_bytes >> 20}MiB/{decoder.device_bytes >> 20}MiB"
    report(f"encode {codec} {word.name} {label}", CHUNK_BYTES, spans, ratio=ratio, held=held, refused=refused)
    report(f"decode {codec} {word.name} {label}", CHUNK_BYTES, decodes[2:])


def measure_pipelined(codec: str, stream: torch.cuda.Stream, device: torch.device) -> None:
    raws = make_chunks(WordType.BF16, device)
    encoder = DeviceEncoder([codec], CHUNK_BYTES, device, stream)

    def sixteen() -> None:
        open_ticket = encoder.start(raws[0], WordType.BF16, codec)
        for i in range(1, 16):
            next_ticket = encoder.start(raws[i % NUM_CHUNKS], WordType.BF16, codec)
            open_ticket.finish()
            open_ticket.release()
            open_ticket = next_ticket
        open_ticket.finish()
        open_ticket.release()

    walls = [seconds_of(sixteen) for _ in range(4)]
    report(f"16 chunks, two slots, wall: {codec} BF16", 16 * CHUNK_BYTES, walls[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS)
    parser.add_argument("--write", metavar="NAME")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    stream = torch.cuda.Stream(device)
    print(torch.cuda.get_device_name(device), torch.__version__)
    for codec in DEVICE_CODEC_NUMBERS:
        print(codec, unavailable_reason(codec, device) or "works")
    available = [codec for codec in DEVICE_CODEC_NUMBERS if codec in device_codecs(device)]
    kernels = kernels_of(device)
    if "copy" in arguments.only:
        measure_copies(stream, device)
    if "host" in arguments.only:
        measure_host(available, stream, device)
    if "lanes" in arguments.only and "ans" in available:
        for codec in ("ans", "zstd", "rans"):
            for word in (WordType.BF16, WordType.F32):
                measure_lanes(codec, word, device)
    with torch.cuda.stream(stream), kernels.on(stream):
        if "kernels" in arguments.only:
            measure_kernels(kernels, stream, device)
        if "rans" in arguments.only:
            measure_rans(kernels, stream, device)
        if "deltas" in arguments.only:
            measure_deltas(kernels, stream, device)
        for codec in available:
            for word in WORDS:
                if "nvcomp" in arguments.only and codec in NVCOMP_CODECS:
                    measure_nvcomp(nvcomp_codec(codec), word, stream, device, "default")
                if "codecs" in arguments.only:
                    measure_codec(codec, word, stream, device, None, "default")
            if "codecs" in arguments.only:
                measure_pipelined(codec, stream, device)
        if arguments.sweep:
            sweep(stream, device)
    if arguments.write:
        print("written to", write_results(arguments.write, {"measurements": REPORTED}))


if __name__ == "__main__":
    main()
