"""Files of safetensors, read and written in place (format: github.com/huggingface/safetensors, README, "Format").

Eight bytes say how long the header is, little-endian; the header is JSON: by name the dtype, the shape, and where the
bytes begin and end, counted from the header's end; then come the bytes, row by row and without holes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from tidegate.codec.words import DTYPE_OF_NAME

from .errors import ConfigError, CorruptCheckpointError
from .json_fields import as_dict, as_ints, as_list, as_str
from .scratch import file_bytes, mapped_bytes
from .types import JSON

_CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
_CODE_OF_NAME = {name: code for code, name in _CODES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
_METADATA = "__metadata__"


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a file by name. Blocks for the header only; the bytes are read when they are used.

    Raises:
        CorruptCheckpointError: It is no such file, or damaged.
    """
    content = file_bytes(path) if path.stat().st_size else torch.empty(0, dtype=torch.uint8)
    try:
        num_bytes = int.from_bytes(content[:_LENGTH_BYTES].numpy().tobytes(), "little")
        if content.numel() < _LENGTH_BYTES or num_bytes > min(content.numel() - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        text = content[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes].numpy().tobytes()
        header = as_dict(json.loads(text))
        body = content[_LENGTH_BYTES + num_bytes :]
        return {name: _tensor(body, as_dict(node)) for name, node in header.items() if name != _METADATA}
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{path} is no safetensors file: {exc}", key=str(path), stage="open") from exc


def _tensor(body: torch.Tensor, node: dict[str, JSON]) -> torch.Tensor:
    code, shape = as_str(node["dtype"]), as_ints(node["shape"])
    begin, end = as_ints(as_list(node["data_offsets"]))
    dtype = DTYPE_OF_NAME[_CODES[code]]
    if not begin <= end <= body.numel() or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"bytes {begin} to {end} are not those of a tensor of {code}{list(shape)}")
    row = body[begin:end]
    if row.numel() and row.data_ptr() % dtype.itemsize:
        row = row.clone()
    return row.view(dtype).view(shape) if row.numel() else torch.empty(shape, dtype=dtype)


def create_safetensors(path: Path, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """Create a file, and map its tensors to be filled.

    Args:
        path: The file; replaced if it is there.
        tensors: Name, dtype and shape of each.

    Raises:
        ConfigError: The format has no word for a dtype.
    """
    # Those of wide values first, so that each lies where its values must.
    ordered = sorted(tensors, key=lambda item: -DTYPE_OF_NAME[item[1]].itemsize)
    sizes = [math.prod(shape) * DTYPE_OF_NAME[dtype].itemsize for _, dtype, shape in ordered]
    ends = list(itertools.accumulate(sizes, initial=0))
    header: dict[str, JSON] = {}
    for (name, dtype, shape), begin, end in zip(ordered, ends, ends[1:], strict=False):
        if dtype not in _CODE_OF_NAME:
            raise ConfigError(f"{name} is of {dtype}, which a safetensors file cannot hold")
        header[name] = {"dtype": _CODE_OF_NAME[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with path.open("wb+") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        file.flush()
        rows = mapped_bytes(file.fileno(), sizes, _LENGTH_BYTES + len(text), alignment=1)
    return {
        name: row.view(DTYPE_OF_NAME[dtype]).view(shape)
        for (name, dtype, shape), row in zip(ordered, rows, strict=True)
    }
