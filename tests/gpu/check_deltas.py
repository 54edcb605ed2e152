"""How fast are planes and residuals on this GPU, beside rans alone? Part `deltas` of check_codecs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tidegate.codec.device import DeviceEncoder, Ticket
from tidegate.codec.device_report import digest_words
from tidegate.codec.kernels import Kernels
from tidegate.codec.planes_plan import VALUES_PER_BLOCK, PlanesRoom
from tidegate.codec.words import WordType
from tidegate.residual import ONLY_KEEP, device_kind, residual_word

from .timing import CHUNK_BYTES, NUM_CHUNKS, hold_up, make_chunks, report, timed

_STEP = 3e-6
"""What values change by: small beside them, as from one save to the next."""

_BY_RANS = "planes:mantissa=rans"


def measure_deltas(kernels: Kernels, stream: torch.cuda.Stream, device: torch.device) -> None:
    """Print the kernels alone, then a chunk's whole way: digest, residual, encoding. Inside `Kernels.on(stream)`."""
    kernels.load_planes()
    kernels.load_residual()
    for word, dtype in ((WordType.BF16, torch.bfloat16), (WordType.F32, torch.float32)):
        bases = make_chunks(word, device)
        raws = [_changed(base, dtype) for base in bases]
        _measure_fields(kernels, stream, word, raws)
        _measure_residuals(kernels, stream, word, raws, bases)
        del bases, raws


def _changed(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = base.view(dtype).float()
    return (values + _STEP * torch.randn_like(values)).to(dtype).view(torch.uint8)


def _measure_fields(kernels: Kernels, stream: torch.cuda.Stream, word: WordType, raws: list[torch.Tensor]) -> None:
    end = PlanesRoom.at(0, "planes", word, CHUNK_BYTES).end
    room = torch.empty(end, dtype=torch.uint8, device=raws[0].device)
    out = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=raws[0].device)
    wrong = torch.zeros(1, dtype=torch.int64, device=raws[0].device)
    places = [part.place for part in PlanesRoom.at(room.data_ptr(), "planes", word, CHUNK_BYTES).streams]
    grid = CHUNK_BYTES // word.itemsize // VALUES_PER_BLOCK

    def split(i: int) -> None:
        kernels.launch(f"split_fields_{int(word)}", grid, raws[i].data_ptr(), CHUNK_BYTES, *places)

    def join(i: int) -> None:
        kernels.launch(f"join_fields_{int(word)}", grid, *places, out.data_ptr(), CHUNK_BYTES, wrong.data_ptr())

    report(f"copy_ (ceiling) {word.name}", CHUNK_BYTES, timed(stream, lambda i: out.copy_(raws[i])))
    report(f"split_fields {word.name}", CHUNK_BYTES, timed(stream, split))
    report(f"join_fields {word.name}", CHUNK_BYTES, timed(stream, join))
    split(0)
    join(0)
    assert bool((out == raws[0]).all())
    assert not int(wrong)


def _measure_residuals(
    kernels: Kernels, stream: torch.cuda.Stream, word: WordType, raws: list[torch.Tensor], bases: list[torch.Tensor]
) -> None:
    device = raws[0].device
    lefts = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(NUM_CHUNKS)]
    words = torch.zeros(2 + digest_words(CHUNK_BYTES), dtype=torch.int64, device=device)
    difference = device_kind("difference", word)

    def take(i: int, number: int, sums: int = 0) -> None:
        addresses = (raws[i].data_ptr(), bases[i].data_ptr(), lefts[i].data_ptr())
        kernels.take_residual(number, word, *addresses, CHUNK_BYTES, sums=sums)

    for name, number in (("xor", device_kind("xor", word)), ("difference", difference)):
        report(f"{name} {word.name}", CHUNK_BYTES, timed(stream, lambda i, number=number: take(i, number)))
    for i in range(NUM_CHUNKS):
        take(i, difference)

    def hashed(i: int) -> None:
        addresses = (raws[i].data_ptr(), bases[i].data_ptr(), lefts[i].data_ptr())
        at = words.data_ptr()
        kernels.take_and_digest(difference, word, *addresses, CHUNK_BYTES, sums=at, words=at + 16)

    report(f"difference, kept, hashed {word.name}", CHUNK_BYTES, timed(stream, hashed))
    report(f"keep {word.name}", CHUNK_BYTES, timed(stream, lambda i: take(i, ONLY_KEEP, words.data_ptr())))
    encoder = DeviceEncoder(["rans", "planes", _BY_RANS], CHUNK_BYTES, device, stream)
    left = residual_word("difference", word)
    for codec in ("rans", "planes"):
        _encodes(f"chunk by {codec} {word.name}", stream, lambda i, codec=codec: encoder.start(raws[i], word, codec))
    _encodes(f"residual by {_BY_RANS} {word.name}", stream, lambda i: encoder.start(lefts[i], left, _BY_RANS))

    def whole(i: int) -> Ticket:
        hashed(i)
        return encoder.start(lefts[i], left, _BY_RANS)

    olds = [base.clone() for base in make_chunks(word, device)]  # `keep` has put the chunks in their place

    def restore(i: int) -> None:
        bases[i].copy_(olds[i])

    _encodes(f"difference, kept, hashed, encoded {word.name}", stream, whole, restore)


def _encodes(
    name: str,
    stream: torch.cuda.Stream,
    start: Callable[[int], Ticket],
    before: Callable[[int], object] = lambda i: None,
) -> None:
    """Print GPU time from the first kernel that `start` queues to the encoder's report."""
    spans, stored = [], 0
    for i in range(NUM_CHUNKS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before(i % NUM_CHUNKS)
        hold_up(stream)
        begin.record(stream)
        ticket = start(i % NUM_CHUNKS)
        end.record(stream)
        header, _ = ticket.finish()
        ticket.release()
        stream.synchronize()
        if i >= 2:
            spans.append(begin.elapsed_time(end) / 1e3)
            stored += header.body_bytes
    report(name, CHUNK_BYTES, spans, ratio=f"{NUM_CHUNKS * CHUNK_BYTES / stored:.4f}")
