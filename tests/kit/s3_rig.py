"""A store on a real server whose client has faults."""

from __future__ import annotations

from typing import Any

from tests.kit.s3_faults import Faults
from tests.kit.seaweed import Seaweed
from tidegate.storage import S3Options, S3Store
from tidegate.storage.s3_client import make_client
from tidegate.storage.s3_options import with_environment

PART_BYTES = 5 << 20
_FIELDS: dict[str, Any] = {"part_bytes": PART_BYTES, "concurrency": 4, "timeout_s": 2.0, "deadline_s": 4.0}


class Rig:
    """A store whose client has faults; the environment must name the server."""

    def __init__(self, server: Seaweed, prefix: str, **fields: object) -> None:
        options = with_environment(S3Options(**{**_FIELDS, **fields}))
        self.client: Any = make_client(options)
        self.faults = Faults(self.client)
        self.store = S3Store(server.bucket, prefix, options=options, client=self.client)
        assert self.store.prepare() == []
        self._prefix = prefix
        self._plain = server.client()
        self._bucket = server.bucket

    def uploads(self) -> list[str]:
        """Keys of the uploads at the server, by a client without faults."""
        found = self._plain.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix)
        return [upload["Key"] for upload in found.get("Uploads", ())]

    def close(self) -> None:
        self.store.close()
        self.client.close()
        self._plain.close()
