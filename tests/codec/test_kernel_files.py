"""The .cu files and how they are called agree, as far as that shows without a GPU."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

from tidegate.codec import (
    kernel_files,
    kernels,
    planes_body,
    planes_plan,
    rans_format,
    rans_groups,
    rans_plan,
    rans_survey,
    rans_units,
)
from tidegate.codec.cuda_driver import CudaDriver, CudaError, Kernel
from tidegate.codec.errors import CodecUnavailableError
from tidegate.codec.kernel_files import APPEND_THREADS, PARAMETERS, THREADS

FOLDER = Path(kernel_files.__file__).resolve().parent
SIGNATURE = re.compile(
    r'extern "C" __global__ void __launch_bounds__\((\w+)(?:, [^)]+)?\)\s+(\w+)\s*\(([^)]*)\)', re.DOTALL
)


def source_of(file: str) -> str:
    """What is compiled, its one macro of kernels written out."""
    source = kernel_files.source_of(file)
    macro = re.search(r"#define (DEFINE_\w+)\((?:WORD, )?(?:SIZE|NUMBER)\)(.*?)\n\n", source, re.DOTALL)
    if macro is None:
        return source
    body = macro[2].replace("\\\n", "\n")
    sizes = re.findall(rf"^{macro[1]}\((?:\w+, )?(\d)\)", source, re.MULTILINE)
    return source.replace(macro[0], "") + "".join(re.sub("##(SIZE|NUMBER)", size, body) for size in sizes)


def letter_of(parameter: str) -> str:
    kind = parameter.strip().removeprefix("const ").rsplit(" ", 1)[0]
    return "Q" if kind.endswith("*") or kind == "u64" else {"u32": "I"}[kind]


@pytest.mark.parametrize("file", PARAMETERS)
def test_every_kernel_is_called_with_its_parameters(file: str) -> None:
    found = {}
    for threads, name, parameters in SIGNATURE.findall(source_of(file)):
        found[name] = "".join(map(letter_of, parameters.split(",")))
        assert threads == (str(APPEND_THREADS) if name == "append_blocks" else "kThreads")
    assert found == PARAMETERS[file]
    assert f"constexpr u32 kThreads = {THREADS};" in source_of(file)


def test_no_file_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.cu")} == {*PARAMETERS, *chain(*kernel_files.COMMON_FILES.values())}


def test_the_grid_is_cut_as_the_kernels_cut() -> None:
    assert f"constexpr u32 kTileBytes = {kernels._TILE_BYTES};" in source_of("copy")
    assert "kTileBytes = 16 * kThreads * kVectorsPerThread" in source_of("blocks")
    assert 16 * THREADS * kernels._UNITS_PER_THREAD == kernels._TILE_BYTES
    for file in ("planes", "residual"):
        assert f"constexpr u32 kUnitsPerThread = {kernels._UNITS_PER_THREAD};" in source_of(file)
    assert planes_plan.VALUES_PER_BLOCK == 8 * THREADS * 2
    assert "constexpr u32 kUnitsPerThread = 2; " in source_of("fields")
    assert f"constexpr u32 kTileBytes = {planes_plan.TILE_BYTES};" in source_of("streams")
    assert f"kStartBytes = {planes_body.START_BYTES};" in source_of("streams")


def test_the_rans_kernels_cut_as_the_format_says() -> None:
    look, tables, encoder, decoder = (source_of(f"rans_{name}") for name in ("look", "tables", "encode", "decode"))
    for source in (look, tables, encoder, decoder):
        assert f"kLog2Sum = {rans_format.LOG2_SUM}," in source
    assert f"kSampledTiles = {rans_survey.SAMPLED_ABOVE_TILES};" in look
    assert f"kMaxGroups = {rans_groups.MAX_GROUPS}, kKeysPerSymbol = {rans_groups.KEYS_PER_SYMBOL};" in tables
    assert rans_groups.MAX_GROUPS % THREADS == 0
    assert f"kTileBytes = {rans_units.TILE_BYTES}," in look
    assert f"kCarriedBytes = {rans_units.CARRIED_BYTES};" in look
    assert rans_plan.SEGMENTS_PER_BLOCK == THREADS // rans_units.NUM_LANES


def test_arguments_are_packed_as_c_does() -> None:
    for layout, num_bytes in (("Q", 8), ("QI", 12), ("QQQIQ", 40), ("QQQQQQIIIIIIQIIIQ", 104)):
        assert Kernel("name", 1, layout, 256, keep=None).num_bytes == num_bytes
    kernel = Kernel("name", 1, "QIQ", 256, keep=None)
    room = kernel.room()
    kernel.pack_into(room, 0, *range(6), 7, 8, 9)
    assert bytes(room)[48:] == b"".join(value.to_bytes(8, "little") for value in (7, 8, 9))


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.codec.cuda_driver._LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(CodecUnavailableError, match="the NVIDIA driver cannot be loaded"):
        CudaDriver()


def test_the_error_says_what_failed() -> None:
    error = CudaError("cuLaunchKernel of copy_pieces", 700, "an illegal memory access was encountered")
    assert "cuLaunchKernel of copy_pieces failed with CUDA error 700 (an illegal memory access" in str(error)
