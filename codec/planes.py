"""The plane split of FRAME.md: byte k of every value on its own, a float's exponent first. Little-endian hosts only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .words import WordType

_UNSIGNED: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}

# Values joined at a time: the temporaries of a piece stay in the caches, and a piece is long enough that the few
# NumPy calls on it, each of which gives up the GIL and has to get it back, do not add up.
_PIECE_VALUES = 1 << 18


def extract_plane(raw: NDArray[np.uint8], word: WordType, plane: int, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return one plane of some values. Blocks; the GIL is free meanwhile.

    Args:
        raw: uint8[num_values * itemsize], the values.
        word: What one value is.
        plane: 0 for the top byte of every value (of a float: its exponent), itemsize - 1 for the lowest.
        out: uint8[num_values], not overlapping `raw`.

    Returns:
        `out`, filled; or `raw` itself where one value is one byte, so that `out` is left as it was.
    """
    if word.itemsize == 1:
        return raw
    dtype = _UNSIGNED[word.itemsize]
    values = raw.view(dtype)
    # Unsafe casting keeps the low byte, so shift and cut are one pass without a temporary.
    lowest_bit = 8 * (word.itemsize - 1 - plane) - word.is_float
    if lowest_bit >= 0:
        np.right_shift(values, dtype.type(lowest_bit), out=out, casting="unsafe")
        return out
    sign = np.empty_like(out)
    np.right_shift(values, dtype.type(8 * word.itemsize - 1), out=sign, casting="unsafe")
    np.left_shift(values, dtype.type(1), out=out, casting="unsafe")
    np.bitwise_or(out, sign, out=out)
    return out


def join_planes(planes: Sequence[NDArray[np.uint8]], word: WordType, out: NDArray[np.uint8]) -> None:
    """Undo the split. Blocks; the GIL is free meanwhile.

    Args:
        planes: itemsize arrays uint8[num_values], of any stride, plane 0 first.
        word: What one value is.
        out: uint8[num_values * itemsize], contiguous, not overlapping any plane.
    """
    values = out.view(_UNSIGNED[word.itemsize])
    if values.size > 1 and not any(plane.strides[0] for plane in planes):
        # Every plane is one byte repeated, so every value is the same.
        join_planes([plane[:1] for plane in planes], word, out[: word.itemsize])
        values[1:] = values[0]
        return
    for begin in range(0, values.size, _PIECE_VALUES):
        piece = values[begin : begin + _PIECE_VALUES]
        _merge([plane[begin : begin + _PIECE_VALUES] for plane in planes], piece)
        if word.is_float:
            _rotate_right(piece)


def _merge(planes: Sequence[NDArray[np.unsignedinteger]], out: NDArray[np.unsignedinteger]) -> None:
    # In pairs, then pairs of pairs: narrow words are joined with narrow, fast instructions.
    if len(planes) == 1:
        np.copyto(out, planes[0])
        return
    half = len(planes) // 2
    high, low = _merged(planes[:half]), _merged(planes[half:])
    if high.strides[0]:
        np.copyto(out, high)
        _shift_left(out, 8 * half, out)
        np.bitwise_or(out, low, out=out)
        return
    np.copyto(out, low)
    if high[0]:
        np.bitwise_or(out, out.dtype.type(int(high[0]) << 8 * half), out=out)


def _merged(planes: Sequence[NDArray[np.unsignedinteger]]) -> NDArray[np.unsignedinteger]:
    """Return some planes as one array of wider words; of stride 0 if all of them have it."""
    if len(planes) == 1:
        return planes[0]
    size = planes[0].size
    varied = any(plane.strides[0] for plane in planes)
    merged = np.empty(size if varied else 1, dtype=_UNSIGNED[len(planes)])
    _merge([plane[: merged.size] for plane in planes], merged)
    return merged if varied else np.broadcast_to(merged, size)


def _shift_left(values: NDArray[np.unsignedinteger], num_bits: int, out: NDArray[np.unsignedinteger]) -> None:
    dtype = values.dtype
    if dtype.itemsize == 2:
        # NumPy multiplies these twice as fast as it shifts them; wider ones it does not.
        np.multiply(values, dtype.type(1 << num_bits), out=out)
    else:
        np.left_shift(values, dtype.type(num_bits), out=out)


def _rotate_right(values: NDArray[np.unsignedinteger]) -> None:
    dtype = values.dtype
    sign = np.empty_like(values)
    _shift_left(values, 8 * dtype.itemsize - 1, sign)
    np.right_shift(values, dtype.type(1), out=values)
    np.bitwise_or(values, sign, out=values)
