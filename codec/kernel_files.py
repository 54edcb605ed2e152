"""The CUDA kernels of the .cu files beside this one: compiled by CuPy, which is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch

from .cuda_driver import Kernel
from .errors import CodecUnavailableError
from .extras import install_hint
from .words import WordType

THREADS = 256
APPEND_THREADS = 1024
# Threads of a thread block, of append_blocks and of all others; as in the .cu files.

PARAMETERS = {
    "digest": {"piece_digests": "QQQQQ"},
    "planes": {f"{verb}_planes_{size}": "QQQQI" for verb in ("split", "join") for size in (2, 4, 8)},
    "blocks": {
        "find_constant_blocks": "QQQIIQ",
        "lay_out_candidates": "QQQIIIIQQQQQ",
        "append_blocks": "QQQQQQIIIIIIQIIIQ",
        "gather_blocks": "QQQQIIQQIIIIQ",
        "place_blocks": "QI",
        "count_failures": "QQQIQ",
    },
    "copy": {"copy_pieces": "QQI", "copy_bytes": "QQQ"},
    "compare": {"compare_pieces": "QIQ"},
    "rans_look": {f"look_at_segments_{size}": "QQIIQQQQQQ" for size in (1, 2, 4, 8)},
    "rans_tables": {"make_rans_tables": "QQIIIQQQQQQ"},
    "rans_encode": {
        **{f"code_segments_{size}": "QQIIQQQQIQQQQIQQQ" for size in (1, 2, 4, 8)},
        "gather_streams": "QQQIIIQQIQQQQQI",
    },
    "rans_decode": {f"decode_segments_{size}": "QQQIIQQQQQ" for size in (1, 2, 4, 8)},
    "fields": {
        **{f"split_fields_{word}": "QQQQQ" for word in WordType},
        **{f"join_fields_{word}": "QQQQQQ" for word in WordType},
    },
    "streams": {
        "append_streams": "QQQQQQQQQQQQQII",
        "check_ends": "QQQQQ",
    },
    "residual": {
        **{f"take_residual_{size}": "QQQQIIQ" for size in (1, 2, 4, 8)},
        **{f"take_and_digest_{size}": "QQQQIQQQ" for size in (1, 2, 4, 8)},
        **{f"undo_residual_{size}": "QQQI" for size in (1, 2, 4, 8)},
    },
}
"""The kernels of each file, with their parameters as `Kernel` wants them."""

LATER_FILES: Mapping[str, tuple[str, ...]] = {
    "rans": ("rans_look", "rans_tables", "rans_encode", "rans_decode"),
    "planes": ("fields", "streams"),
    "residual": ("residual",),
}
"""Compiled only where these are used; rans takes longer than all others together."""

COMMON_FILES = {
    "digest": ("digest_pieces",),
    "residual": ("digest_pieces",),
    "planes": ("transpose",),
    "fields": ("transpose", "fields_units"),
    "rans_look": ("rans_units", "rans_chunk"),
    "rans_tables": ("rans_units", "rans_chunk"),
    "rans_encode": ("rans_units", "rans_chunk", "rans_code"),
    "rans_decode": ("rans_units", "rans_join"),
}
"""What is put in front of a file."""

_OPTIONS = ("--std=c++17",)


def load_kernels(device: torch.device, use: str | None = None) -> dict[str, Kernel]:
    """Compile kernels and load them on a device with an index.

    The first time on a machine takes about a second, those of rans some seconds more; CuPy keeps what it compiled.

    Args:
        device: A CUDA device with an index.
        use: Load those of one use of LATER_FILES; None: all that are in none.

    Raises:
        CodecUnavailableError: If CuPy is not installed, or cannot compile for this device.
    """
    cupy = _import_cupy()
    later = {file for files in LATER_FILES.values() for file in files}
    wanted = set(LATER_FILES[use]) if use is not None else PARAMETERS.keys() - later
    with torch.cuda.device(device), cupy.cuda.Device(device.index):
        return {
            name: kernel
            for file, functions in PARAMETERS.items()
            if file in wanted
            for name, kernel in _load_file(cupy, file, functions, device).items()
        }


def source_of(file: str) -> str:
    """Return what is compiled for one of PARAMETERS."""
    names = [*COMMON_FILES.get(file, ()), file]
    return "".join(Path(__file__).with_name(f"{name}.cu").read_text(encoding="utf-8") for name in names)


def _load_file(cupy: ModuleType, file: str, functions: dict[str, str], device: torch.device) -> dict[str, Kernel]:
    source = source_of(file)
    module = cupy.RawModule(code=source, options=_OPTIONS)
    kernels = {}
    try:
        for name, layout in functions.items():
            function = module.get_function(name).kernel  # for the device that is current
            threads = APPEND_THREADS if name == "append_blocks" else THREADS
            kernels[name] = Kernel(name, function.ptr, layout, threads, keep=function)
    except (cupy.cuda.compiler.CompileException, RuntimeError, ImportError) as exc:
        raise CodecUnavailableError(
            f"the GPU kernels in {file}.cu do not compile for {torch.cuda.get_device_name(device)}: {exc}; "
            f"they need compute capability 7.0 or more and CuPy with NVRTC: {install_hint()}"
        ) from exc
    return kernels


def _import_cupy() -> ModuleType:
    try:
        return importlib.import_module("cupy")
    except ImportError as exc:
        raise CodecUnavailableError(f"encoding and decoding on a GPU needs CuPy ({exc}); {install_hint()}") from exc
