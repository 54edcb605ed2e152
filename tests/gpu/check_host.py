"""What does a chunk cost the host: starting it, finishing it, putting its frame together, alone and beside Python?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from tidegate.codec.device import DeviceEncoder
from tidegate.codec.words import WordType

from .timing import busy_python_thread, make_chunks, report_host, seconds_of

_REPEATS = 200
_WARM_UP = 10
_RAW_BYTES = 8 << 20


def measure_host(codecs: Sequence[str], stream: torch.cuda.Stream, device: torch.device) -> None:
    """Print host time a call, for each codec of one encoder."""
    encoder = DeviceEncoder(codecs, _RAW_BYTES, device, stream)
    print(f"one encoder for {', '.join(codecs)} holds {encoder.device_bytes >> 20} MiB")
    raws = [chunk[:_RAW_BYTES] for chunk in make_chunks(WordType.BF16, device)]
    for codec in codecs:
        for beside, company in (("alone", nullcontext()), ("beside a busy Python thread", busy_python_thread())):
            with company:
                starts, finishes, frames = _host_seconds(encoder, codec, raws, stream)
            report_host(f"start() {codec}, {beside}", starts)
            report_host(f"finish() of a done chunk {codec}, {beside}", finishes)
            report_host(f"frame() {codec}, {beside}", frames)


def _host_seconds(
    encoder: DeviceEncoder, codec: str, raws: list[torch.Tensor], stream: torch.cuda.Stream
) -> tuple[list[float], list[float], list[float]]:
    starts, finishes, frames = [], [], []
    for i in range(_REPEATS + _WARM_UP):
        raw, tickets = raws[i % len(raws)], []
        starts.append(seconds_of(lambda raw=raw, into=tickets: into.append(encoder.start(raw, WordType.BF16, codec))))
        ticket = tickets[0]
        while not ticket.is_done():
            pass
        finishes.append(seconds_of(ticket.finish))
        frames.append(seconds_of(lambda ticket=ticket: ticket.frame(stream)))
        ticket.release()
    stream.synchronize()
    return starts[_WARM_UP:], finishes[_WARM_UP:], frames[_WARM_UP:]
