"""What is left after each kill of a saver or a server on S3, and a file that says so."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import machine
from tests.kit.seaweed import Seaweed

RESULTS = os.environ.get("TIDEGATE_S3_KILLS_RESULT")
"""Name of a file of JSON that the outcome is added to; None: nowhere."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill and what was found right after it.

    Attributes:
        pause_s: When it came, after the saver or the save had begun.
        outcome: "killed", or what became of the save: "committed", or the class of its error.
        newest_step: The newest step that loads, bit for bit; the newest one that was committed, or later.
        num_uploads: Uploads at the server that nobody completes any more, since `gc` last ran.
        num_stray_objects: Objects that no commit holds, since then.
        num_owed: Writes of which the store said, after it was closed, that something may be left: the server did not
            answer to all that it asked.
    """

    pause_s: float
    outcome: str
    newest_step: int
    num_uploads: int
    num_stray_objects: int
    num_owed: int = 0


def write_outcome(name: str, kills: list[Kill], **more: object) -> None:
    """Add one campaign to the file of results, if one is asked for."""
    if RESULTS is None:
        return
    path = Path(RESULTS)
    found = json.loads(path.read_text()) if path.exists() else {}
    found["machine"] = machine()
    found[name] = {
        "commit": found["machine"]["commit"],
        "kills": len(kills),
        "outcomes": {kind: sum(kill.outcome == kind for kill in kills) for kind in sorted({k.outcome for k in kills})},
        "most_uploads_before_gc": max(kill.num_uploads for kill in kills),
        "most_stray_objects_before_gc": max(kill.num_stray_objects for kill in kills),
        "newest_step": kills[-1].newest_step,
        **more,
        "each": [asdict(kill) for kill in kills],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def uploads_at(server: Seaweed, prefix: str = "") -> list[str]:
    """Keys of the uploads at a server."""
    client = server.client()
    found = client.list_multipart_uploads(Bucket=server.bucket, Prefix=prefix)
    client.close()
    return [upload["Key"] for upload in found.get("Uploads", ())]
