"""Plain Python and torch values as JSON, and back, bit for bit.

None, bool, str, int below 2**63 and finite floats are themselves in JSON; everything else is an array that opens with a
tag: `["int", "0x…"]`, `["float", "7ff8000000000001"]`, `["bytes", base64]`, `["date", "2026-01-31"]`.
`LEAVES` maps an exact type to its writer, `LEAF_TAGS` a tag to its reader; neither imports or runs what a file names.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import math
import pathlib
import re
import struct
import uuid
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeVar

import torch

from .paths import PathError, shown
from .types import JSON

_T = TypeVar("_T")
_Writer = Callable[[Any], JSON]
_Reader = Callable[[list[JSON]], object]

LEAVES: dict[type, _Writer] = {}
LEAF_TAGS: dict[str, _Reader] = {}

SURROGATE = re.compile("[\ud800-\udfff]")
_LARGE = 1 << 63
_ZONE_KEY = re.compile(r"[A-Za-z0-9_+\-]+(/[A-Za-z0-9_+\-]+)*")
_DEVICE = re.compile(r"[a-z][a-z0-9]{0,31}(:[0-9]{1,4})?")
_HEX_DOUBLE = re.compile("[0-9a-f]{16}")
_PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls
    for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def _named(kind: type[_T]) -> dict[str, _T]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, kind)}


_TORCH_DTYPES = _named(torch.dtype)
_TORCH_LAYOUTS = _named(torch.layout)
_TORCH_FORMATS = _named(torch.memory_format)


def _writes(kind: type[_T]) -> Callable[[Callable[[_T], JSON]], Callable[[_T], JSON]]:
    def register(writer: Callable[[_T], JSON]) -> Callable[[_T], JSON]:
        LEAVES[kind] = writer
        return writer

    return register


def _reads(tag: str) -> Callable[[_Reader], _Reader]:
    def register(reader: _Reader) -> _Reader:
        LEAF_TAGS[tag] = reader
        return reader

    return register


def read_leaf(node: list[JSON]) -> object:
    """Read a tagged leaf.

    Raises:
        PathError: The tag is unknown or what follows is malformed.
    """
    tag = node[0] if node else None
    reader = LEAF_TAGS.get(tag) if isinstance(tag, str) else None
    if reader is None:
        raise PathError(f"unknown kind of value {shown(tag)}")
    try:
        return reader(node[1:])
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as exc:
        raise PathError(f"malformed {tag} ({exc!s:.120})") from None


def fields(args: list[JSON], count: int) -> list[JSON]:
    """Return the arguments of a tag. Raises ValueError unless there are `count`."""
    if len(args) != count:
        raise ValueError(f"expected {count} fields, found {len(args)}")
    return args


# Numbers and text


@_writes(int)
def int_node(x: int) -> JSON:
    """Write an int; large ones as hex, which every JSON reader keeps."""
    return x if -_LARGE < x < _LARGE else ["int", hex(x)]


@_writes(float)
def float_node(x: float) -> JSON:
    """Write a float; NaN and the infinities as their IEEE bits, so that a NaN keeps its own."""
    return x if math.isfinite(x) else ["float", struct.pack(">d", x).hex()]


@_writes(str)
def str_node(x: str) -> JSON:
    """Write text; with surrogates in it as UTF-8 bytes, since JSON would join a pair of them into one character."""
    if x.isascii() or not SURROGATE.search(x):
        return x
    return ["str", base64.b64encode(x.encode("utf-8", "surrogatepass")).decode()]


@_writes(complex)
def _complex_node(x: complex) -> JSON:
    return ["complex", float_node(x.real), float_node(x.imag)]


def bytes_node(x: bytes | bytearray) -> JSON:
    """Write bytes as base64."""
    return [type(x).__name__, base64.b64encode(x).decode()]


def read_int(node: JSON) -> int:
    """Read an int. Raises ValueError for anything else."""
    if type(node) is int:
        return node
    if isinstance(node, list) and len(node) == 2 and node[0] == "int" and isinstance(node[1], str):
        return int(node[1], 16)
    raise ValueError(f"expected an int, found {shown(node)}")


def read_float(node: JSON) -> float:
    """Read a float. Raises ValueError for anything else."""
    if type(node) is float:
        return node
    if isinstance(node, list) and len(node) == 2 and isinstance(node[1], str) and _HEX_DOUBLE.fullmatch(node[1]):
        (value,) = struct.unpack(">d", bytes.fromhex(node[1]))
        return float(value)
    raise ValueError(f"expected a float, found {shown(node)}")


def read_str(node: JSON) -> str:
    """Read text. Raises ValueError for anything else."""
    if type(node) is str:
        return node
    if isinstance(node, list) and len(node) == 2 and node[0] == "str":
        return read_bytes(node[1]).decode("utf-8", "surrogatepass")
    raise ValueError(f"expected text, found {shown(node)}")


def read_bytes(node: JSON) -> bytes:
    """Read base64. Raises ValueError for anything else."""
    if type(node) is not str:
        raise ValueError(f"expected base64, found {shown(node)}")
    try:
        return base64.b64decode(node, validate=True)
    except binascii.Error as exc:
        raise ValueError(f"bad base64: {exc}") from None


LEAF_TAGS["int"] = lambda args: read_int(["int", *args])
LEAF_TAGS["float"] = lambda args: read_float(["float", *args])
LEAF_TAGS["str"] = lambda args: read_str(["str", *args])
LEAF_TAGS["bytes"] = lambda args: read_bytes(*fields(args, 1))
LEAF_TAGS["bytearray"] = lambda args: bytearray(read_bytes(*fields(args, 1)))


@_reads("complex")
def _read_complex(args: list[JSON]) -> object:
    re_, im = fields(args, 2)
    return complex(read_float(re_), read_float(im))


@_writes(Decimal)
def _decimal_node(x: Decimal) -> JSON:
    return ["Decimal", str(x)]


LEAF_TAGS["Decimal"] = lambda args: Decimal(read_str(*fields(args, 1)))


@_writes(Fraction)
def _fraction_node(x: Fraction) -> JSON:
    return ["Fraction", int_node(x.numerator), int_node(x.denominator)]


LEAF_TAGS["Fraction"] = lambda args: Fraction(*map(read_int, fields(args, 2)))


@_writes(range)
def _range_node(x: range) -> JSON:
    return ["range", int_node(x.start), int_node(x.stop), int_node(x.step)]


LEAF_TAGS["range"] = lambda args: range(*map(read_int, fields(args, 3)))


@_writes(uuid.UUID)
def _uuid_node(x: uuid.UUID) -> JSON:
    return ["UUID", x.hex]


LEAF_TAGS["UUID"] = lambda args: uuid.UUID(hex=read_str(*fields(args, 1)))


def _path_node(x: pathlib.PurePath) -> JSON:
    return ["path", type(x).__name__, str_node(str(x))]


LEAVES.update(dict.fromkeys(_PATHS.values(), _path_node))


@_reads("path")
def _read_path(args: list[JSON]) -> object:
    name, text = map(read_str, fields(args, 2))
    if name not in _PATHS:
        raise ValueError(f"unknown kind of path {shown(name)}")
    flavour = _PATHS[name]
    if issubclass(flavour, pathlib.Path) and not isinstance(pathlib.Path(), flavour):
        flavour = _PATHS[f"Pure{name}"]  # another system's path cannot be opened here, only read
    return flavour(text)


# Dates and times


@_writes(dt.timezone)
def _timezone_node(x: dt.timezone) -> JSON:
    offset, *name = x.__getinitargs__()  # type: ignore[attr-defined]
    return ["timezone", _timedelta_node(offset), str_node(name[0]) if name else None]


@_reads("timezone")
def _read_timezone(args: list[JSON]) -> object:
    offset, name = fields(args, 2)
    if not isinstance(offset, list) or offset[:1] != ["timedelta"]:
        raise ValueError("expected a timedelta")
    delta = _read_timedelta(offset[1:])
    return dt.timezone(delta) if name is None else dt.timezone(delta, read_str(name))


@_writes(zoneinfo.ZoneInfo)
def _zone_node(x: zoneinfo.ZoneInfo) -> JSON:
    if x.key is None or not _ZONE_KEY.fullmatch(x.key):
        raise PathError("a ZoneInfo without a usual key cannot be saved; use ZoneInfo('Area/City') or a fixed offset")
    return ["ZoneInfo", x.key]


@_reads("ZoneInfo")
def _read_zone(args: list[JSON]) -> object:
    key = read_str(*fields(args, 1))
    if not _ZONE_KEY.fullmatch(key):  # ZoneInfo looks the key up in folders and in a package
        raise ValueError(f"not the key of a time zone: {shown(key)}")
    try:
        return zoneinfo.ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, OSError):
        reason = f"time zone {key!r:.60} is unknown on this machine; install the tzdata package"
        raise PathError(reason, is_damage=False) from None


def _tz_node(x: dt.datetime | dt.time) -> JSON:
    tz = x.tzinfo
    if tz is None:
        return None
    if type(tz) not in (dt.timezone, zoneinfo.ZoneInfo):
        raise PathError(f"a {type(tz).__qualname__} time zone cannot be saved; use datetime.timezone or ZoneInfo")
    return LEAVES[type(tz)](tz)


def _read_tz(node: JSON) -> dt.tzinfo | None:
    if node is None:
        return None
    if not isinstance(node, list) or node[:1] not in (["timezone"], ["ZoneInfo"]):
        raise ValueError("expected a time zone")
    tz = read_leaf(node)
    return tz if isinstance(tz, dt.tzinfo) else None


@_writes(dt.timedelta)
def _timedelta_node(x: dt.timedelta) -> JSON:
    return ["timedelta", x.days, x.seconds, x.microseconds]


def _read_timedelta(args: list[JSON]) -> dt.timedelta:
    days, seconds, microseconds = map(read_int, fields(args, 3))
    return dt.timedelta(days, seconds, microseconds)


LEAF_TAGS["timedelta"] = _read_timedelta


@_writes(dt.date)
def _date_node(x: dt.date) -> JSON:
    return ["date", x.isoformat()]


LEAF_TAGS["date"] = lambda args: dt.date.fromisoformat(read_str(*fields(args, 1)))


@_writes(dt.datetime)
def _datetime_node(x: dt.datetime) -> JSON:
    return ["datetime", x.replace(tzinfo=None).isoformat(), x.fold, _tz_node(x)]


@_reads("datetime")
def _read_datetime(args: list[JSON]) -> object:
    text, fold, tz = fields(args, 3)
    return dt.datetime.fromisoformat(read_str(text)).replace(fold=read_int(fold), tzinfo=_read_tz(tz))


@_writes(dt.time)
def _time_node(x: dt.time) -> JSON:
    return ["time", x.replace(tzinfo=None).isoformat(), x.fold, _tz_node(x)]


@_reads("time")
def _read_time(args: list[JSON]) -> object:
    text, fold, tz = fields(args, 3)
    return dt.time.fromisoformat(read_str(text)).replace(fold=read_int(fold), tzinfo=_read_tz(tz))


# torch


@_writes(torch.Size)
def _size_node(x: torch.Size) -> JSON:
    return ["Size", *x]


@_reads("Size")
def _read_size(args: list[JSON]) -> object:
    sizes = [read_int(size) for size in args]
    if not all(-_LARGE <= size < _LARGE for size in sizes):
        raise ValueError("a size is larger than memory can be")
    return torch.Size(sizes)


@_writes(torch.device)
def _device_node(x: torch.device) -> JSON:
    return ["device", str(x)]


@_reads("device")
def _read_device(args: list[JSON]) -> object:
    text = read_str(*fields(args, 1))
    if not _DEVICE.fullmatch(text):
        raise ValueError(f"not a device: {shown(text)}")
    return torch.device(text)


def _constant(kind: type, tag: str, names: dict[str, Any]) -> None:
    def read(args: list[JSON]) -> object:
        name = read_str(*fields(args, 1))
        if name not in names:
            raise PathError(f"this build of torch knows no {tag} {shown(name)}; use a newer one", is_damage=False)
        return names[name]

    LEAVES[kind] = lambda x: [tag, str(x)]
    LEAF_TAGS[tag] = read


_constant(torch.dtype, "dtype", _TORCH_DTYPES)
_constant(torch.layout, "layout", _TORCH_LAYOUTS)
_constant(torch.memory_format, "memory_format", _TORCH_FORMATS)
