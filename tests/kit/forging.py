"""Edit a checkpoint and sign it anew, so that nothing but the check under test can refuse it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from tidegate.commit import CommitRecord, commit_key, parse_commit


def record_of(root: Path, step: int) -> CommitRecord:
    """Read a step's COMMIT record."""
    return parse_commit((root / commit_key(step)).read_bytes(), step)


def attempt_folder(root: Path, step: int) -> Path:
    """The folder of a step's manifest and objects."""
    return (root / record_of(root, step).manifest_key).parent


def sign(root: Path, step: int, manifest: bytes) -> None:
    """Put a manifest in a step's place, and a COMMIT record that fits it."""
    record = record_of(root, step)
    (root / record.manifest_key).write_bytes(manifest)
    signed = replace(record, manifest_bytes=len(manifest), manifest_digest=xxhash.xxh3_64_intdigest(manifest))
    (root / commit_key(step)).write_bytes(signed.dump())


def edit_manifest(root: Path, step: int, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a step's manifest and sign it."""
    fields = json.loads((root / record_of(root, step).manifest_key).read_bytes())
    edit(fields)
    sign(root, step, json.dumps(fields).encode())
