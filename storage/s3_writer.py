"""Write one object to S3: parts travel while more is appended, and `seal` makes it appear."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import weakref
from concurrent.futures import Future
from typing import Protocol

from .errors import ObjectExistsError, ObjectNotFoundError, StorageError, StoreFullError
from .s3_body import Body
from .s3_calls import Attempt, Calls
from .s3_checksum import Checksummer
from .s3_client import Answer, object_arguments
from .s3_conditions import Conditions
from .s3_parts import Claim, Gatherer, Part
from .s3_uploads import Upload, Uploads
from .workers import WorkerPool

_TOKEN = "tidegate-write"
_ABORT_S = 15.0


class Sealed(Protocol):
    """Is told that an object of this key has appeared."""

    def __call__(self, key: str) -> None: ...


class S3Writer:
    """One object being written to an S3Store. Made by `S3Store.create`; see `ObjectWriter`.

    Bytes go from the caller's memory to the socket without a copy, except for those that are less than a part. An
    object shorter than a part is one put at `seal`.

    Args:
        calls: How the server is called.
        key: The object's key.
        pool: Who uploads.
        checksummer: What the server verifies by.
        conditions: Whether it honours conditional writes.
        uploads: For what is to be aborted.
        replace: Whether `seal` may replace an object.
        sealed: Called when the object has appeared.
    """

    def __init__(
        self,
        calls: Calls,
        key: str,
        *,
        pool: WorkerPool,
        checksummer: Checksummer,
        conditions: Conditions,
        uploads: Uploads,
        replace: bool,
        sealed: Sealed,
    ) -> None:
        self._calls = calls
        self._key = key
        self._pool = pool
        self._checksummer = checksummer
        self._conditions = conditions
        self._uploads = uploads
        self._replace = replace
        self._sealed = sealed
        self._url = f"{calls.url}/{key}"
        self._abort_s = min(_ABORT_S, calls.options.deadline_s)
        self._token = secrets.token_hex(16)  # tells our object from another's when an answer was lost
        self._gatherer = Gatherer(calls.options)
        self._parts: dict[int, dict[str, object]] = {}  # what completes the upload
        self._in_flight: dict[int, int] = {}
        self._upload_id: str | None = None
        self._may_have_strays = False
        self._may_be_there = False
        self._error: BaseException | None = None
        self._is_open = True
        self._is_over = False
        self._stop = threading.Event()
        self._changed = threading.Condition()  # guards the fields above
        self._append_lock = threading.Lock()  # one append at a time waits for room
        self._upload_lock = threading.Lock()  # one thread begins the upload
        self._end_lock = threading.Lock()  # one seal or abort at a time
        unfinished.add(self)

    def append(self, data: memoryview) -> Future[None]:
        """Queue bytes for the store's threads; see `ObjectWriter.append`. Blocks while the budget is used up."""
        claim = Claim()
        with self._append_lock:
            with self._changed:
                self._check_open()
                if self._error is not None:
                    claim.drop(self._error)
                    return claim.future
                view = data.cast("B") if data.format != "B" or data.ndim != 1 else data[:]
                self._gatherer.add(view, claim)
                del view
                self._send()
                self._gatherer.keep()
            claim.drop()
            with self._changed:
                self._changed.wait_for(self._has_room)
        return claim.future

    def seal(self) -> None:
        """Make the object visible; see `ObjectWriter.seal`."""
        with self._end_lock:
            with self._changed:
                self._check_open()
                self._is_open = False
                rest = self._gatherer.rest()
                is_short = rest.number == 0
                if not is_short and rest.num_bytes:
                    self._submit(rest)
                self._changed.wait_for(lambda: not self._in_flight)
            try:
                if self._error is not None:
                    raise self._error
                if is_short:
                    self._put(rest)
                else:
                    self._complete()
            except BaseException as exc:
                self._fail(exc)
                raise
            finally:
                rest.release(self._error)
            self._is_over = True
            unfinished.discard(self)
            self._sealed(self._key)

    def abort(self) -> None:
        """Abort the upload; see `ObjectWriter.abort`. Gives up after some seconds: `gc` finds what is left."""
        with self._changed:
            self._is_open = False
            if not self._is_over:
                self._stop.set()
                if self._error is None:
                    self._error = StorageError(f"{self._url} was aborted; create a new writer", key=self._key)
        with self._end_lock:
            if self._is_over:
                return
            with self._changed:
                self._gatherer.rest().release(self._error)
                self._changed.wait_for(lambda: not self._in_flight)
            with contextlib.suppress(StorageError):
                self._drop()
            self._is_over = True
            unfinished.discard(self)

    def _send(self) -> None:
        """Submit what is enough for a part: a whole one, or a short one where threads would have nothing to do."""
        while True:
            part = self._gatherer.cut(early=len(self._in_flight) < self._calls.options.concurrency)
            if part is None:
                return
            self._submit(part)

    def _submit(self, part: Part) -> None:
        self._in_flight[part.number] = part.num_bytes
        try:
            if part.number >= self._calls.options.max_parts:
                raise StoreFullError(
                    f"{self._url} would need more than {self._calls.options.max_parts} parts; raise part_bytes",
                    key=self._key,
                )
            self._pool.submit(self._upload, part)
        except (RuntimeError, StoreFullError) as exc:
            error: StorageError
            if isinstance(exc, StorageError):
                error = exc
            else:
                error = StorageError(
                    f"cannot write {self._url}: its store was closed, or opened before a fork", key=self._key
                )
                error.__cause__ = exc
            self._end(part, error)

    def _upload(self, part: Part) -> None:
        error: BaseException | None = None
        try:
            if self._error is not None:
                raise self._error
            self._send_part(part)
        except BaseException as exc:  # noqa: BLE001 - the append's future and `seal` carry it
            error = exc
        self._end(part, error)

    def _send_part(self, part: Part) -> None:
        number = part.number + 1
        upload_id = self._begin()
        checksum = self._checksummer.arguments(part.views)
        arguments = {**self._calls.at(self._key), "UploadId": upload_id, "PartNumber": number, **checksum}

        def call(attempt: Attempt) -> str:
            with contextlib.closing(Body(part.views, attempt.check)) as body:
                answer = attempt.client.upload_part(**arguments, ContentLength=part.num_bytes, Body=body)
            return str(answer["ETag"])

        etag = self._calls.run(call, action=f"write part {number} of", key=self._key, stop=self._stop)
        self._parts[number] = {"PartNumber": number, "ETag": etag, **checksum}

    def _begin(self) -> str:
        """Begin the upload, once. Returns its id."""
        with self._upload_lock:
            if self._upload_id is None:
                if self._error is not None:
                    raise self._error

                def call(attempt: Attempt) -> str:
                    self._may_have_strays = True
                    answer = attempt.client.create_multipart_upload(
                        **self._calls.at(self._key),
                        **{**object_arguments(self._calls.options), **self._checksummer.upload_arguments()},
                        Metadata={_TOKEN: self._token},
                    )
                    self._may_have_strays = attempt.number > 0
                    return str(answer["UploadId"])

                self._upload_id = self._calls.run(call, action="begin", key=self._key, stop=self._stop)
            return self._upload_id

    def _end(self, part: Part, error: BaseException | None) -> None:
        part.release(error)
        with self._changed:
            del self._in_flight[part.number]
            if error is not None:
                self._fail(error)
            if self._error is not None:
                self._gatherer.rest().release(self._error)
            elif self._is_open:
                self._send()
            self._changed.notify_all()

    def _put(self, rest: Part) -> None:
        checksum = self._checksummer.arguments(rest.views)
        arguments = {**self._calls.at(self._key), **object_arguments(self._calls.options), **checksum}
        arguments.update(self._condition(), Metadata={_TOKEN: self._token}, ContentLength=rest.num_bytes)

        def call(attempt: Attempt) -> bool:
            self._may_be_there = True
            with contextlib.closing(Body(rest.views, attempt.check)) as body:
                attempt.client.put_object(**arguments, Body=body if rest.num_bytes else b"")
            return True

        self._calls.run(call, action="write", key=self._key, recover=self._recover, stop=self._stop)

    def _complete(self) -> None:
        condition = self._condition()
        if condition and self._exists():  # not every server looks at a completion's condition
            raise self._exists_error()
        parts = [self._parts[number] for number in sorted(self._parts)]

        def call(attempt: Attempt) -> bool:
            self._may_be_there = True
            attempt.client.complete_multipart_upload(
                **self._calls.at(self._key), UploadId=self._upload_id, MultipartUpload={"Parts": parts}, **condition
            )
            return True

        self._calls.run(call, action="complete", key=self._key, recover=self._recover, stop=self._stop)
        self._upload_id = None
        if self._may_have_strays and not self._replace:
            with contextlib.suppress(StorageError):
                self._uploads.abort_of(self._key, deadline_s=self._abort_s)

    def _condition(self) -> dict[str, object]:
        if self._replace:
            return {}
        if self._conditions.are_honoured():
            return {"IfNoneMatch": "*"}
        if self._exists():
            raise self._exists_error()
        return {}

    def _exists(self) -> bool:
        try:
            self._head()
        except ObjectNotFoundError:
            return False
        return True

    def _exists_error(self) -> ObjectExistsError:
        return ObjectExistsError(f"{self._url} is there already; it is never overwritten unless asked", key=self._key)

    def _recover(self, error: StorageError) -> bool | None:
        """Whether the object is ours after all, though the server now says that it cannot be written."""
        try:
            return True if self._is_ours() else None
        except StorageError:
            return None

    def _is_ours(self) -> bool:
        return bool(self._head().get("Metadata", {}).get(_TOKEN) == self._token)

    def _head(self) -> Answer:
        def call(attempt: Attempt) -> Answer:
            return attempt.client.head_object(**self._calls.at(self._key))

        return self._calls.run(call, action="look up", key=self._key, deadline_s=self._abort_s)

    def _drop(self) -> None:
        """Remove what is at the server."""
        if self._upload_id is not None:
            self._uploads.abort(Upload(self._key, self._upload_id, 0.0), deadline_s=self._abort_s)
        if self._may_have_strays and not self._replace:
            self._uploads.abort_of(self._key, deadline_s=self._abort_s)
        if self._may_be_there and not self._replace:
            with contextlib.suppress(ObjectNotFoundError):
                if self._is_ours():
                    self._calls.run(
                        lambda at: at.client.delete_object(**self._calls.at(self._key)),
                        action="delete", key=self._key, deadline_s=self._abort_s,
                    )  # fmt: skip

    def _has_room(self) -> bool:
        num_bytes = sum(self._in_flight.values())
        return num_bytes <= self._calls.options.in_flight_bytes or self._error is not None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._stop.set()  # what is still tried would be of no use

    def _check_open(self) -> None:
        if not self._is_open:
            raise self._error or StorageError(
                f"{self._url} was sealed already; create a new writer to replace it", key=self._key
            )


unfinished: weakref.WeakSet[S3Writer] = weakref.WeakSet()


def _abort_unfinished() -> None:
    for writer in list(unfinished):
        writer.abort()


# This module is imported before those that end saves at exit, so this runs after them.
atexit.register(_abort_unfinished)
os.register_at_fork(after_in_child=unfinished.clear)  # the threads, and the uploads, are the parent's
