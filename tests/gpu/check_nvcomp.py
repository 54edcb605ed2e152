"""How fast is nvCOMP's own call, and how near to it come one encoder and two of them side by side?"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch

from tidegate.codec.device import DeviceEncoder
from tidegate.codec.device_plan import Batch, lay_out, round_up
from tidegate.codec.device_ticket import Ticket
from tidegate.codec.kernels import kernels_of
from tidegate.codec.nvcomp import NvcompBatch, load_nvcomp
from tidegate.codec.nvcomp_codecs import NvcompCodec, nvcomp_codec
from tidegate.codec.words import WordType

from .timing import CHUNK_BYTES, NUM_CHUNKS, hold_up, make_chunks, report, timed

_NUM_STARTED = (2 << 30) // CHUNK_BYTES
# Chunks of one run; all of them are queued before the first one starts.
_RUNS = 6
_NVCOMP_OF = {"ans": "ans", "zstd": "zstd", "rans": "ans"}
# What an encoder is put beside.


class NvcompAlone:
    """nvCOMP on the blocks that our encoder gives it, and nothing else, for each of `raws`."""

    def __init__(
        self, codec: NvcompCodec, word: WordType, raws: Sequence[torch.Tensor], stream: torch.cuda.Stream
    ) -> None:
        device = stream.device
        self._coder = load_nvcomp().coder(codec, word)
        self._layout = layout = lay_out(codec.name, word, CHUNK_BYTES, codec.block_bytes)
        count = layout.num_candidates
        with torch.cuda.device(device):
            self._slot_bytes = round_up(self._coder.max_output_bytes(codec.block_bytes), 16)
            temp_bytes = self._coder.compress_temp_bytes(count, codec.block_bytes)
        self._slots = torch.zeros(count * self._slot_bytes, dtype=torch.uint8, device=device)
        self._temp = torch.empty(max(temp_bytes, 16), dtype=torch.uint8, device=device)
        self._arrays = torch.zeros(len(raws), 5, count, dtype=torch.int64, device=device)
        self._planes = [torch.empty_like(raw) for raw in raws] if layout.num_planes > 1 else list(raws)
        torch.cuda.synchronize(device)
        with kernels_of(device).on(stream):
            self._batches = [self._lay_out(i, raw, word) for i, raw in enumerate(raws)]
        stream.synchronize()

    def compress(self, i: int, stream: torch.cuda.Stream) -> None:
        """Enqueue chunk i."""
        self._coder.compress(self._batches[i], stream.cuda_stream)

    def sizes(self) -> tuple[int, int]:
        """Bytes that nvCOMP was given, and that it made of them."""
        return int(self._arrays[:, 1].sum()), int(self._arrays[:, 3].sum())

    def _lay_out(self, i: int, raw: torch.Tensor, word: WordType) -> NvcompBatch:
        layout, kernels = self._layout, kernels_of(raw.device)
        inputs, input_bytes, outputs, output_bytes, statuses = (row.data_ptr() for row in self._arrays[i])
        planes = self._planes[i].data_ptr()
        if layout.num_planes > 1:
            kernels.split_planes(raw.data_ptr(), planes, layout, rotate=word.is_float)
        batch = Batch(0, layout.num_candidates, 0, layout.num_blocks)
        places = (inputs, input_bytes, outputs)
        kernels.lay_out_candidates(planes, layout, batch, self._slots.data_ptr(), self._slot_bytes, places)
        return NvcompBatch(
            num_blocks=layout.num_candidates,
            max_block_bytes=layout.max_block_bytes,
            inputs=inputs,
            input_bytes=input_bytes,
            outputs=outputs,
            output_bytes=output_bytes,
            statuses=statuses,
            temp=self._temp.data_ptr(),
            temp_bytes=self._temp.numel(),
        )


def measure_nvcomp(
    codec: NvcompCodec, word: WordType, stream: torch.cuda.Stream, device: torch.device, label: str
) -> None:
    """Print the speed of nvCOMP's own call, chunk by chunk."""
    alone = NvcompAlone(codec, word, make_chunks(word, device), stream)
    spans = timed(stream, lambda i: alone.compress(i, stream))
    given, made = alone.sizes()
    report(
        f"nvCOMP alone {codec.name} {word.name} {label}",
        CHUNK_BYTES,
        spans,
        given=f"{given / NUM_CHUNKS / CHUNK_BYTES:.2f}",
        ratio_of_given=f"{given / max(made, 1):.4f}",
    )


def measure_lanes(codec: str, word: WordType, device: torch.device) -> None:
    """Print the speed over 2 GiB of nvCOMP alone, of one encoder, and of two that get the chunks in turn.

    nvCOMP is given the blocks of one chunk a call, as the encoders give it; beside rans, those of its ANS.
    """
    raws = make_chunks(word, device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    alone = NvcompAlone(nvcomp_codec(_NVCOMP_OF[codec]), word, raws, streams[0])

    def compress() -> list[Ticket]:
        for i in range(_NUM_STARTED):
            alone.compress(i % NUM_CHUNKS, streams[0])
        return []

    ceiling = _walls(streams[:1], compress)
    given, made = alone.sizes()
    num_bytes = _NUM_STARTED * CHUNK_BYTES
    ratio = f"{given / max(made, 1):.4f}"
    name = f"{_NUM_STARTED} chunks, nvCOMP alone {_NVCOMP_OF[codec]} {word.name}"
    report(name, num_bytes, ceiling, ratio_of_given=ratio)
    for num_lanes in (1, 2):
        lanes = streams[:num_lanes]
        num_slots = _NUM_STARTED // num_lanes
        encoders = [DeviceEncoder([codec], CHUNK_BYTES, device, lane, num_slots=num_slots) for lane in lanes]

        def encode(encoders: list[DeviceEncoder] = encoders) -> list[Ticket]:
            return [encoders[i % len(encoders)].start(raws[i % NUM_CHUNKS], word, codec) for i in range(_NUM_STARTED)]

        walls = _walls(lanes, encode)
        of_nvcomp = f"{statistics.median(ceiling) / statistics.median(walls):.3f}"
        name = f"{_NUM_STARTED} chunks, {num_lanes} encoder(s) {codec} {word.name}"
        report(name, num_bytes, walls, of_nvcomp=of_nvcomp)


def _walls(streams: Sequence[torch.cuda.Stream], enqueue: Callable[[], list[Ticket]]) -> list[float]:
    """Seconds from the start of the first work to the end of the last, on all streams; the first run is left out."""
    walls = []
    for _ in range(_RUNS + 1):
        start = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in streams]
        hold_up(streams[0])
        start.record(streams[0])
        for stream in streams[1:]:
            stream.wait_event(start)
        tickets = enqueue()
        for stream, end in zip(streams, ends, strict=True):
            end.record(stream)
        torch.cuda.synchronize(streams[0].device)
        walls.append(max(start.elapsed_time(end) for end in ends) / 1e3)
        for ticket in tickets:
            ticket.finish()
            ticket.release()
    return walls[1:]


def sweep(stream: torch.cuda.Stream, device: torch.device) -> None:
    for word in (WordType.BF16, WordType.F32):
        for name, sizes in (("zstd", (4, 8, 16, 32, 64)), ("gdeflate", (16, 32, 64)), ("bitcomp", (16, 64, 256, 1024))):
            for kib in sizes:
                measure_nvcomp(
                    dataclasses.replace(nvcomp_codec(name), block_bytes=kib << 10), word, stream, device, f"{kib}K"
                )
        for kib in (64, 128, 256, 512, 1024):
            for tuning in ((0, 0, 0), (0, 1, 0), (16, 1, 0), (16, 2, 0), (0, 1, 2)):
                options = ("<iiBBB", (0, "type", *tuning))
                codec = dataclasses.replace(nvcomp_codec("ans"), block_bytes=kib << 10, compress_options=options)
                measure_nvcomp(codec, word, stream, device, f"{kib}K {tuning}")
