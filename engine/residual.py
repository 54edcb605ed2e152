"""What is left of a chunk that is known from an earlier one: the bits that differ, or the difference in order.

The kinds are part of the format (storage/FORMAT.md); never change what one of a version says. Little-endian hosts only.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tidegate.codec.words import WordType

Kind = Literal["xor", "difference"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RESIDUAL_VERSION = 1

ONLY_KEEP = 3
"""What a kernel of residual.cu does that keeps a chunk and makes no residual; `device_kind` gives the others."""

_TILE_BYTES = 128 << 10
"""Worked on at a time, so that temporaries stay in a core's cache."""

_UNSIGNED = {1: WordType.U8, 2: WordType.U16, 4: WordType.U32, 8: WordType.U64}
_Octets = NDArray[np.uint8]
_Values = NDArray[np.unsignedinteger]


def residual_word(kind: Kind, word: WordType) -> WordType:
    """Return the word type of what is left of a chunk of words of a type."""
    return word if kind == "xor" else _UNSIGNED[word.itemsize]


def device_kind(kind: Kind, word: WordType) -> int:
    """Return the number that residual.cu has for a kind and a word type."""
    if kind == "xor":
        return 0
    return 2 if _has_sign_bit(word) else 1


def take_residual(kind: Kind, word: WordType, raw: _Octets, base: _Octets, out: _Octets) -> None:
    """Make what is left of a chunk. Blocks; the GIL is free meanwhile.

    Args:
        kind: Which kind.
        word: Word type of the chunk.
        raw: uint8[num_bytes], contiguous, at a multiple of its word.
        base: uint8[num_bytes], likewise: the chunk before.
        out: uint8[num_bytes], likewise; may be `base`.
    """
    if kind == "xor":
        np.bitwise_xor(raw, base, out=out)
        return
    for new, old, there in _tiles(word, raw, base, out):
        step = _ordered(new, word)
        step -= _ordered(old, word)
        # Small steps up and down become small numbers: 0, -1, 1, -2, … are 0, 1, 2, 3, …
        signs = step.view(_signed(step)) >> (8 * word.itemsize - 1)
        step <<= step.dtype.type(1)
        np.bitwise_xor(step, signs.view(step.dtype), out=there)


def undo_residual(kind: Kind, word: WordType, residual: _Octets, out: _Octets) -> None:
    """Make a chunk from what is left of it, in place. Blocks; the GIL is free meanwhile.

    Args:
        kind: Which kind.
        word: Word type of the chunk.
        residual: uint8[num_bytes], contiguous, at a multiple of its word.
        out: uint8[num_bytes], likewise: the chunk before, which becomes the chunk.
    """
    if kind == "xor":
        np.bitwise_xor(out, residual, out=out)
        return
    for left, there in _tiles(word, residual, out):
        one = left.dtype.type(1)
        step = left >> one
        step ^= -(left & one)
        step += _ordered(there, word)
        _put_in_bits(step, word, there)


def _tiles(word: WordType, *arrays: _Octets) -> list[tuple[_Values, ...]]:
    dtype = np.dtype(f"<u{word.itemsize}")
    starts = range(0, arrays[0].size, _TILE_BYTES)
    return [tuple(array[start : start + _TILE_BYTES].view(dtype) for array in arrays) for start in starts]


def _ordered(bits: _Values, word: WordType) -> _Values:
    """Number values in their order: a float's sign is flipped, and of a negative one all bits are. A new array."""
    if not _has_sign_bit(word):
        return bits.copy()
    mask = (bits.view(_signed(bits)) >> (8 * word.itemsize - 1)).view(bits.dtype)
    mask |= bits.dtype.type(1 << (8 * word.itemsize - 1))
    mask ^= bits
    return mask


def _put_in_bits(ordered: _Values, word: WordType, out: _Values) -> None:
    """Undo `_ordered`."""
    if not _has_sign_bit(word):
        np.copyto(out, ordered)
        return
    mask = (~ordered).view(_signed(ordered)) >> (8 * word.itemsize - 1)
    mask = mask.view(ordered.dtype)
    mask |= ordered.dtype.type(1 << (8 * word.itemsize - 1))
    np.bitwise_xor(mask, ordered, out=out)


def _has_sign_bit(word: WordType) -> bool:
    return word.is_float or word is WordType.F8


def _signed(values: _Values) -> np.dtype[np.signedinteger]:
    return np.dtype(f"<i{values.dtype.itemsize}")
