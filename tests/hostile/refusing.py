"""One honest checkpoint to forge others from, and the assertion that a forged one is refused, however it is loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.hostile.bounds import bounded
from tests.hostile.forge import KEY, STEP, Forgery, put_file, taken_apart
from tidegate.storage import Store

Fields = dict[str, Any]
NUM_TENSORS = 4  # those of state(), and as many extents


def state() -> dict[str, object]:
    """Two tensors of one word type in a chunk, a tie, a view with strides, an array, and containers."""
    shared = torch.arange(64.0)
    return {
        "w": shared,
        "tied": shared,
        "column": torch.arange(12.0).reshape(3, 4).t(),
        "half": torch.zeros(400).bfloat16(),
        "array": np.arange(6.0).reshape(2, 3),
        "list": [1, (2.5, None)],
        7: {"text": "x"},
    }


@functools.cache
def honest() -> Forgery:
    return taken_apart(state())


def changed(change: Callable[[Fields], object]) -> Forgery:
    """The honest checkpoint with another manifest."""
    forgery = honest().copy()
    change(forgery.fields)
    return forgery


def load_root(store: Store, step: int | str = STEP) -> object:
    """Load a step, or the "latest", of a root."""
    with tidegate.CheckpointEngine(store) as engine:
        return engine.load(step)  # type: ignore[arg-type]


def refused(
    forgery: Forgery,
    match: str | None = None,
    error: type[tidegate.CheckpointError] = tidegate.CorruptCheckpointError,
    *,
    only_root: bool = False,
    names_object: bool = False,
) -> None:
    """Assert that no way of loading takes a forgery, and that none costs much.

    Args:
        forgery: A checkpoint.
        match: What the error must say.
        error: Its class, exactly.
        only_root: Do not try it as a file that stands alone.
        names_object: Whether the error's `key` must be the object's.
    """
    root = forgery.root()
    loads: list[Callable[[], object]] = [lambda: load_root(root), lambda: load_root(root, "latest")]
    if not only_root:
        url = put_file(forgery.one_file())
        loads.append(lambda: tidegate.load(url))
    for load in loads:
        with bounded(), pytest.raises(error, match=match) as caught:
            load()
        assert type(caught.value) is error, repr(caught.value)
        assert len(str(caught.value)) < 3000
        if names_object:
            assert caught.value.key in (KEY, "model.tg")  # type: ignore[attr-defined]
