"""Uploads that are not completed: invisible as objects, and billed. Listings show them as leftovers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from .base import ObjectStat
from .errors import InvalidKeyError, ObjectNotFoundError, StoreIOError
from .keys import check_key, is_reserved, partial_name
from .s3_calls import Attempt, Calls
from .s3_client import Answer, request_arguments
from .s3_errors import error_code
from .s3_reader import age_s


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that was begun and neither completed nor aborted.

    Attributes:
        key: The object that it would become.
        upload_id: The server's name for it.
        age_s: How long ago it was begun, by the server's clock.
    """

    key: str
    upload_id: str
    age_s: float

    @property
    def partial_key(self) -> str:
        """How a listing names it: as other stores name an unfinished write."""
        folder, slash, name = self.key.rpartition("/")
        return folder + slash + partial_name(name, hashlib.sha256(self.upload_id.encode()).hexdigest()[:16])


class Uploads:
    """The uploads of a store. Safe for threads.

    Args:
        calls: How the server is called.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def list(self, prefix: str = "", *, deadline_s: float | None = None) -> Iterator[Upload]:
        """Yield the uploads of objects whose keys start with `prefix` ("" or ending in "/"). Blocks."""
        root = self._calls.name("")
        markers: dict[str, object] = {}
        while True:
            page = self._page(root + prefix, markers, deadline_s)
            for entry in page.get("Uploads", ()):
                name = str(entry["Key"])
                key = name[len(root) :]
                if name.startswith(root + prefix) and _is_plain(key):
                    yield Upload(key, str(entry["UploadId"]), age_s(page, entry["Initiated"]))
            if not page.get("IsTruncated"):
                return
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def stats(self, prefix: str) -> Iterator[ObjectStat]:
        """Yield them as leftovers; nothing where we may not see them, or the server cannot say. Blocks."""
        try:
            for upload in self.list(prefix):
                try:
                    yield self._stat(upload)
                except ObjectNotFoundError:
                    continue
                except StoreIOError as exc:
                    if error_code(exc.__cause__) != "NoSuchUpload":
                        raise
        except (PermissionError, StoreIOError) as exc:
            if error_code(exc.__cause__) not in ("AccessDenied", "NotImplemented", "MethodNotAllowed"):
                raise

    def stat(self, partial_key: str) -> ObjectStat:
        """Look up one by its name as a leftover. Raises ObjectNotFoundError. Blocks."""
        upload = self.find(partial_key)
        if upload is None:
            raise ObjectNotFoundError(f"{self._calls.url} has no upload {partial_key!r}", key=partial_key)
        return self._stat(upload)

    def find(self, partial_key: str) -> Upload | None:
        """Look up one by its name as a leftover. Blocks."""
        folder, slash, _ = partial_key.rpartition("/")
        return next((each for each in self.list(folder + slash) if each.partial_key == partial_key), None)

    def abort(self, upload: Upload, *, deadline_s: float | None = None) -> None:
        """Abort one; no error if it is gone. Blocks."""

        def call(attempt: Attempt) -> None:
            attempt.client.abort_multipart_upload(**self._calls.at(upload.key), UploadId=upload.upload_id)

        try:
            self._calls.run(call, action="abort the upload of", key=upload.key, deadline_s=deadline_s)
        except ObjectNotFoundError:
            pass
        except StoreIOError as exc:
            if error_code(exc.__cause__) != "NoSuchUpload":
                raise

    def _page(self, prefix: str, markers: dict[str, object], deadline_s: float | None) -> Answer:
        def call(attempt: Attempt) -> Answer:
            return attempt.client.list_multipart_uploads(
                Bucket=self._calls.bucket, Prefix=prefix, **markers, **request_arguments(self._calls.options)
            )

        return self._calls.run(call, action="list the uploads of", key="", deadline_s=deadline_s)

    def _stat(self, upload: Upload) -> ObjectStat:
        num_bytes = 0
        marker: dict[str, object] = {}
        while True:
            page = self._parts(upload, marker)
            num_bytes += sum(int(part["Size"]) for part in page.get("Parts", ()))
            if not page.get("IsTruncated"):
                return ObjectStat(upload.partial_key, num_bytes, upload.age_s)
            marker = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def _parts(self, upload: Upload, marker: dict[str, object]) -> Answer:
        def call(attempt: Attempt) -> Answer:
            return attempt.client.list_parts(**self._calls.at(upload.key), UploadId=upload.upload_id, **marker)

        return self._calls.run(call, action="list the parts of", key=upload.key)


def _is_plain(key: str) -> bool:
    try:
        check_key(key)
    except InvalidKeyError:
        return False
    return not is_reserved(key)
