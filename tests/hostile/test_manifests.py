"""Manifests made to harm: every checksum is right and the fields lie. All are refused, cheaply."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.hostile.bounds import bounded
from tests.hostile.forge import ATTEMPT, STEP, put_file, taken_apart
from tests.hostile.refusing import NUM_TENSORS, Fields, changed, honest, load_root, refused, state
from tests.kit.bits import assert_same_bits
from tidegate.storage import LocalStore

DEEP = 100_000


def test_the_forge_makes_good_checkpoints() -> None:
    """Else the tests below would prove nothing."""
    assert_same_bits(load_root(honest().root()), state())
    assert_same_bits(tidegate.load(put_file(honest().one_file())), state())


NO_NUMBERS: list[object] = [
    -1,
    1.0,
    0.5,
    True,
    False,
    "0",
    None,
    [],
    {},
    [0],
    float("nan"),
    float("inf"),
    2**63,
    -(2**70),
    10**400,
]
COLUMNS = ("tensor_spec", "tensor_extent", "tensor_offset", "extent_words", "extent_bytes")


def column(fields: Fields, name: str) -> list[Any]:
    """A column as a plain list, put in the place of what is there."""
    values = fields[name]
    if values is None:
        values = [0] * NUM_TENSORS if name == "tensor_offset" else list(range(NUM_TENSORS))
    elif isinstance(values, dict):
        values = [value for value, count in values["runs"] for _ in range(count)]
    fields[name] = values
    return fields[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("number", NO_NUMBERS, ids=lambda n: str(n)[:12])
def test_a_column_with_something_else_in_it(name: str, number: object) -> None:
    refused(changed(lambda fields: column(fields, name).__setitem__(1, number)))


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize(
    "whole",
    [0, "x", True, {}, {"runs": None}, {"runs": 3}, {"runs": [3]}, {"runs": [[0]]}, {"runs": [[0, 5, 5]]},
     {"runs": [[0, -5]]}, {"runs": [[0, 5.0]]}, {"runs": [[True, 5]]}, {"runs": [["0", 5]]},
     {"runs": [[0, NUM_TENSORS - 1]]}, {"runs": [[0, NUM_TENSORS + 1]]}, [], [0] * (NUM_TENSORS + 1),
     [0] * (NUM_TENSORS - 1)],
    ids=str,
)  # fmt: skip
def test_a_column_of_another_form(name: str, whole: object) -> None:
    refused(changed(lambda fields: fields.__setitem__(name, whole)))


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("count", [10**6, 19_999_999, 2**31, 2**40, 2**62])
def test_a_run_that_counts_more_than_there_can_be(name: str, count: int) -> None:
    """A few bytes that ask for lists of gigabytes."""
    refused(changed(lambda fields: fields.__setitem__(name, {"runs": [[0, count]]})))


def test_runs_that_agree_on_more_than_there_can_be() -> None:
    def change(fields: Fields) -> None:
        for name in COLUMNS:
            fields[name] = {"runs": [[0, 10**7]]}
        fields["tensor_extent"] = fields["tensor_offset"] = None
        fields["chunks"] = []

    refused(changed(change))


CHUNKS: dict[str, Callable[[list[list[Any]]], object]] = {
    "none": lambda c: c.clear(),
    "first-missing": lambda c: c.pop(0),
    "last-missing": lambda c: c.pop(),
    "twice": lambda c: c.append(list(c[-1])),
    "first-twice": lambda c: c.insert(0, list(c[0])),
    "swapped": lambda c: c.reverse(),
    "no-extent": lambda c: c[0].__setitem__(1, c[0][0]),
    "turned-round": lambda c: c[-1].__setitem__(0, 9),
    "an-extent-more": lambda c: c[0].__setitem__(1, c[0][1] + 1),
    "beyond-the-last": lambda c: c[-1].__setitem__(1, c[-1][1] + 1),
    "no-bytes": lambda c: c[0].__setitem__(3, 0),
    "a-word-less": lambda c: c[0].__setitem__(3, c[0][3] - 4),
    "a-word-more": lambda c: c[0].__setitem__(3, c[0][3] + 4),
    "an-offset": lambda c: c[0].__setitem__(2, 4),
    "huge": lambda c: c[0].__setitem__(3, 2**62),
    "above-the-limit": lambda c: c[0].__setitem__(3, 2**30 + 4),
    "negative-extent": lambda c: c[0].__setitem__(0, -1),
    "float": lambda c: c[0].__setitem__(3, float(c[0][3])),
    "bool": lambda c: c[1].__setitem__(0, True),
    "short": lambda c: c[0].pop(),
    "long": lambda c: c[0].append(0),
    "no-list": lambda c: c.__setitem__(0, 5),  # type: ignore[call-overload]
    "empty": lambda c: c.append([]),
    "all-in-one": lambda c: c.__setitem__(slice(None), [[0, c[-1][1], 0, sum(chunk[3] for chunk in c)]]),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_that_do_not_cover_the_extents(name: str) -> None:
    refused(changed(lambda fields: CHUNKS[name](fields["chunks"])))


@pytest.mark.parametrize("num_bytes", [2**20, 2**30, 2**40, 2**62, 2**63 - 4])
def test_an_extent_of_more_than_is_there(num_bytes: int) -> None:
    def extent(fields: Fields) -> None:
        column(fields, "extent_bytes")[0] = num_bytes

    def chunk_too(fields: Fields) -> None:
        extent(fields)
        fields["chunks"][0] = [0, 1, 0, num_bytes]

    refused(changed(extent))
    refused(changed(chunk_too))


SPECS: dict[str, Callable[[Fields], object]] = {
    "no-dtype": lambda s: s.pop("dtype"),
    "dtype-of-another-build": lambda s: s.update(dtype="float3"),
    "dtype-that-has-no-bytes": lambda s: s.update(dtype="qint8"),
    "dtype-path": lambda s: s.update(dtype="os.system"),
    "dtype-number": lambda s: s.update(dtype=5),
    "dtype-wider": lambda s: s.update(dtype="complex128"),
    "negative-size": lambda s: s.update(shape=[-64]),
    "float-size": lambda s: s.update(shape=[64.0]),
    "bool-size": lambda s: s.update(shape=[True, 64]),
    "one-more": lambda s: s.update(shape=[65]),
    "huge": lambda s: s.update(shape=[2**62]),
    "product-wraps-to-64": lambda s: s.update(shape=[2**32, 2**32, 64]),
    "huge-and-empty": lambda s: s.update(shape=[2**62, 2**62, 0]),
    "a-thousand-dimensions": lambda s: s.update(shape=[1] * 1000),
    "no-shape": lambda s: s.update(shape=None),
    "negative-stride": lambda s: s.update(strides=[-1]),
    "huge-stride": lambda s: s.update(strides=[2**61]),
    "stride-beyond": lambda s: s.update(strides=[2]),
    "more-strides": lambda s: s.update(strides=[1, 1]),
    "no-strides": lambda s: s.update(strides="1"),
    "flag-number": lambda s: s.update(parameter=1),
    "conj-of-a-real": lambda s: s.update(conj=True),
    "device-path": lambda s: s.update(device="../../dev"),
    "device-number": lambda s: s.update(device=0),
    "unknown-field": lambda s: s.update(reduce="os.system"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_tensor_that_cannot_be(name: str) -> None:
    def change(fields: Fields) -> None:
        spec = next(spec for spec in fields["specs"] if spec["shape"] == [64])
        SPECS[name](spec)

    refused(changed(change))


@pytest.mark.parametrize("spec", [None, 5, "float32", [], ["dtype", "shape"]])
def test_a_spec_of_another_form(spec: object) -> None:
    refused(changed(lambda fields: fields["specs"].__setitem__(0, spec)))


@pytest.mark.parametrize("offset", [1, 2, 4, 256, 2**40, 2**62])
def test_a_tensor_that_leaves_its_extent(offset: int) -> None:
    refused(changed(lambda fields: column(fields, "tensor_offset").__setitem__(0, offset)))


def test_versions_and_features_say_what_is_unknown_and_what_to_do() -> None:
    refused(changed(lambda f: f.update(version=2)), r"version 2 .*Install the tidegate that wrote it")
    refused(changed(lambda f: f.update(features=["delta-chains"])), r"delta-chains.*Install the tidegate")
    refused(changed(lambda f: f.update(format="zarr")), "not a tidegate manifest")


@pytest.mark.parametrize("version", [None, 0, -1, "1", [1], {}, 1.5])
def test_versions_of_another_form(version: object) -> None:
    refused(changed(lambda f: f.update(version=version)))


@pytest.mark.parametrize(
    "features",
    [None, 1, "", "x", {}, {"x": 1}, [1], [None], [[]], [{}], [["x"]], ["x"] * 10**6],
    ids=lambda f: str(f)[:10],
)
def test_features_of_another_form(features: object) -> None:
    refused(changed(lambda f: f.update(features=features)))


@pytest.mark.parametrize("name", sorted(taken_apart({}).fields))
def test_every_field_is_needed_and_typed(name: str) -> None:
    """Each is left out, and each is what it may not be. Only the state itself may be anything."""
    only_root = name in ("step", "attempt", "objects")  # the forge sets these in a file that stands alone
    refused(changed(lambda f: f.pop(name)), only_root=only_root)
    for value in (True, 1.5, "x", {}):
        if name != "state" and (name, value) not in [("created", {}), ("metadata", {})]:
            refused(changed(lambda f, value=value: f.__setitem__(name, value)),
            only_root=only_root)  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"\x00" * 100, b"{" * DEEP,
     b'{"format": "tidegate-manifest"}',
     b'{"format": "tidegate-manifest", "version": 1, "features": []}', b"9" * 10_000, pickle.dumps({"a": 1}), b"NaN"],
    ids=lambda t: repr(t[:12]),
)  # fmt: skip
def test_texts_that_are_no_manifest(text: bytes) -> None:
    forgery = honest().copy()
    forgery.text = text
    refused(forgery, only_root=text == b"")


@pytest.mark.parametrize(
    "key",
    ["../../secret", "/etc/hostname", "rank-00000.tg", "", f"step-{STEP:010d}/COMMIT", f"step-{STEP:010d}/../x",
     f"step-{STEP:010d}/{'0' * 32}/rank-00000.tg", f"step-{STEP:010d}/{ATTEMPT}/../../../etc/hostname",
     f"step-{STEP:010d}/{ATTEMPT}/./rank-00000.tg", f"step-{STEP:010d}/{ATTEMPT}/manifest.json",
     f"step-{STEP:010d}/{ATTEMPT}/absent.tg", f"step-{STEP:010d}/{ATTEMPT}/\0",
     f"step-{STEP:010d}/{ATTEMPT}/" + "x" * 5000, 5],
    ids=lambda k: str(k)[-20:],
)  # fmt: skip
def test_objects_that_lie_elsewhere(key: object, tmp_path: Path) -> None:
    """In memory and in a folder, beside which a secret lies."""
    (tmp_path / "secret").write_bytes(honest().object())
    forgery = honest().copy()
    forgery.record = [key, *forgery.truth()[1:]]
    source = forgery.root()
    folder = LocalStore(tmp_path / "a" / "root", sync=False)
    for stat in source.list():
        folder.compare_and_put(stat.key, source.read_all(stat.key, limit_bytes=1 << 20), expected=None)
    for store in (source, folder):
        with bounded(), pytest.raises(tidegate.LoadError) as caught:
            load_root(store)
        assert not isinstance(caught.value, OSError)
    folder.close()


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        [1, 2, 3],
        ["k"],
        ["k", 1],
        ["k", -1, "0"],
        ["k", 1.5, "0"],
        ["k", 1, 0],
        ["k", 1, "xyz"],
        ["k", 2**63, "0"],
    ],
    ids=str,
)
def test_object_records_of_another_form(record: object) -> None:
    refused(changed(lambda f: f.update(objects=[record])), only_root=True)


def test_objects_missing_twice_and_none() -> None:
    truth = honest().truth()
    refused(changed(lambda f: f.update(objects=[])), "missing", only_root=True)
    refused(changed(lambda f: f.update(objects=[truth, truth])), "twice", only_root=True)
    refused(changed(lambda f: f.update(objects=[truth] * 10_000)), "twice", only_root=True)


@pytest.mark.parametrize(("name", "value"), [("step", 8), ("step", -1), ("attempt", "f" * 32), ("attempt", "")])
def test_a_manifest_of_another_checkpoint(name: str, value: object) -> None:
    refused(changed(lambda f: f.update({name: value})), "another checkpoint", only_root=True)
