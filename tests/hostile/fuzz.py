"""Random damage, and random forgery with every checksum right. The same seed and number give the same mutation.

`python -m tests.hostile.fuzz SEED NUMBER` does one again and shows what comes of it.
"""

from __future__ import annotations

import functools
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import tidegate
from tests.hostile.forge import ATTEMPT, HEADER_FIELDS, PAGE, STEP, TRAILER_FIELDS, Forgery, put_file, taken_apart
from tests.kit.bits import assert_same_bits
from tests.kit.stores import content
from tidegate.load import load_latest, load_step
from tidegate.storage import MemoryStore

Objects = dict[str, bytes]
_OLDER = 3


@functools.cache
def state_of(step: int) -> dict[str, object]:
    """A few KiB: a tie, views of one storage, strides, several word types, an array, bytes, containers, odd keys."""
    numbers = torch.Generator().manual_seed(step)
    master = torch.randn(300, generator=numbers)
    flat = torch.arange(64, dtype=torch.int32) * step
    return {
        "master": master,
        "model": {
            "w": master.bfloat16().reshape(20, 15).t(),
            "head": master,
            "part": [flat[:40], flat[20:].reshape(4, 11)],
        },
        "parameter": torch.nn.Parameter(torch.zeros(5, 7)),
        "array": np.arange(step, step + 6.0).reshape(2, 3),
        "bytes": bytes([step]) * 5000,
        "more": [step, (2.5, None, True), {1: "x", (2, "y"): b"z"}, float("inf"), {"set"}],
    }


@functools.cache
def two_checkpoints() -> Objects:
    """The objects of a root with two steps, by key."""
    store = MemoryStore()
    with tidegate.CheckpointEngine(store, chunk_bytes=1 << 16) as engine:
        for step in (_OLDER, STEP):
            engine.save_async(state_of(step), step=step)
        engine.wait()
    return {stat.key: content(store, stat.key) for stat in store.list()}


@functools.cache
def in_parts() -> Forgery:
    """The newer checkpoint, taken apart."""
    return taken_apart(state_of(STEP))


@dataclass(slots=True)
class Mutation:
    """Something changed.

    Attributes:
        load: Loads what it has become.
        may_differ: Whether what is loaded may be another valid state: a checksum of the state itself was signed anew.
        what: What was changed, for messages.
    """

    load: Callable[[], object]
    may_differ: bool = False
    what: list[str] = field(default_factory=list)


def mutation(seed: int, number: int) -> Mutation:
    """Make the mutation of that number: half of them damage a root, a fifth a file, the others are forged."""
    rng = random.Random(f"{seed}-{number}")
    kind = number % 10
    if kind < 5:
        return _damaged_root(rng)
    if kind < 7:
        return _damaged_file(rng)
    return _forged(rng)


def run(seed: int, number: int) -> str:
    """Make a mutation, load it, and check what comes of it; returns "same", "older", "other" or the error's name.

    Raises:
        AssertionError: It was loaded and is not what was saved, or something else than a refusal came of it.
    """
    mutated = mutation(seed, number)
    at = f"seed {seed}, mutation {number} ({'; '.join(mutated.what)})"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loaded = mutated.load()
        except (tidegate.LoadError, tidegate.CheckpointNotFoundError, tidegate.errors.CodecUnavailableError) as exc:
            return type(exc).__name__
        except BaseException as exc:
            exc.add_note(at)
            raise
    assert {w.category for w in caught} <= {tidegate.CheckpointWarning}, f"{at}: {caught[0].message}"
    if mutated.may_differ:
        _check_bounds(loaded, at)
        return "other"
    step = loaded["more"][0] if isinstance(loaded, dict) else None  # type: ignore[index]
    assert step in (_OLDER, STEP), f"{at}: a state of nowhere"
    try:
        assert_same_bits(loaded, state_of(step))
    except AssertionError as exc:
        exc.add_note(at)
        raise
    return "same" if step == STEP else "older"


def _check_bounds(x: object, at: str) -> None:
    """Assert that no tensor reaches beyond its storage."""
    if isinstance(x, torch.Tensor) and x.numel():
        last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        assert (last + 1) * x.itemsize <= x.untyped_storage().nbytes(), f"{at}: a tensor reaches beyond its storage"
    elif isinstance(x, dict):
        for value in x.values():
            _check_bounds(value, at)
    elif isinstance(x, list | tuple):
        for value in x:
            _check_bounds(value, at)


# Damage: bytes change, checksums do not


def _damaged_root(rng: random.Random) -> Mutation:
    objects = dict(two_checkpoints())
    what = [_damage_one(rng, objects) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    store = MemoryStore("damaged")
    for key, octets in objects.items():
        store.compare_and_put(key, octets, expected=None)
    if rng.random() < 0.5:
        return Mutation(lambda: load_latest(store), what=["latest", *what])
    return Mutation(lambda: load_step(store, STEP), what=[f"step {STEP}", *what])


def _damage_one(rng: random.Random, objects: Objects) -> str:
    key = rng.choice(sorted(objects))
    name = key.rpartition("/")[2]
    if not objects or rng.random() < 0.9:
        objects[key], what = damaged(rng, objects[key])
        return f"{key[:15]} {name}: {what}"
    other = rng.choice(sorted(objects))
    match rng.randrange(4):
        case 0:
            del objects[key]
            return f"{key} deleted"
        case 1:
            objects[key], objects[other] = objects[other], objects[key]
            return f"{key} and {other} swapped"
        case 2:
            objects[key] = objects[other]
            return f"{key} is a copy of {other}"
        case _:
            new = key.replace("step-0000000007", "step-0000000009") if rng.random() < 0.5 else f"{key}x"
            objects[new] = objects.pop(key)
            return f"{key} renamed to {new}"


def _damaged_file(rng: random.Random) -> Mutation:
    octets, what = damaged(rng, _one_file())
    url = put_file(octets, "fuzz")
    return Mutation(lambda: tidegate.load(url), what=["file", what])


@functools.cache
def _one_file() -> bytes:
    return in_parts().one_file()


def damaged(rng: random.Random, octets: bytes) -> tuple[bytes, str]:
    """Change bytes in one of many ways; half of the places lie at the end, where the structure of an object is."""
    length = len(octets)

    def place() -> int:
        tail = min(length, 2048)
        return rng.randrange(length - tail, length) if rng.random() < 0.5 else rng.randrange(length)

    if length == 0:
        return b"x", "a byte where there was none"
    out = bytearray(octets)
    at, span = place(), rng.choice((1, 2, 8, 64, 512, PAGE))
    match rng.randrange(9):
        case 0 | 1 | 2:
            bits = [place() * 8 + rng.randrange(8) for _ in range(rng.choice((1, 1, 2, 8)))]
            for bit in bits:
                out[bit >> 3] ^= 1 << (bit & 7)
            return bytes(out), f"bits {bits} flipped"
        case 3:
            value = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            out[at : at + span] = bytes([value]) * len(out[at : at + span])
            return bytes(out), f"{span} bytes at {at} set to {value}"
        case 4:
            end = rng.choice((0, at, at // PAGE * PAGE, length - 1))
            return bytes(out[:end]), f"cut to {end}"
        case 5:
            junk = rng.choice((bytes(span), rng.randbytes(span), bytes(out[-span:])))
            return bytes(out) + junk, f"{len(junk)} bytes more"
        case 6:
            other = place()
            first, second = bytes(out[at : at + span]), bytes(out[other : other + span])
            out[at : at + len(second)], out[other : other + len(first)] = second, first
            return bytes(out), f"{span} bytes at {at} and {other} swapped"
        case 7:
            del out[at : at + span]
            return bytes(out), f"{span} bytes at {at} removed"
        case _:
            out[at:at] = rng.choice((bytes(span), rng.randbytes(span), bytes(out[at : at + span])))
            return bytes(out), f"{span} bytes put in at {at}"


# Forgery: fields change, and every checksum with them


def _forged(rng: random.Random) -> Mutation:
    forgery = in_parts().copy()
    mutated = Mutation(lambda: None)
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(
            (_forge_manifest, _forge_manifest, _forge_header, _forge_body, _forge_index, _forge_trailer, _forge_commit)
        )(rng, forgery, mutated)
    if rng.random() < 0.4:
        url = put_file(forgery.one_file(), "fuzz")
        mutated.load = lambda: tidegate.load(url)
    else:
        store = forgery.root()
        mutated.load = (lambda: load_latest(store)) if rng.random() < 0.5 else (lambda: load_step(store, STEP))
    return mutated


def _value(rng: random.Random) -> Any:
    pool: list[Any] = [
        0, 1, -1, 2, 255, 4096, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30,
        0.0, 1.0, -0.5, 1e308, float("nan"), float("inf"), True, False, None,
        "", "x", "t", "float32", "cuda:0", "../../x", "\ud800", "\0",
        [], {}, [[]], [0], [1, 2, 3], {"a": {}}, {"runs": [[0, 3]]}, {"runs": [[1, 10**9]]},
        ["t", 0], ["t", 99], ["list"], ["dict", [1, 2]], ["ndarray", 0, "<f4", [3], "C"], ["bytes@", 0],
        ["int", "0xff"], ["float", "7ff8000000000001"],
    ]  # fmt: skip
    return rng.choice(pool)


def _forge_manifest(rng: random.Random, forgery: Forgery, mutated: Mutation) -> None:
    node: Any = forgery.fields
    path: list[Any] = []
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = rng.choice(keys)
        path.append(key)
        below = node[key]
        if not isinstance(below, dict | list) or not below or rng.random() < 0.2:
            break
        node = below
    mutated.may_differ = True
    mutated.what.append(f"manifest {path}: {_change_node(rng, node, key)}")


def _change_node(rng: random.Random, node: Any, key: Any) -> str:
    before = node[key]
    match rng.randrange(6):
        case 0:
            del node[key]
            return "left out"
        case 1 if isinstance(node, list):
            node.insert(key, before)
            return "twice"
        case 2 if isinstance(node, list) and len(node) > 1:
            other = rng.randrange(len(node))
            node[key], node[other] = node[other], before
            return f"swapped with {other}"
        case 3 | 4 if type(before) is int:
            node[key] = rng.choice((before + 1, before - 1, before * 2, -before, before ^ 1 << rng.randrange(40)))
        case 5 if isinstance(before, str) and before:
            node[key] = before[: rng.randrange(len(before))] + chr(rng.randrange(32, 127))
        case _:
            node[key] = _value(rng)
    return f"{node[key]!r:.60}"


def _number(rng: random.Random, before: int, num_bits: int) -> int:
    top = 1 << num_bits
    choices = (
        0,
        1,
        before + 1,
        before - 1,
        before * 2,
        before + PAGE,
        top - 1,
        top - PAGE,
        before ^ 1 << rng.randrange(num_bits),
    )
    return rng.choice(choices) % top


_BITS = {"version": 8, "codec": 8, "codec_version": 8, "word": 8, "parameter": 32}


def _forge_header(rng: random.Random, forgery: Forgery, mutated: Mutation) -> None:
    frame = rng.choice(forgery.frames)
    name = rng.choice(HEADER_FIELDS)
    header = dict(frame.header)
    if name in ("magic", "reserved"):
        header[name] = rng.randbytes(len(frame.header[name]))  # type: ignore[arg-type]
    else:
        header[name] = _number(rng, header[name], _BITS.get(name, 64))  # type: ignore[arg-type]
    where = rng.choice(("both", "frame", "index"))
    if where == "frame":
        frame.index_header = frame.index_header or dict(frame.header)
    if where == "index":
        frame.index_header = header
    else:
        frame.header = header
    mutated.may_differ |= name == "raw_digest"
    mutated.what.append(f"header of chunk {frame.chunk} in {where}: {name} is {header[name]!r}")


def _forge_body(rng: random.Random, forgery: Forgery, mutated: Mutation) -> None:
    frame = rng.choice(forgery.frames)
    if rng.random() < 0.3 and frame.body:  # the table of a blocked body
        body = bytearray(frame.body)
        at = rng.randrange(min(len(body), 32))
        body[at] = rng.choice((0, 1, 0x40, 0x80, 0xC0, 0xFF, body[at] ^ 1 << rng.randrange(8)))
        frame.replace_body(bytes(body))
        mutated.what.append(f"body of chunk {frame.chunk}: byte {at} is {body[at]}")
        return
    body_after, what = damaged(rng, frame.body)
    frame.replace_body(body_after)
    mutated.what.append(f"body of chunk {frame.chunk}: {what}")


def _forge_index(rng: random.Random, forgery: Forgery, mutated: Mutation) -> None:
    frames = forgery.frames
    if not frames:
        return
    index = rng.randrange(len(frames))
    match rng.randrange(5):
        case 0:
            frames[index].offset = _number(rng, index * PAGE, 64)
        case 1:
            frames[index].chunk = _number(rng, frames[index].chunk, 64)
        case 2:
            frames.pop(index) if len(frames) > 1 else None
        case 3:
            frames.insert(rng.randrange(len(frames)), frames[index])
        case _:
            rng.shuffle(frames)
    mutated.what.append(f"index entry {index} changed, left out, twice or elsewhere")


def _forge_trailer(rng: random.Random, forgery: Forgery, mutated: Mutation) -> None:
    name = rng.choice(TRAILER_FIELDS)
    value: int | bytes = (
        rng.randbytes(8) if name == "magic" else _number(rng, 64, 32 if name in ("version", "flags") else 64)
    )
    forgery.trailer[name] = value
    mutated.what.append(f"trailer: {name} is {value!r}")


def _forge_commit(rng: random.Random, forgery: Forgery, mutated: Mutation) -> None:
    name = rng.choice(("version", "step", "sequence", "attempt", "manifest_bytes", "manifest_digest", "more"))
    value = ATTEMPT[::-1] if rng.random() < 0.1 else _value(rng)
    forgery.commit[name] = value
    mutated.what.append(f"COMMIT: {name} is {value!r}")


if __name__ == "__main__":
    print(mutation(int(sys.argv[1]), int(sys.argv[2])).what)
    print(run(int(sys.argv[1]), int(sys.argv[2])))
