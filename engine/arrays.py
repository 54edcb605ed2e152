"""NumPy dtypes, scalars and arrays: JSON for what they are, a uint8 tensor for an array's bytes.

An array of any dtype without Python objects comes back with its dtype, byte order, shape and C or F order; one that is
neither C nor F contiguous is packed to C order. Arrays that share memory come back apart, writeable, each with its own.
Where two C types of one width have one dtype string (`long` and `long long`) the common one comes back.
"""

from __future__ import annotations

import ctypes
import math
import re

import numpy as np
import torch

from tidegate.codec.words import WordType

from .leaves import bytes_node, fields, read_bytes, read_int, read_str, str_node
from .paths import PathError, shown
from .types import JSON

_PLAIN_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[SUV][0-9]{1,10}|[mM]8(\[[0-9]{0,18}[A-Za-zμ]{1,3}\])?)")
_LONG_DTYPE = re.compile(r"[<>](f1[026]|c(20|24|32))")
_MAX_NDIM = 64
_UNSUPPORTED = "cannot be saved; convert it to a dtype of numbers, text, bytes, times or a struct of those"

_WORDS = {
    "f2": WordType.F16,
    "f4": WordType.F32,
    "c8": WordType.F32,
    "f8": WordType.F64,
    "c16": WordType.F64,
    "i2": WordType.U16,
    "u2": WordType.U16,
    "i4": WordType.U32,
    "u4": WordType.U32,
    "i8": WordType.U64,
    "u8": WordType.U64,
    "M8": WordType.U64,
    "m8": WordType.U64,
}

AnyArray = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def dtype_node(dtype: np.dtype[np.generic]) -> JSON:
    """Describe a dtype.

    Raises:
        PathError: It holds Python objects, or is not one of NumPy's own.
    """
    node = None if dtype.hasobject else _dtype_node(dtype)
    try:
        is_kept = node is not None and read_dtype(node) == dtype
    except (ValueError, TypeError, PathError):
        is_kept = False
    if not is_kept:
        why = "holds Python objects and" if dtype.hasobject else "is not one of NumPy's own kinds and"
        raise PathError(f"NumPy dtype {str(dtype)!r:.80} {why} {_UNSUPPORTED}")
    return node


def _dtype_node(dtype: np.dtype[np.generic]) -> JSON:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ["sub", _dtype_node(base), *shape]
    if dtype.names is not None and dtype.fields is not None:
        if dtype.type is not np.void:
            return None
        members: list[JSON] = []
        for name in dtype.names:
            field, offset, *title = dtype.fields[name]
            members.append([str_node(name), _dtype_node(field), offset, str_node(title[0]) if title else None])
        return ["struct", dtype.itemsize, dtype.isalignedstruct, *members]
    if _LONG_DTYPE.fullmatch(dtype.str):
        return ["long", dtype.str, np.finfo(np.longdouble).nmant]
    return dtype.str


def read_dtype(node: JSON) -> np.dtype[np.generic]:
    """Build the dtype that a node describes.

    Raises:
        ValueError, TypeError: It is malformed.
        PathError: This machine has no such long double.
    """
    if isinstance(node, str):
        if not _PLAIN_DTYPE.fullmatch(node):
            raise ValueError(f"not a dtype: {shown(node)}")
        return np.dtype(node)
    if not isinstance(node, list) or not node:
        raise ValueError(f"not a dtype: {shown(node)}")
    if node[0] == "long":
        return _read_long_dtype(node[1:])
    if node[0] == "sub" and len(node) > 2:
        return np.dtype((read_dtype(node[1]), tuple(map(read_int, node[2:]))))
    if node[0] == "struct" and len(node) > 2 and isinstance(node[2], bool):
        return _read_struct(read_int(node[1]), node[2], node[3:])
    raise ValueError(f"not a dtype: {shown(node)}")


def _read_long_dtype(args: list[JSON]) -> np.dtype[np.generic]:
    text, num_mantissa_bits = fields(args, 2)
    if not isinstance(text, str) or not _LONG_DTYPE.fullmatch(text):
        raise ValueError(f"not a dtype: {shown(text)}")
    here = {dtype.str for kind in "gG" for dtype in (np.dtype(kind), np.dtype(kind).newbyteorder("S"))}
    if text not in here or num_mantissa_bits != np.finfo(np.longdouble).nmant:
        reason = f"this machine's long double is not the saved {text} of {shown(num_mantissa_bits)} mantissa bits"
        raise PathError(f"{reason}; save it as float64 where it was written", is_damage=False)
    return np.dtype(text)


def _read_struct(itemsize: int, is_aligned: bool, members: list[JSON]) -> np.dtype[np.generic]:
    names, formats, offsets, titles = [], [], [], []
    for member in members:
        name, field, offset, title = fields(member if isinstance(member, list) else [], 4)
        names.append(read_str(name))
        formats.append(read_dtype(field))
        offsets.append(read_int(offset))
        titles.append(None if title is None else read_str(title))
    spec: dict[str, object] = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    if any(title is not None for title in titles):
        spec["titles"] = titles
    return np.dtype(spec, align=is_aligned)  # type: ignore[call-overload,no-any-return]


def scalar_node(x: np.generic) -> JSON:
    """Write a NumPy scalar with its dtype and its bits.

    Raises:
        PathError: It is of a class or a dtype that cannot be saved.
    """
    if type(x) is np.str_:
        return ["np.str_", str_node(str.__str__(x))]  # str(x) would strip NULs
    if type(x) is np.bytes_:
        return ["np.bytes_", bytes_node(bytes(x))]
    if type(x) is not x.dtype.type:
        raise PathError(f"a {type(x).__qualname__} cannot be saved; convert it to {x.dtype.type.__name__}")
    return ["npscalar", dtype_node(x.dtype), x.tobytes().hex()]


def read_scalar(args: list[JSON]) -> object:
    """Read what `scalar_node` wrote after its tag. Raises ValueError if it is malformed."""
    node, digits = fields(args, 2)
    dtype = read_dtype(node)
    raw = bytearray.fromhex(read_str(digits))
    if len(raw) != dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for a {dtype}")
    one = np.frombuffer(raw, dtype, count=1) if raw else np.zeros(1, dtype)
    scalar: object = one[0]
    return scalar


def read_text_scalar(args: list[JSON]) -> object:
    """Read a `np.str_`."""
    return np.str_(read_str(*fields(args, 1)))


def read_bytes_scalar(args: list[JSON]) -> object:
    """Read a `np.bytes_`."""
    (node,) = fields(args, 1)
    return np.bytes_(read_bytes(*fields(node if isinstance(node, list) else [], 2)[1:]))


def array_node(x: AnyArray, index: int) -> JSON:
    """Describe an array whose bytes are tensor `index` of the table."""
    order = "F" if x.flags.f_contiguous and not x.flags.c_contiguous else "C"
    return ["ndarray", index, dtype_node(x.dtype), list(x.shape), order]


def array_word(dtype: np.dtype[np.generic]) -> WordType:
    """Return the word type that an array's bytes compress best as."""
    if not dtype.isnative or dtype.names is not None or dtype.subdtype is not None:
        return WordType.U8
    otherwise = WordType.U32 if dtype.kind == "U" else WordType.U8
    return _WORDS.get(f"{dtype.kind}{dtype.itemsize}", otherwise)


def array_bytes(x: AnyArray) -> torch.Tensor:
    """Return an array's bytes in its own order.

    Returns:
        Shape (x.nbytes,), uint8, CPU. It shares the array's memory and keeps the array alive; a copy only where the
        array is neither C nor F contiguous.
    """
    if not (x.flags.c_contiguous or x.flags.f_contiguous):
        x = x.copy("C")
    if x.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    window = (ctypes.c_ubyte * x.nbytes).from_address(x.ctypes.data)
    window.owner = x  # type: ignore[attr-defined]
    # torch keeps the window, which keeps the array; from_numpy would warn of read-only ones.
    return torch.frombuffer(window, dtype=torch.uint8)


def read_array(args: list[JSON], stored: torch.Tensor) -> AnyArray:
    """Build an array from its description, less tag and index, and its bytes.

    Args:
        args: dtype node, shape, order.
        stored: Shape (nbytes,), uint8, any device; copied.

    Raises:
        ValueError, TypeError: The description is malformed, or the bytes are not as many as it says.
    """
    node, shape_node, order = fields(args, 3)
    dtype = read_dtype(node)
    shape = tuple(map(read_int, shape_node if isinstance(shape_node, list) else [shape_node]))
    if order not in ("C", "F") or len(shape) > _MAX_NDIM or any(not 0 <= n < 1 << 62 for n in shape):
        raise ValueError(f"not the shape of an array: {shown(shape_node)}")
    if stored.dtype != torch.uint8 or stored.dim() != 1 or stored.numel() != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{stored.numel()} bytes for {dtype!s:.40} of shape {shape}")
    result = np.empty(shape, dtype, order="F" if order == "F" else "C")
    if result.nbytes:
        flat = result.reshape(-1, order="A").view(np.uint8)
        flat[:] = stored.detach().cpu().numpy()
    return result
