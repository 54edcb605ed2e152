"""Delta chains: what a checkpoint that is stored as the difference to an earlier one says about that. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .commit import CommitRecord
from .errors import ConfigError, CorruptCheckpointError
from .paths import shown
from .residual import KINDS, RESIDUAL_VERSION, Kind
from .types import JSON

DELTA = "delta"
"""The feature of a manifest that has the key of this name."""

MAX_CHAIN = 256


@dataclass(frozen=True, slots=True)
class DeltaPolicy:
    """How an engine stores checkpoints as differences to the one committed before.

    A chunk is stored as a difference where a sample of it says that this is smaller. Names, shapes, dtypes or chunks
    that have changed make a full checkpoint, and so does a base that is gone.

    Attributes:
        max_chain: The most differences in a row; the next checkpoint is full. To load one, all before it in its chain
            are read, up to the full one.
        keep_bytes: The most host memory for a copy of the last checkpoint; what has no room is read again from the
            store. None: a quarter of the host budget, which becomes smaller by that.
        keep_device_bytes: The most memory of each GPU for a copy of its chunks, which are then encoded there. What has
            no room is encoded on the CPU. None: a quarter of what the device budget, or without one the device,
            has left when the encoder is made.
    """

    max_chain: int = 8
    keep_bytes: int | None = None
    keep_device_bytes: int | None = None

    def __post_init__(self) -> None:
        if type(self.max_chain) is not int or not 1 <= self.max_chain <= MAX_CHAIN:
            raise ConfigError(f"max_chain is {self.max_chain!r}; give a whole number from 1 to {MAX_CHAIN}")
        for name in ("keep_bytes", "keep_device_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ConfigError(f"{name} is {value!r}; give a whole number of bytes, or None")


@dataclass(frozen=True, slots=True)
class DeltaChunk:
    """How one chunk is stored: the kind of its residual, and the digest of its own bytes (FRAME.md)."""

    kind: Kind
    raw_digest: int


@dataclass(frozen=True, slots=True)
class DeltaPart:
    """What a manifest says of its base.

    Attributes:
        base: The COMMIT record of the checkpoint that this one is a difference to.
        chunks: The chunks whose frames hold residuals.
    """

    base: CommitRecord
    chunks: Mapping[int, DeltaChunk]


def delta_to_json(part: DeltaPart) -> JSON:
    """Write it."""
    rows: list[JSON] = [[i, item.kind, f"{item.raw_digest:016x}"] for i, item in sorted(part.chunks.items())]
    return {"version": RESIDUAL_VERSION, "base": part.base.to_json(), "chunks": rows}


def delta_from_json(node: JSON, num_chunks: int) -> DeltaPart:
    """Read and check it. Raises CorruptCheckpointError."""
    fields = node if isinstance(node, dict) else {}
    if type(fields.get("version")) is not int or fields["version"] != RESIDUAL_VERSION:
        raise _damaged(f"it is of version {shown(fields.get('version'))}; this build reads {RESIDUAL_VERSION}")
    try:
        base = CommitRecord.from_json(fields.get("base"))
    except (ValueError, KeyError, TypeError) as exc:
        raise _damaged(f"it does not say what its base is ({exc})") from exc
    rows = fields.get("chunks")
    chunks: dict[int, DeltaChunk] = {}
    for row in rows if isinstance(rows, list) else [None]:
        index, kind, text = row if isinstance(row, list) and len(row) == 3 else (None, None, None)
        known = next((name for name in KINDS if name == kind), None)
        if type(index) is not int or not 0 <= index < num_chunks or index in chunks or known is None:
            raise _damaged(f"{shown(row)} is no chunk and its residual")
        if not isinstance(text, str) or len(text) != 16:
            raise _damaged(f"{shown(text)} is no digest")
        chunks[index] = DeltaChunk(known, int(text, 16))
    return DeltaPart(base, chunks)


def check_chain(record: CommitRecord, part: DeltaPart | None) -> None:
    """Check that a COMMIT record and its manifest say the same of the base.

    Raises:
        CorruptCheckpointError: They do not, or the chain is none.
    """
    base = part.base if part is not None else None
    expected = ((base.step, base.attempt), *base.bases) if base is not None else ()
    if record.bases != expected:
        raise _damaged(f"COMMIT of step {record.step} names other bases than its manifest")
    if base is not None and (base.sequence >= record.sequence or len(record.bases) > MAX_CHAIN):
        raise _damaged(f"step {record.step} cannot be a difference to step {base.step}, which is not older")


def _damaged(why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"a difference to another checkpoint is damaged: {why}", stage="open")
