"""Compile the loops of the rans coder ahead of their use: `python -m tidegate.codec.rans_build`.

Half a minute, once for a machine, a Python and a numba: numba keeps the machine code, and a *marker* beside it says
that all of it is there. rans_ready.py runs this in a process of its own; whoever builds an image can run it too.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from . import rans_compile
from .base import CODEC_VERSIONS, RANS_CODEC, FrameHeader
from .errors import CodecError
from .rans import encode_chunk
from .rans_format import LOG2_SUM
from .rans_start import unpack_layout
from .rans_units import SHAPES
from .words import WordType

_NICENESS = 10
_NUM_VALUES = 1 << 14


def marker_path() -> Path | None:
    """Return the file that is there once the machine code is; None where numba has no folder to keep code in.

    Its name holds all that numba goes by when it decides whether kept code is still good.
    """
    import llvmlite.binding
    import numba

    from .rans_loops import count_loop

    loop: Any = count_loop
    folder: str | None = loop.stats.cache_path
    if folder is None:
        return None
    processor = (llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten())
    sources = [f"{path} {path.stat().st_mtime_ns}" for path in rans_compile.source_paths()]
    goes_by = (rans_compile.digest_of_sources(), sys.implementation.cache_tag, numba.__version__, *processor, *sources)
    seal = xxhash.xxh3_64("\n".join(map(str, goes_by)).encode())
    return Path(folder) / f"rans-{seal.hexdigest()}.compiled"


def run_loops() -> None:
    """Encode and decode a little, so that every compiled function is there: loaded, or compiled and kept."""
    from . import rans_numba

    word = WordType.F32
    raw = np.random.default_rng(0).standard_normal(_NUM_VALUES, dtype=np.float32).view(np.uint8)
    body, out = np.empty_like(raw), np.empty_like(raw)
    body_bytes = encode_chunk(raw, word, body, SHAPES[word], LOG2_SUM, rans_numba)
    if body_bytes is None:
        raise CodecError("normally distributed values did not shrink; the rans coder of this build is broken")
    header = FrameHeader(RANS_CODEC, CODEC_VERSIONS[RANS_CODEC], word, raw.size, body_bytes, 0, 0)
    rans_numba.decode_segments(unpack_layout(header, body), body, out)


def main() -> int:
    """Compile, unless that is done or another process is at it; return the exit status."""
    if not rans_compile.AVAILABLE:
        print("numba is not installed, so there is nothing to compile: pip install 'tidegate[fast]'", file=sys.stderr)
        return 1
    marker = marker_path()
    if marker is None:
        print("numba can write to no folder; set NUMBA_CACHE_DIR to one that it can", file=sys.stderr)
        return 1
    os.nice(_NICENESS)
    with marker.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process compiles them already")
            return 0
        if not marker.exists():
            run_loops()
            marker.touch()
    print(f"compiled; kept in {marker.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
