"""Publish a checkpoint, list what is published, and clear away what is not.

A step is published by its COMMIT record, written last and atomically (storage/FORMAT.md). Readers trust that record
alone: whatever lies beside it under other attempts is a leftover.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from tidegate.storage.base import FolderStore, ObjectStat, Store
from tidegate.storage.errors import InvalidKeyError, ObjectNotFoundError, StoreIOError

from .errors import CorruptCheckpointError, SaveError
from .paths import shown
from .types import JSON

COMMIT_NAME = "COMMIT"
MANIFEST_NAME = "manifest.json"
MAX_STEP = 10**10 - 1
_MAX_COMMIT_BYTES = 1 << 16
_MAX_MANIFEST_BYTES = 4 << 30
_STEP_FOLDER = re.compile(r"step-(\d{10})")
_ATTEMPT = re.compile("[0-9a-f]{8,40}")
_DIGEST = re.compile("[0-9a-f]{16}")
_PLAIN_LEFTOVER = re.compile(r"\.[^/]+\.[0-9a-f]{16}\.partial")


def step_folder(step: int) -> str:
    """Name the folder of a step: ten digits, so that names sort as numbers."""
    return f"step-{step:010d}"


def commit_key(step: int) -> str:
    """Key of a step's COMMIT record."""
    return f"{step_folder(step)}/{COMMIT_NAME}"


def attempt_key(step: int, attempt: str, name: str) -> str:
    """Key of an object of one attempt at a step."""
    return f"{step_folder(step)}/{attempt}/{name}"


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What COMMIT says: which attempt holds the step, and where it stands in the order of commits.

    Attributes:
        step: The step.
        sequence: One more than the highest sequence committed before. Order comes from this, never from a clock.
        attempt: The attempt that is the checkpoint.
        manifest_bytes: Length of its manifest.
        manifest_digest: XXH3-64 of its manifest.
        bases: Step and attempt of each checkpoint that this one is a difference to, the nearest first; none of a full
            one. They must stay as long as this one does.
    """

    step: int
    sequence: int
    attempt: str
    manifest_bytes: int
    manifest_digest: int
    bases: tuple[tuple[int, str], ...] = ()

    @property
    def manifest_key(self) -> str:
        """Key of the manifest."""
        return attempt_key(self.step, self.attempt, MANIFEST_NAME)

    def dump(self) -> bytes:
        """Write the record, its own checksum included."""
        body = self.to_json()
        return json.dumps({"tidegate-commit": body, "xxh3_64": _checksum(body)}).encode() + b"\n"

    def to_json(self) -> dict[str, JSON]:
        """Write its fields."""
        return {
            "version": 1,
            "step": self.step,
            "sequence": self.sequence,
            "attempt": self.attempt,
            "manifest_bytes": self.manifest_bytes,
            "manifest_digest": f"{self.manifest_digest:016x}",
            **({"bases": [[step, attempt] for step, attempt in self.bases]} if self.bases else {}),
        }

    @classmethod
    def from_json(cls, body: JSON) -> CommitRecord:
        """Read and check what `to_json` wrote. Raises ValueError, KeyError or TypeError."""
        if not isinstance(body, dict):
            raise ValueError(f"{shown(body)} is no COMMIT record")
        if type(body["version"]) is not int or body["version"] != 1:
            raise ValueError(f"it is of version {shown(body['version'])}; this build reads version 1")
        return cls(
            _whole(body["step"]),
            _whole(body["sequence"]),
            _hex(body["attempt"], _ATTEMPT),
            _whole(body["manifest_bytes"]),
            int(_hex(body["manifest_digest"], _DIGEST), 16),
            tuple(map(_base, _items(body.get("bases", [])))),
        )


def _checksum(body: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())


def parse_commit(text: bytes, step: int) -> CommitRecord:
    """Read and check a COMMIT record. Raises CorruptCheckpointError."""
    try:
        fields = json.loads(text)
        body = fields["tidegate-commit"]
        if fields["xxh3_64"] != _checksum(body):
            raise ValueError("its checksum does not hold")
        record = CommitRecord.from_json(body)
        if record.step != step:
            raise ValueError(f"it names another step, {record.step}")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CorruptCheckpointError(
            f"COMMIT of step {step} is damaged: {exc}", key=commit_key(step), stage="open"
        ) from exc
    return record


def _base(item: JSON) -> tuple[int, str]:
    step, attempt = _items(item)
    number = _whole(step)
    if number > MAX_STEP:
        raise ValueError(f"{number} is no step")
    return number, _hex(attempt, _ATTEMPT)


def _items(value: JSON) -> list[JSON]:
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is no list")
    return value


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{shown(value)} is no whole number")
    return value


def _hex(value: object, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{shown(value)} is not in hex digits, or not in as many as it should be")
    return value


def read_commit_bytes(store: Store, step: int) -> bytes | None:
    """Return the COMMIT record of a step as it is stored; None if the step is not committed. Blocks."""
    key = commit_key(step)
    try:
        return store.read_all(key, limit_bytes=_MAX_COMMIT_BYTES)
    except ObjectNotFoundError:
        return None
    except StoreIOError as exc:
        if exc.errno is not None:
            raise
        raise CorruptCheckpointError(f"{key} is too long for a COMMIT record", key=key, stage="open") from exc


def committed_steps(store: Store) -> list[int]:
    """List the steps that have a COMMIT record, readable or not, in ascending order. Blocks."""
    steps = []
    for stat in store.list():
        folder, _, rest = stat.key.partition("/")
        match = _STEP_FOLDER.fullmatch(folder)
        if match and rest == COMMIT_NAME:
            steps.append(int(match[1]))
    return sorted(steps)


def _steps(store: Store) -> list[int]:
    """List the steps that may be committed, in ascending order. Blocks."""
    if not isinstance(store, FolderStore):
        return committed_steps(store)
    return sorted({int(match[1]) for name in store.folders() if (match := _STEP_FOLDER.fullmatch(name))})


def read_commits(store: Store) -> tuple[list[CommitRecord], dict[int, CorruptCheckpointError]]:
    """Read every COMMIT record. Blocks.

    Returns:
        The readable ones, oldest first by (sequence, step), and the error of each step whose record is damaged.
    """
    records = []
    damaged = {}
    for step in _steps(store):
        try:
            text = read_commit_bytes(store, step)
            if text is not None:
                records.append(parse_commit(text, step))
        except InvalidKeyError:
            continue  # a link, a folder or a device: no object of ours, and no listing would have it
        except CorruptCheckpointError as exc:
            damaged[step] = exc
    records.sort(key=lambda record: (record.sequence, record.step))
    return records, damaged


def read_manifest(store: Store, record: CommitRecord) -> bytes:
    """Read a commit's manifest, and check that it is the one. Blocks."""
    key = record.manifest_key
    num_bytes = store.stat(key).num_bytes
    if num_bytes != record.manifest_bytes or num_bytes > _MAX_MANIFEST_BYTES:
        raise CorruptCheckpointError(
            f"{key} has {num_bytes} bytes; its COMMIT record says {record.manifest_bytes}", key=key, stage="open"
        )
    text = bytearray(num_bytes)
    store.read_into(key, 0, memoryview(text))
    if xxhash.xxh3_64_intdigest(bytes(text)) != record.manifest_digest:
        raise CorruptCheckpointError(f"{key} is damaged: its checksum does not hold", key=key, stage="open")
    return bytes(text)


def publish(store: Store, record: CommitRecord, replaces: bytes | None) -> None:
    """Commit: put the record if the step's COMMIT is still `replaces` (None: absent). Blocks; durable on return.

    Raises:
        ObjectExistsError: Another attempt won.
    """
    store.compare_and_put(commit_key(record.step), record.dump(), expected=replaces)


def is_committed(store: Store, step: int, attempt: str) -> bool:
    """Tell whether an attempt is what its step is now. Blocks. Raises CorruptCheckpointError where nobody can say."""
    text = read_commit_bytes(store, step)
    return text is not None and parse_commit(text, step).attempt == attempt


def check_bases(store: Store, record: CommitRecord, replaces: bytes | None) -> None:
    """Check, right after a difference was published, that its bases are still committed; else take it back. Blocks.

    Whoever deletes a base looks for differences to it after he has deleted its COMMIT (retention.py), so either he has
    seen this one, or this sees that the base has gone.

    Raises:
        SaveError: One is gone. The step is as it was before.
    """
    for step, attempt in record.bases:
        if not is_committed(store, step, attempt):
            if replaces is not None:
                store.compare_and_put(commit_key(record.step), replaces, expected=record.dump())
            elif read_commit_bytes(store, record.step) == record.dump():
                store.delete(commit_key(record.step))
            raise SaveError(
                f"save of step {record.step} failed, nothing was committed: it was a difference to step {step}, which "
                "another process has deleted or replaced meanwhile; save again",
                key=commit_key(step),
                stage="commit",
            )


def leftovers(store: Store, *, min_age_s: float) -> Iterator[ObjectStat]:
    """Yield the objects of ours that no commit holds and that are at least `min_age_s` old. Blocks.

    Only what lies under step folders is ours, and beside them what a killed `tidegate.save` has left.
    """
    stats = list(store.list())
    held: set[str] = set()
    for step in committed_steps(store):
        try:
            text = read_commit_bytes(store, step)
            if text is not None:
                record = parse_commit(text, step)
                held.update(f"{step_folder(of)}/{name}/" for of, name in ((step, record.attempt), *record.bases))
        except CorruptCheckpointError:
            held.add(f"{step_folder(step)}/")  # what a damaged record holds is unknown: keep all of it
    for stat in stats:
        folder, _, rest = stat.key.partition("/")
        is_ours = rest != COMMIT_NAME if _STEP_FOLDER.fullmatch(folder) else _PLAIN_LEFTOVER.fullmatch(stat.key)
        is_partial = stat.key.endswith(".partial")
        is_held = any(stat.key.startswith(prefix) for prefix in held) and not is_partial
        if is_ours and not is_held and stat.age_s >= min_age_s:
            yield stat
