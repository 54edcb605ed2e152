"""Write golden checkpoints: `python -m tests.golden.make_checkpoints VERSION`. One that is there is never changed.

Add a version whenever the writer's bytes change. Never delete one: tests/engine/test_golden.py loads them for ever.
Every value is made from patterns, never from a random number generator, whose numbers a new torch may change.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import json
import pathlib
import sys
import types
import uuid
from pathlib import Path

import numpy as np
import torch

import tidegate
from tests.golden.classes import Access, Colour, Config, Frozen, Pair
from tests.golden.describe import Describer

FOLDER = Path(__file__).parent / "checkpoints"
CHUNK = 1 << 16
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip


def pattern(num_bytes: int, seed: int) -> bytes:
    """Bytes without visible order: a linear congruential generator, written out."""
    state = seed
    out = bytearray()
    for _ in range(num_bytes):
        state = (state * 1_103_515_245 + 12_345) % 2**31
        out.append(state >> 16 & 0xFF)
    return bytes(out)


def tensor(dtype: str, numel: int, seed: int) -> torch.Tensor:
    """A flat tensor of any bits, every NaN among them; only bool takes but two."""
    kind = getattr(torch, dtype)
    octets = pattern(numel * kind.itemsize, seed)
    if dtype == "bool":
        octets = bytes(octet & 1 for octet in octets)
    return torch.frombuffer(bytearray(octets), dtype=torch.uint8).view(kind)


def dtypes() -> dict[str, object]:
    """Every dtype in three lengths."""
    return {
        name: [tensor(name, n, i * 7 + n) for n in (1, 7)] + [tensor(name, 1, 0)[:0]] for i, name in enumerate(DTYPES)
    }


def layouts() -> dict[str, object]:
    """Strides, ties, views, flags, and a tensor of several chunks."""
    base = torch.arange(60.0)
    images = torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    flat = torch.arange(40, dtype=torch.int32)
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    waves = torch.complex(torch.arange(6.0), torch.arange(6.0) + 0.5)
    return {
        "transposed": torch.arange(15.0).reshape(3, 5).t(),
        "channels_last": images,
        "expanded": torch.arange(3.0).expand(4, 3),
        "gaps": torch.arange(20.0)[::2],
        "columns": torch.arange(20.0).reshape(4, 5)[:, 1:3],
        "scalar": torch.tensor(1.5),
        "no_rows": torch.empty(0, 5, 3),
        "overlapping": base.as_strided((5, 4), (2, 1)),
        "views": [flat[:24], flat[16:], flat[20:32].reshape(3, 4), flat.view(torch.int16)[30:50]],
        "tied": [weight, weight, weight.detach()],
        "frozen": torch.nn.Parameter(torch.arange(4.0), requires_grad=False),
        "grad": torch.arange(3.0).requires_grad_(),
        "conj": waves.conj(),
        "neg": torch.conj(waves).imag,
        "pieces": (torch.arange(17_000) % 251).to(torch.int32),
        "module": torch.nn.Sequential(torch.nn.Identity(), torch.nn.BatchNorm1d(3)).state_dict(),
    }


def containers() -> dict[object, object]:
    """Every kind of container and leaf."""
    counted: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    counted["a"].append(1)
    india = dt.timezone(dt.timedelta(hours=5, minutes=30), "IST")
    return {
        "sequences": [[], (), [1, (2, [3])], collections.deque([1, 2], maxlen=5), collections.deque()],
        "dicts": [
            {}, {1: "a", "1": "b", (1, 2): "c", None: "d", False: "e", 1.5: "f", b"k": "g"}, counted,
            collections.OrderedDict(b=1, a=2), collections.Counter("abca"),
        ],
        "sets": [set(), {1, "x", None, (1, 2)}, frozenset({3})],
        "namespaces": [argparse.Namespace(a=1, b=[2]), types.SimpleNamespace(c="d")],
        "classes": [
            Config(3, ["x"]), Frozen(0.5), Pair(1, torch.arange(3)), Colour.RED, Colour.GREEN, Access.READ,
            Access.READ | Access.WRITE, {Colour.RED: 1},
        ],
        "numbers": [
            0, -1, 2**63, -(10**40), True, False, None, 0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, float("inf"),
            float("-inf"), float("nan"), 1 + 2j, complex(-0.0, float("inf")), decimal.Decimal("1.10"),
            fractions.Fraction(3, 7), range(1, 10, 3),
        ],
        "text": ["", "ascii", "äöü €", "\U0001f600", "\ud83d", "nul\0"],
        "bytes": [b"", b"\0\xff", bytearray(b"xy"), pattern(5000, 1)],
        "times": [
            dt.date(2026, 11, 29), dt.datetime(2026, 11, 29, 1, 2, 3, 4, fold=1), dt.time(23, 59),
            dt.timedelta(-1, 5, 7), dt.UTC, dt.datetime(2026, 1, 1, tzinfo=india),
        ],
        "paths": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:\\d"), pathlib.PosixPath("/e")],
        "ids": [uuid.UUID(int=5)],
        "torch": [torch.Size([1, 2]), torch.device("cuda:1"), torch.bfloat16, torch.strided, torch.channels_last],
        "arrays": [
            np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array("text"),
            np.array([]), np.arange(4, dtype=">u2"), np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
            np.array(["2026-01-01"], dtype="datetime64[D]"), np.arange(20)[::3], np.array([True, False]),
        ],
        "scalars": [np.float64(0.1), np.int8(-3), np.str_("s"), np.bool_(True), np.dtype("<f4")],
        7: "an int key",
    }  # fmt: skip


def few() -> dict[str, object]:
    """What the raw checkpoint holds."""
    return {"dtypes": dtypes()}


def everything() -> dict[str, object]:
    """What the compressed checkpoint and the file hold."""
    return {"dtypes": dtypes(), "layouts": layouts(), "more": containers()}


def write_expected(folder: Path, name: str, state: object) -> None:
    """Write what a state is: its structure as JSON, which also tells where in the .npz the bytes of each tensor are."""
    describer = Describer()
    described = describer.describe(state)
    places = {}
    octets = b""
    for place, content in describer.contents.items():
        places[place] = [len(octets), len(content)]
        octets += content
    (folder / f"{name}.json").write_text(json.dumps({"state": described, "contents": places}, indent=None) + "\n")
    np.savez_compressed(folder / f"{name}.npz", octets=np.frombuffer(octets, np.uint8))


def main() -> None:
    """Write a version: a root of two steps, one file, and what they hold, by rules that are not tidegate's."""
    folder = FOLDER / sys.argv[1]
    folder.mkdir(parents=True)
    for step, codec, state in ((3, "raw", few()), (7, "zstd", everything())):
        with tidegate.CheckpointEngine(folder / "root", codec=codec, chunk_bytes=CHUNK) as engine:
            engine.save_async(state, step=step, metadata={"codec": codec})
    tidegate.save(everything(), folder / "one.tg")
    write_expected(folder, "few", few())
    write_expected(folder, "everything", everything())


if __name__ == "__main__":
    main()
