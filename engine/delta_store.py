"""A plain store of bases and differences: one call saves a checkpoint, one loads it. No engine to keep."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from tidegate.storage.base import Store

from .delta import DeltaPolicy
from .engine import CheckpointEngine
from .errors import InternalError
from .report import SaveReport
from .restore import MapLocation, PartPaths
from .types import JSON

READ_AGAIN = DeltaPolicy(keep_bytes=0, keep_device_bytes=0)
"""Keeps nothing in memory between saves."""


def save_checkpoint(
    state: object,
    root: str | os.PathLike[str] | Store,
    *,
    step: int,
    delta: DeltaPolicy | None = READ_AGAIN,
    codec: str = "auto",
    overwrite: bool = False,
    metadata: Mapping[str, JSON] | None = None,
) -> SaveReport:
    """Save a checkpoint, as a difference to the newest one of the root where that may be. Blocks until it is durable.

    The base is read again from the root. A training loop that saves often is better off with an engine, which saves in
    the background and can keep the base in memory.

    Args:
        state: As for `CheckpointEngine.save_async`, and so are `step`, `overwrite` and `metadata`.
        root: Folder or URL of the checkpoints, or a Store.
        step: There.
        delta: How many differences may follow each other; None: store all of it.
        codec: As for `CheckpointEngine`; one that decodes on every machine.
        overwrite: There.
        metadata: There.

    Raises:
        UnsupportedStateError, StepExistsError, SaveError, ConfigError: As there. Nothing was committed.
    """
    with CheckpointEngine(root, codec=codec, delta=delta) as engine:
        engine.save_async(state, step=step, overwrite=overwrite, metadata=metadata)
        report = engine.wait()
    if report is None:
        raise InternalError("a save ended without a report")
    return report


def load_checkpoint(
    root: str | os.PathLike[str] | Store,
    step: int | Literal["latest"] = "latest",
    *,
    map_location: MapLocation = None,
    into: object | None = None,
    part: PartPaths = None,
) -> object:
    """Load a checkpoint, whatever it is a difference to. Blocks. See `CheckpointEngine.load`."""
    with CheckpointEngine(root) as engine:
        return engine.load(step, map_location=map_location, into=into, part=part)
