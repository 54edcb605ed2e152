"""COMMIT records made to harm: every checksum is right and the fields lie. All are refused, cheaply."""

from __future__ import annotations

import json
import pickle

import pytest

import tidegate
from tests.hostile.bounds import bounded
from tests.hostile.forge import STEP, commit_text
from tests.hostile.refusing import honest, load_root, refused, state
from tests.kit.bits import assert_same_bits

NO_COMMIT_NUMBERS = [None, -1, 1.5, True, "7", [], {}, float("inf"), float("-inf"), float("nan"), 2**63, 10**400]


@pytest.mark.parametrize("name", ["version", "step", "sequence", "manifest_bytes", "manifest_digest", "attempt"])
@pytest.mark.parametrize("value", NO_COMMIT_NUMBERS, ids=lambda v: str(v)[:10])
def test_a_commit_record_with_something_else_in_it(name: str, value: object) -> None:
    forgery = honest().copy()
    forgery.commit[name] = value
    refused(forgery, "COMMIT", only_root=True)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("version", 2, "version 2"), ("step", 8, "COMMIT"),
        ("attempt", "../../etc", "COMMIT"), ("attempt", "", "COMMIT"), ("attempt", "A" * 32, "COMMIT"),
        ("attempt", "0" * 41, "COMMIT"), ("manifest_bytes", 0, "COMMIT"), ("manifest_bytes", 2**62, "COMMIT"),
        ("manifest_digest", "0" * 16, "checksum"), ("manifest_digest", "x", "COMMIT"),
        ("manifest_digest", "-1", "COMMIT"),
    ],
)  # fmt: skip
def test_a_commit_record_that_lies(name: str, value: object, match: str) -> None:
    forgery = honest().copy()
    forgery.commit[name] = value
    refused(forgery, match, only_root=True)


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"[" * 60_000, b'{"tidegate-commit":' * 3000, b"9" * 5000, b"x" * 65_537, b" " * 10**6,
     commit_text([]), commit_text(None), commit_text("x"), commit_text({}), pickle.dumps(honest)],
    ids=lambda t: repr(t[:12]),
)  # fmt: skip
def test_texts_that_are_no_commit_record(text: bytes) -> None:
    store = honest().root()
    key = f"step-{STEP:010d}/COMMIT"
    store.delete(key)
    store.compare_and_put(key, text, expected=None)
    for step in (STEP, "latest"):
        with bounded(), pytest.raises(tidegate.CorruptCheckpointError, match="COMMIT"):
            load_root(store, step)


def test_a_damaged_record_does_not_hide_the_checkpoint_before_it() -> None:
    store = honest().root()
    store.compare_and_put("step-0000000008/COMMIT", commit_text({"sequence": float("inf")}), expected=None)
    with pytest.warns(tidegate.CheckpointWarning, match="step 8 is damaged"):
        assert_same_bits(load_root(store, "latest"), state())


def test_a_record_in_other_spacing_still_lets_a_load_fall_back() -> None:
    """COMMIT may be valid and not byte for byte what this build writes."""
    forgery = honest().copy()
    forgery.frames[0].header["raw_digest"] = 1
    store = forgery.root()
    key = f"step-{STEP:010d}/COMMIT"
    text = store.read_all(key, limit_bytes=1 << 16)
    store.compare_and_put(key, json.dumps(json.loads(text), indent=3).encode(), expected=text)
    with pytest.raises(tidegate.CorruptCheckpointError, match="chunk 0"):
        load_root(store, "latest")
