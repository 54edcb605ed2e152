"""The word type of a chunk: how many bytes one value has, and where its exponent lies."""

from __future__ import annotations

from enum import IntEnum

import torch

from .errors import UnsupportedDtypeError


class WordType(IntEnum):
    """What one value of a chunk is. The number is stored in every frame header; never renumber.

    Complex values are two floats in a row, so complex64 is F32. Every 8-bit float, bool and packed 4-bit float is
    one byte of its own kind.
    """

    U8 = 0
    U16 = 1
    U32 = 2
    U64 = 3
    F8 = 4
    F16 = 5
    BF16 = 6
    F32 = 7
    F64 = 8

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        """Whether the value has a sign bit, then an exponent, at its top."""
        return self >= WordType.F16


_ITEMSIZE = {
    WordType.U8: 1,
    WordType.U16: 2,
    WordType.U32: 4,
    WordType.U64: 8,
    WordType.F8: 1,
    WordType.F16: 2,
    WordType.BF16: 2,
    WordType.F32: 4,
    WordType.F64: 8,
}

_BY_NAME = {
    "bool": WordType.U8,
    "uint8": WordType.U8,
    "int8": WordType.U8,
    "uint16": WordType.U16,
    "int16": WordType.U16,
    "uint32": WordType.U32,
    "int32": WordType.U32,
    "uint64": WordType.U64,
    "int64": WordType.U64,
    "bfloat16": WordType.BF16,
    "float16": WordType.F16,
    "float32": WordType.F32,
    "float64": WordType.F64,
    "complex32": WordType.F16,
    "complex64": WordType.F32,
    "complex128": WordType.F64,
    "float8_e4m3fn": WordType.F8,
    "float8_e4m3fnuz": WordType.F8,
    "float8_e5m2": WordType.F8,
    "float8_e5m2fnuz": WordType.F8,
    "float8_e8m0fnu": WordType.F8,
    "float4_e2m1fn_x2": WordType.U8,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype without its "torch." prefix, as the manifest stores it."""
    return str(dtype).removeprefix("torch.")


WORD_OF_DTYPE: dict[torch.dtype, WordType] = {
    dtype: word for name, word in _BY_NAME.items() if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
DTYPE_OF_NAME: dict[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in WORD_OF_DTYPE}


def word_of(dtype: torch.dtype) -> WordType:
    """Return the word type of a dtype.

    Raises:
        UnsupportedDtypeError: For quantised dtypes, sub-byte integers and anything else that has no plain bytes.
    """
    try:
        return WORD_OF_DTYPE[dtype]
    except KeyError:
        raise UnsupportedDtypeError(
            f"dtype {dtype} cannot be stored; convert the tensor to one of {', '.join(sorted(DTYPE_OF_NAME))}"
        ) from None
