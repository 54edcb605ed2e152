"""Real processes that form process groups: started once, used for many cases, each in a group of its own."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from tests.kit.children import FORKS

ANSWER_TIMEOUT_S = 120.0
_GROUP_TIMEOUT = timedelta(seconds=60)
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class CrewError(AssertionError):
    """A rank has raised, or has given no answer."""


class Killed:
    """What `Crew.outcomes` has of a rank whose process is gone."""

    def __repr__(self) -> str:
        return "Killed"


class Crew:
    """Processes that run functions of test modules together.

    Args:
        size: How many, at most, take part in a group.
        device: "cpu", or "cuda": each rank has a GPU of its own, and NCCL beside gloo.
    """

    def __init__(self, size: int, device: str = "cpu") -> None:
        self._device = device
        self._folder = tempfile.TemporaryDirectory(prefix="crew-")
        self._members: list[tuple[BaseProcess, Connection] | None] = [None] * size

    def run(self, num_ranks: int, fn: Callable[..., Any], *args: object) -> list[Any]:
        """Run `fn(rank, *args)` on the first ranks, in a process group of just them; return what they return."""
        outcomes = self.outcomes(num_ranks, fn, *args)
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException | Killed):
                raise CrewError(f"rank {rank}: {outcome}")
        return outcomes

    def outcomes(self, num_ranks: int, fn: Callable[..., Any], *args: object) -> list[Any]:
        """As `run`, but exceptions are returned, and `Killed` for a rank whose process has ended."""
        address = f"file://{self._folder.name}/{uuid.uuid4().hex}"
        for rank in range(num_ranks):
            self._member(rank)[1].send((fn, args, address, rank, num_ranks, self._device))
        return [self._answer(rank) for rank in range(num_ranks)]

    def close(self) -> None:
        """End the processes."""
        for rank in range(len(self._members)):
            self._end(rank)
        self._folder.cleanup()

    def _member(self, rank: int) -> tuple[BaseProcess, Connection]:
        member = self._members[rank]
        if member is None:
            here, there = FORKS.Pipe()
            process = FORKS.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            member = self._members[rank] = process, here
        return member

    def _answer(self, rank: int) -> Any:
        process, connection = self._member(rank)
        ready = wait([connection, process.sentinel], ANSWER_TIMEOUT_S)
        if connection in ready:
            try:
                return connection.recv()
            except EOFError:
                pass
        elif not ready:
            self._end(rank)
            return CrewError(f"no answer within {ANSWER_TIMEOUT_S} s")
        self._end(rank)
        return Killed()

    def _end(self, rank: int) -> None:
        member, self._members[rank] = self._members[rank], None
        if member is not None:
            process, connection = member
            connection.close()
            process.kill()
            process.join()


def kill_me() -> None:
    """End this process at once, as the kernel's out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            fn, args, *group = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(fn, args, *group))


def _outcome(
    fn: Callable[..., Any], args: tuple[object, ...], address: str, rank: int, num_ranks: int, device: str
) -> Any:
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        _BACKENDS[device], init_method=address, rank=rank, world_size=num_ranks, timeout=_GROUP_TIMEOUT
    )
    try:
        return fn(rank, *args)
    except BaseException as exc:  # noqa: BLE001 - the test's process looks at it
        exc.add_note(traceback.format_exc())
        return _sendable(exc)
    finally:
        dist.destroy_process_group()


def _sendable(exc: BaseException) -> BaseException:
    import pickle

    try:
        pickle.loads(pickle.dumps(exc))
    except Exception:  # noqa: BLE001 - whatever it is, its text will do
        return CrewError(f"{type(exc).__name__}: {exc}\n{traceback.format_exc()}")
    return exc
