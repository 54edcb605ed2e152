"""Faults of one rank at one step of a save: it raises, finds the disk full, is killed, or stands still."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import tidegate.encode
import tidegate.snapshot
from tests.kit.crew import kill_me
from tests.kit.wrapping import WrappedStore, WrappedWriter
from tidegate.storage import ObjectWriter, Store, StoreFullError

STEPS = ("plan", "stage", "encode", "write", "seal", "commit")
KINDS = ("raise", "full", "kill", "stall")
STALL_LIMIT_S = 60.0


class Fault:
    """What happens, once, when a save comes to a step after `arm`.

    Args:
        step: One of STEPS.
        kind: One of KINDS.
    """

    def __init__(self, step: str, kind: str) -> None:
        self._step = step
        self._kind = kind
        self._is_armed = False
        self.is_released = threading.Event()

    def arm(self) -> None:
        """Let it happen from now on."""
        self._is_armed = True

    def at(self, step: str) -> None:
        """Come to a step."""
        if not self._is_armed or step != self._step:
            return
        self._is_armed = False
        match self._kind:
            case "raise":
                raise RuntimeError(f"the {step} step is broken")
            case "full":
                raise StoreFullError("no room is left", errno=errno.ENOSPC)
            case "kill":
                kill_me()
            case "stall":
                assert self.is_released.wait(STALL_LIMIT_S), "nobody has given the save up"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put it in the way of staging and encoding."""

        def before(step: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                self.at(step)
                return real(*args, **options)

            return call

        with (
            mock.patch.object(tidegate.snapshot, "copy_chunk", before("stage", tidegate.snapshot.copy_chunk)),
            mock.patch.object(tidegate.encode, "encode_frame", before("encode", tidegate.encode.encode_frame)),
        ):
            yield


class FaultState(dict[str, Any]):
    """A state that comes to the step "plan" when it is walked."""

    def __init__(self, content: dict[str, Any], fault: Fault) -> None:
        super().__init__(content)
        self._fault = fault

    def items(self) -> Any:
        self._fault.at("plan")
        return super().items()


class FaultStore(WrappedStore):
    """A store that comes to the steps "write", "seal" and "commit"."""

    def __init__(self, inner: Store, fault: Fault) -> None:
        super().__init__(inner)
        self._fault = fault

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> ObjectWriter:
        return _FaultWriter(super().create(key, size_hint_bytes=size_hint_bytes, replace=replace), key, self._fault)

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        if key.endswith("COMMIT"):
            self._fault.at("commit")
        super().compare_and_put(key, data, expected=expected)


class _FaultWriter(WrappedWriter):
    def __init__(self, inner: ObjectWriter, key: str, fault: Fault) -> None:
        super().__init__(inner, key)
        self._fault = fault

    def append(self, data: memoryview) -> Future[None]:
        self._fault.at("write")
        return super().append(data)

    def seal(self) -> None:
        self._fault.at("seal")
        super().seal()
