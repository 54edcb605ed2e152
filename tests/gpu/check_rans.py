"""How fast is each kernel of rans alone, beside a copy of the same bytes? Part `rans` of check_codecs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tidegate.codec.base import RANS_CODEC, FrameHeader
from tidegate.codec.device_plan import BUFFER_ALIGNMENT_BYTES
from tidegate.codec.device_report import BODY_BYTES_WORD, FAILED_WORD, STATE_WORDS
from tidegate.codec.kernels import Kernels
from tidegate.codec.rans_device import Launches, launch_decoder, pack_for_device
from tidegate.codec.rans_plan import RansBuffers, RansPlan, max_segments, rans_encoder_memory
from tidegate.codec.rans_start import unpack_start
from tidegate.codec.words import WordType

from .timing import CHUNK_BYTES, NUM_CHUNKS, REPEATS, hold_up, make_chunks, report, timed

Steps = tuple[tuple[str, int, tuple[int, ...]], ...]
"""Kernel, grid and arguments of each launch."""

ZERO_SHARE = 0.1
BIG_BYTES = 512 << 20
"""One chunk as long as the caller likes: enough warps to fill the GPU many times."""


def measure_rans(kernels: Kernels, stream: torch.cuda.Stream, device: torch.device) -> None:
    """Print the kernels of chunks that look like weights, of those of one sign, with zeros, and of one large chunk.

    Inside `Kernels.on(stream)`, with the same stream current in PyTorch.
    """
    kernels.load_rans()
    for word in (WordType.BF16, WordType.F32):
        chunks = make_chunks(word, device)
        _measure(kernels, stream, word, chunks, "normal")
        for chunk in chunks:
            chunk.view(torch.int16 if word is WordType.BF16 else torch.int32).bitwise_and_(
                0x7FFF if word is WordType.BF16 else 0x7FFFFFFF
            )
        _measure(kernels, stream, word, chunks, "one sign")
        chunks = make_chunks(word, device)
        for chunk in chunks:
            values = chunk.view(torch.int16 if word is WordType.BF16 else torch.int32)
            values *= torch.rand(values.numel(), device=device) >= ZERO_SHARE
        _measure(kernels, stream, word, chunks, "zeros scattered")
        large = torch.cat(make_chunks(word, device))[:BIG_BYTES]
        _measure(kernels, stream, word, [large], f"{BIG_BYTES >> 20} MiB")
        del large, chunks
    zeros = [torch.zeros(CHUNK_BYTES, dtype=torch.uint8, device=device)] * NUM_CHUNKS
    _measure(kernels, stream, WordType.BF16, zeros, "zeros")


def _measure(kernels: Kernels, stream: torch.cuda.Stream, word: WordType, raws: list[torch.Tensor], label: str) -> None:
    device, num_bytes, count = raws[0].device, raws[0].numel(), len(raws)
    memory = rans_encoder_memory(num_bytes)
    slots = torch.empty(memory.slots, dtype=torch.uint8, device=device)
    temp = torch.empty(memory.temp, dtype=torch.uint8, device=device)
    assert temp.data_ptr() % BUFFER_ALIGNMENT_BYTES == 0
    buffers = RansBuffers.at(temp.data_ptr(), max_segments(num_bytes))
    launches = Launches(RansPlan(word, num_bytes), buffers, slots.data_ptr())
    bodies = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in raws]
    outs = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(min(count, 2))]
    words = torch.zeros(STATE_WORDS, dtype=torch.int64, device=device)
    name = f"rans {word.name} {label}"

    def steps(i: int) -> Steps:
        return launches.steps(raws[i % count].data_ptr(), bodies[i % count].data_ptr(), words.data_ptr())

    def encode(i: int) -> None:
        for kernel, grid, arguments in steps(i):
            kernels.launch(kernel, grid, *arguments)

    report(f"{name}: copy_ (ceiling)", num_bytes, timed(stream, lambda i: outs[i % len(outs)].copy_(raws[i % count])))
    starts = []
    stored = 0
    for i in range(count):
        encode(i)
        body_bytes = int(words[BODY_BYTES_WORD])
        stored += body_bytes
        header = FrameHeader(RANS_CODEC, 1, word, num_bytes, body_bytes, 0, 0)
        told = unpack_start(header, bodies[i][:body_bytes].cpu().numpy())
        starts.append((header, told, torch.from_numpy(pack_for_device(told)).to(device)))
    ratio = f"{num_bytes * count / stored:.4f}" if stored else "none"
    report(f"{name}: encode, all kernels", num_bytes, timed(stream, encode), ratio=ratio)
    for k, (kernel, _, _) in enumerate(steps(0)):
        report(f"{name}: {kernel}", num_bytes, _timed_step(kernels, stream, steps, k))
    failures = int(words[FAILED_WORD])

    def decode(i: int) -> None:
        header, told, found = starts[i % count]
        body, out = bodies[i % count].data_ptr(), outs[i % len(outs)].data_ptr()
        launch_decoder(kernels, header, told, found.data_ptr(), body, out, words.data_ptr())

    spans = timed(stream, decode)
    report(f"{name}: decode", num_bytes, spans, failed=int(words[FAILED_WORD]) - failures, ratio=ratio)
    decode(count - 1)
    assert bool((outs[(count - 1) % len(outs)] == raws[count - 1]).all()), f"{name} came back changed"


def _timed_step(kernels: Kernels, stream: torch.cuda.Stream, steps: Callable[[int], Steps], k: int) -> list[float]:
    """GPU time of kernel k. Those before it run each time: it needs what they leave, untouched."""
    spans = []
    hold_up(stream)
    for i in range(REPEATS + 4):
        for kernel, grid, arguments in steps(i)[:k]:
            kernels.launch(kernel, grid, *arguments)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        kernel, grid, arguments = steps(i)[k]
        start.record(stream)
        kernels.launch(kernel, grid, *arguments)
        end.record(stream)
        spans.append((start, end))
    stream.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in spans[4:]]
