"""Write one object to S3: parts travel while more is appended, and `seal` makes it appear."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from concurrent.futures import Future
from typing import Protocol

from .errors import StorageError, StoreFullError
from .s3_calls import Calls
from .s3_checksum import Checksummer
from .s3_conditions import Conditions
from .s3_debts import Debts, forget_all, indebted
from .s3_object import ABORT_S, NewObject
from .s3_parts import Claim, Gatherer, Part
from .workers import WorkerPool


class Sealed(Protocol):
    """Is told that an object of this key has appeared."""

    def __call__(self, key: str) -> None: ...


class S3Writer:
    """One object being written to an S3Store. Made by `S3Store.create`; see `ObjectWriter`.

    Bytes go from the caller's memory to the socket, or to awscrt's copy of the part that travels, without another copy,
    except for those that are less than a part. An object shorter than a part is one put at `seal`.

    Args:
        calls: How the server is called.
        key: The object's key.
        pool: Who uploads.
        checksummer: What the server verifies by.
        conditions: Whether it honours conditional writes.
        debts: For what is to be removed.
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
        debts: Debts,
        replace: bool,
        sealed: Sealed,
    ) -> None:
        self._calls = calls
        self._key = key
        self._pool = pool
        self._sealed = sealed
        self._url = f"{calls.url}/{key}"
        self._gatherer = Gatherer(calls.options)
        self._in_flight: dict[int, int] = {}
        self._error: BaseException | None = None
        self._is_open = True
        self._is_over = False
        self._stop = threading.Event()
        self._object = NewObject(
            calls,
            key,
            checksummer=checksummer,
            conditions=conditions,
            debts=debts,
            replace=replace,
            stop=self._stop,
        )
        self._changed = threading.Condition()  # guards the fields above
        self._append_lock = threading.Lock()  # one append at a time waits for room
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
                    self._object.put(rest)
                else:
                    self._object.complete()
            except BaseException as exc:
                self._fail(exc)
                raise
            finally:
                rest.release(self._error)
            self._is_over = True
            unfinished.discard(self)
            self._sealed(self._key)

    def abort(self) -> None:
        """Abort the upload; see `ObjectWriter.abort`. Gives up after some seconds: the store does it later, or `gc`."""
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
            self._object.drop()
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
            self._object.send_part(part)
        except BaseException as exc:  # noqa: BLE001 - the append's future and `seal` carry it
            error = exc
        self._end(part, error)

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

    def _has_room(self) -> bool:
        parts = list(self._in_flight.values())
        num_bytes = sum(parts)
        if self._calls.options.transport != "urllib3":
            num_bytes += sum(parts[: self._calls.options.concurrency])  # awscrt's copies
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


def abort_unfinished() -> None:
    """Abort what no one has ended, and what could not be aborted earlier. Blocks."""
    for writer in list(unfinished):
        writer.abort()
    for debts in list(indebted):
        debts.finish(ABORT_S)


# This module is imported before those that end saves at exit, so this runs after them.
atexit.register(abort_unfinished)
for _each in (unfinished.clear, forget_all):  # the threads, and the uploads, are the parent's
    os.register_at_fork(after_in_child=_each)
