"""Find out whether a server honours conditional writes."""

from __future__ import annotations

import contextlib
import secrets
import threading

from .errors import ObjectExistsError, ObjectNotFoundError, StorageError, StoreIOError
from .keys import partial_name
from .s3_calls import Calls
from .s3_client import Client
from .s3_errors import error_code

_WRONG_ETAG = '"00000000000000000000000000000000"'
_NOTE = (
    "{url}: the server does not honour conditional writes (If-None-Match, If-Match), so nothing keeps two processes "
    "from committing the same step at the same moment; let one process save there"
)


class Conditions:
    """Knows whether puts may carry conditions. AWS honours them; another server is tried once, on an object of ours.

    Args:
        calls: How the server is called.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._are_honoured: bool | None = None
        self._lock = threading.Lock()
        self._notes: list[str] = []

    def are_honoured(self) -> bool:
        """Tell whether the server honours them. Blocks for a few calls, once."""
        with self._lock:
            if self._are_honoured is None:
                self._are_honoured = self._calls.options.endpoint_url is None or self._probe()
                if not self._are_honoured:
                    self._notes.append(_NOTE.format(url=self._calls.url))
            return self._are_honoured

    def take_notes(self) -> list[str]:
        """Return what has to be told, once."""
        with self._lock:
            notes, self._notes = self._notes, []
            return notes

    def _probe(self) -> bool:
        key = partial_name("condition-probe", secrets.token_hex(8))  # so that `gc` finds what a killed process leaves
        try:
            if not self._put(key, IfNoneMatch="*", is_new=True):
                return False
            return not self._put(key, IfNoneMatch="*") and not self._put(key, IfMatch=_WRONG_ETAG)
        finally:
            with contextlib.suppress(StorageError):
                self._calls.run(lambda at: at.client.delete_object(**self._calls.at(key)), action="delete", key=key)

    def _put(self, key: str, *, is_new: bool = False, **condition: str) -> bool:
        """Put the probe; tell whether the server took it."""

        def put(client: Client) -> bool:
            client.put_object(**self._calls.at(key), Body=b"probe", **condition)
            return True

        try:
            return self._calls.run(
                lambda at: put(at.client), action="put", key=key, recover=lambda error: True if is_new else None
            )
        except (ObjectExistsError, ObjectNotFoundError):
            return False
        except StoreIOError as exc:
            if error_code(exc.__cause__) in ("NotImplemented", "InvalidArgument", "InvalidRequest"):
                return not is_new  # it takes no such header at all
            raise
