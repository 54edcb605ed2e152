"""How fast does one launch copy a state, beside a plain copy of as many bytes and PyTorch's own way?"""

from __future__ import annotations

import numpy as np
import torch

from tidegate.codec.kernels import kernels_of

from .timing import report, report_host, seconds_of, timed

_PIECE_BYTES = 1 << 20
_REPEATS = 8


def measure_copies(stream: torch.cuda.Stream, device: torch.device) -> None:
    """Print GB/s one way for 2,000 tensors of 8 GB, for many small ones, and for misaligned ones."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(0, 1.2, 2000)
    sizes = (sizes / sizes.sum() * 8e9).astype(np.int64) // 512 * 512 + 512
    _measure("2,000 tensors, 8 GB", sizes, 512, stream, device)
    _measure("100,000 tensors of 4 KiB", np.full(100_000, 4096), 512, stream, device)
    _measure("100,000 tensors of 100 bytes", np.full(100_000, 100), 512, stream, device)
    for apart in (8, 4, 2, 1):
        _measure(f"1 GB, source {apart} bytes off", np.full(1000, 1 << 20), 512, stream, device, apart=apart)


def _measure(
    name: str,
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]],
    alignment: int,
    stream: torch.cuda.Stream,
    device: torch.device,
    apart: int = 0,
) -> None:
    rooms = -(-sizes // alignment) * alignment + (alignment if apart else 0)
    starts = np.concatenate([[0], np.cumsum(rooms)[:-1]])
    source = torch.zeros(int(rooms.sum()) + alignment, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rows = [
        (source.data_ptr() + apart + start + skip, start + skip, min(_PIECE_BYTES, size - skip))
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        for skip in range(0, size, _PIECE_BYTES)
    ]
    items = torch.tensor(rows, dtype=torch.int64).to(device)
    total, kernels, base = int(sizes.sum()), kernels_of(device), target.data_ptr()

    def pieces(_: int) -> None:
        kernels.copy_pieces(items.data_ptr(), len(rows), _PIECE_BYTES, stream, target_base=base)

    views = [
        [whole[begin : begin + size] for begin, size in zip((starts + skip).tolist(), sizes.tolist(), strict=True)]
        for whole, skip in ((source, apart), (target, 0))
    ]
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        report(f"copy_pieces, {name}", total, timed(stream, pieces, _REPEATS), pieces=len(rows))
        report(f"plain copy, {name}", total, timed(stream, lambda _: target[:total].copy_(source[:total]), _REPEATS))
        report(
            f"_foreach_copy_, {name}",
            total,
            timed(stream, lambda _: torch._foreach_copy_(views[1], views[0]), _REPEATS),
        )
        report_host(f"copy_pieces, {name}", [seconds_of(lambda: pieces(0)) for _ in range(20)])
    stream.synchronize()
