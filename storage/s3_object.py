"""The calls that make one object of S3: a put, or an upload and its completion."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Iterator

from .errors import ObjectExistsError, ObjectNotFoundError, StorageError
from .s3_body import Body
from .s3_calls import Attempt, Calls
from .s3_checksum import Checksummer
from .s3_client import Answer, object_arguments
from .s3_conditions import Conditions
from .s3_debts import TOKEN, Debt, Debts
from .s3_errors import Effect, effect_of
from .s3_parts import Part

ABORT_S = 15.0  # how long what is of no use any more may keep us


class NewObject:
    """One object on its way to the server. Every method blocks; `send_part` may be called by several threads at once.

    Args:
        calls: How the server is called.
        key: The object's key.
        checksummer: What the server verifies by.
        conditions: Whether it honours conditional writes.
        debts: For what is to be removed.
        replace: Whether it may replace an object.
        stop: Ends pauses and further attempts, except for those of `drop`.
    """

    def __init__(
        self,
        calls: Calls,
        key: str,
        *,
        checksummer: Checksummer,
        conditions: Conditions,
        debts: Debts,
        replace: bool,
        stop: threading.Event,
    ) -> None:
        self._calls = calls
        self._key = key
        self._checksummer = checksummer
        self._conditions = conditions
        self._debts = debts
        self._replace = replace
        self._stop = stop
        self._url = f"{calls.url}/{key}"
        self._abort_s = min(ABORT_S, calls.options.deadline_s)
        self._token = secrets.token_hex(16)  # tells our object from another's when an answer was lost
        self._parts: dict[int, dict[str, object]] = {}  # what completes the upload
        self._upload_id: str | None = None
        self._begin_error: StorageError | None = None
        self._has_begun = False
        self._num_strays = 0  # uploads that the server may have begun, and we do not know
        self._creates_late = False
        self._is_late = False
        self._may_be_there = False
        self._lock = threading.Lock()  # one thread begins the upload

    def send_part(self, part: Part) -> None:
        """Upload a part; the first one begins the upload. Raises StorageError."""
        number = part.number + 1
        upload_id = self._begin()
        checksum = self._checksummer.arguments(part.views)
        arguments = {**self._calls.at(self._key), "UploadId": upload_id, "PartNumber": number, **checksum}

        def call(attempt: Attempt) -> str:
            with self._hearing(), contextlib.closing(Body(part.views, attempt.check)) as body:
                answer = attempt.client.upload_part(**arguments, ContentLength=part.num_bytes, Body=body)
            return str(answer["ETag"])

        etag = self._calls.run(call, action=f"write part {number} of", key=self._key, stop=self._stop)
        self._parts[number] = {"PartNumber": number, "ETag": etag, **checksum}

    def put(self, rest: Part) -> None:
        """Make the object of `rest` alone. Raises StorageError."""
        checksum = self._checksummer.arguments(rest.views)
        arguments = {**self._calls.at(self._key), **object_arguments(self._calls.options), **checksum}
        arguments.update(self._condition(), Metadata={TOKEN: self._token}, ContentLength=rest.num_bytes)

        def call(attempt: Attempt) -> bool:
            self._may_be_there = True
            with self._hearing(), contextlib.closing(Body(rest.views, attempt.check)) as body:
                attempt.client.put_object(**arguments, Body=body if rest.num_bytes else b"")
            return True

        self._calls.run(call, action="write", key=self._key, recover=self._recover, stop=self._stop)

    def complete(self) -> None:
        """Make the object of the parts. Raises StorageError."""
        condition = self._condition()
        if condition and self._exists():  # not every server looks at a completion's condition
            raise self._exists_error()
        parts = [self._parts[number] for number in sorted(self._parts)]

        def call(attempt: Attempt) -> bool:
            self._may_be_there = True
            with self._hearing():
                attempt.client.complete_multipart_upload(
                    **self._calls.at(self._key), UploadId=self._upload_id, MultipartUpload={"Parts": parts}, **condition
                )
            return True

        self._calls.run(call, action="complete", key=self._key, recover=self._recover, stop=self._stop)
        self._upload_id = None
        self._end()
        if self._num_strays:
            self._pay(Debt(self._key, num_strays=self._num_strays, creates_late=self._creates_late))

    def drop(self) -> None:
        """Remove what is at the server. What is not to be had now, or may come later, the store's `Debts` keep."""
        self._end()
        self._pay(
            Debt(
                self._key,
                upload_id=self._upload_id,
                num_strays=self._num_strays,
                token=self._token if self._may_be_there else None,
                creates_late=self._creates_late,
                is_late=self._is_late,
            )
        )

    def _end(self) -> None:
        if self._has_begun:
            self._has_begun = False
            self._debts.end(self._key)

    def _pay(self, debt: Debt) -> None:
        if self._replace:  # other uploads of the key, and the object, may be another writer's
            debt = dataclasses.replace(debt, num_strays=0, creates_late=False, token=None)
        self._debts.owe(debt)
        self._debts.settle(self._abort_s)

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """Take down whether the body's request got no answer."""
        try:
            yield
        except BaseException as exc:
            self._is_late = self._is_late or effect_of(exc) is Effect.LATER
            raise

    @contextlib.contextmanager
    def _hearing_of_create(self) -> Iterator[None]:
        """Take down whether the body may have begun an upload that we know nothing of."""
        try:
            yield
        except BaseException as exc:
            effect = effect_of(exc)
            self._num_strays += effect is not Effect.NONE
            self._creates_late = self._creates_late or effect is Effect.LATER
            raise

    def _begin(self) -> str:
        """Begin the upload, once. Returns its id, or raises for every part what kept it from beginning."""
        with self._lock:
            if self._upload_id is None:
                if self._begin_error is not None:
                    raise self._begin_error

                def call(attempt: Attempt) -> str:
                    with self._hearing_of_create():
                        answer = attempt.client.create_multipart_upload(
                            **{**self._calls.at(self._key), **object_arguments(self._calls.options)},
                            **self._checksummer.upload_arguments(),
                            Metadata={TOKEN: self._token},
                        )
                    return str(answer["UploadId"])

                if not self._has_begun:
                    self._has_begun = True
                    self._debts.begin(self._key)
                try:
                    self._upload_id = self._calls.run(call, action="begin", key=self._key, stop=self._stop)
                except StorageError as exc:
                    self._begin_error = exc
                    raise
            return self._upload_id

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
        return bool(self._head().get("Metadata", {}).get(TOKEN) == self._token)

    def _head(self) -> Answer:
        def call(attempt: Attempt) -> Answer:
            return attempt.client.head_object(**self._calls.at(self._key))

        return self._calls.run(call, action="look up", key=self._key, deadline_s=self._abort_s)
