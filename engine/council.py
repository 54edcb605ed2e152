"""How the ranks of a save agree: every one speaks, the coordinator decides, every one hears. Never past a deadline.

The messages go over a TCPStore of our own, not over collectives: a process group of gloo is of no more use after its
first time-out, and cannot say which rank was late. Each message is a key that nobody waits for in order, so a rank that
fails, hangs or dies hinders no other from hearing of it.

    rank r:       put  <topic>/<r>        "done", "failed" or "dead" …
    coordinator:  take <topic>/0 … n-1,  decide,  put <topic>/reply/<r>
    rank r:       take <topic>/reply/<r>

Each rank's process also shows a pulse, so that one that was killed is noticed long before the deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from .board import Board, connect_board, serve_board, serving_host
from .collector import collector_at_rest
from .errors import RankFailedError
from .types import JSON

_PIECE_BYTES = 4 << 20
"""A TCPStore takes values of up to 8 MiB."""

_LEAST_NAP_S = 0.0005
_LONGEST_NAP_S = 0.02
_NAP_FRACTION = 0.025
"""A nap as part of the time waited so far: what is waited for is noticed that much late at most."""

_BOARD_S_PER_RANK = 20e-6
"""Naps of many ranks are longer, so that they ask the board no more than 50,000 times a second together."""

_FAREWELL_S = 5.0
_UNDECIDED, _COMMIT, _ABORT = "", "commit", "abort"

Failures = dict[int, str]
_T = TypeVar("_T")


class Council:
    """The ranks of one engine.

    Args:
        board: Shared by them and used by nobody else; the coordinator's process serves it.
        rank: This rank, 0 … num_ranks - 1; 0 is the coordinator.
        num_ranks: How many there are.
        silence_s: A rank whose pulse was not felt for so long counts as dead.
    """

    def __init__(self, board: Board, rank: int, num_ranks: int, *, silence_s: float = 30.0) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._board = board
        self._silence_s = silence_s
        self._is_closed = threading.Event()
        self._pulse: threading.Thread | None = None
        self._last_reply: dict[int, str] = {}

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    def show_pulse(self) -> None:
        """Show from now on, by a thread of its own, that this rank's process lives."""
        self._pulse = threading.Thread(target=self._beat, name="tidegate-pulse", daemon=True)
        self._pulse.start()

    def say(self, topic: str, message: JSON = None, *, failure: str | None = None) -> None:
        """Tell the coordinator something, or that this rank has failed. Does not block."""
        self._put(f"{topic}/{self.rank}", {"failure": failure} if failure is not None else {"message": message})

    def hear(self, topic: str, deadline_s: float) -> JSON:
        """Wait for the coordinator's reply.

        Args:
            topic: Of what was said.
            deadline_s: By `time.monotonic`.

        Raises:
            RankFailedError: Some rank has failed, or the coordinator gives no answer.
        """
        reply = self._take(f"{topic}/reply/{self.rank}", 0, deadline_s)
        if isinstance(reply, str):
            raise failed(topic, {0: reply})
        failures = reply.get("failures")
        if isinstance(failures, dict):
            raise failed(topic, {int(rank): str(text) for rank, text in failures.items()})
        return reply.get("message")

    def gather(self, topic: str, deadline_s: float, ranks: Sequence[int] | None = None) -> list[JSON]:
        """On the coordinator: wait for what the ranks, by default all, say.

        Raises:
            RankFailedError: With those that have failed, as soon as one has. They have not been told yet.
        """
        pending = list(range(self.num_ranks) if ranks is None else ranks)
        found: dict[int, JSON] = {}
        failures: Failures = {}
        watch = _Watch(self._board, self._silence_s)
        since_s = time.monotonic()
        while pending and not failures:
            arrived = [rank for rank in pending if self._is_there(f"{topic}/{rank}")]
            with collector_at_rest():
                messages = {rank: self._read(f"{topic}/{rank}") for rank in arrived}
            for rank, message in messages.items():
                if message.get("failure") is not None:
                    failures[rank] = str(message["failure"])
                found[rank] = message.get("message")
            pending = [rank for rank in pending if rank not in found]
            since_s = time.monotonic() if arrived else since_s  # the others are not far, as a rule
            if pending and not failures:
                failures = watch.dead(pending) or self._late(pending, deadline_s)
                self._nap(since_s)
        if failures:
            raise failed(topic, failures)
        return [found[rank] for rank in sorted(found)]

    def reply(self, topic: str, messages: Mapping[int, JSON]) -> None:
        """On the coordinator: answer ranks."""
        for rank, message in messages.items():
            self._put_reply(topic, rank, {"message": message})

    def reply_failure(self, topic: str, failures: Mapping[int, str]) -> None:
        """On the coordinator: tell every rank which have failed."""
        node: JSON = {str(rank): text for rank, text in failures.items()}
        for rank in range(self.num_ranks):
            self._put_reply(topic, rank, {"failures": node})

    def may_commit(self, topic: str) -> bool:
        """On the coordinator: settle that the save is committed, unless a rank has given it up."""
        return self._decide(topic, _COMMIT) == _COMMIT

    def may_abort(self, topic: str) -> bool:
        """Settle that the save is given up, unless the coordinator goes on to commit it, or cannot be asked."""
        try:
            return self._decide(topic, _ABORT) == _ABORT
        except RankFailedError:
            return False

    def goes_on(self, topic: str) -> bool:
        """Settle that the save is given up; tell whether the coordinator goes on to commit it nevertheless."""
        try:
            return self._decide(topic, _ABORT) == _COMMIT
        except RankFailedError:
            return False

    def clear(self, topic: str) -> None:
        """On the coordinator: forget what was said and decided; replies stay for those that are late."""
        for rank in range(self.num_ranks):
            self._delete(f"{topic}/{rank}")

    def stop_pulse(self) -> None:
        """Show no sign of life any more. Does not block."""
        self._is_closed.set()

    def close(self) -> None:
        """End the pulse. On the coordinator, wait for a moment until the others have heard the last word: then its
        process may end, and the board with it. May be called again."""
        if not self._is_closed.is_set():
            with contextlib.suppress(RankFailedError):
                self._await_heard()
        self._is_closed.set()
        if self._pulse is not None:
            self._pulse.join()

    def _put_reply(self, topic: str, rank: int, reply: dict[str, JSON]) -> None:
        key = f"{topic}/reply/{rank}"
        self._put(key, reply)
        self._last_reply[rank] = key

    def _await_heard(self) -> None:
        watch = _Watch(self._board, self._silence_s)
        deadline_s = time.monotonic() + _FAREWELL_S
        waiting = {rank: key for rank, key in self._last_reply.items() if rank != self.rank}
        while waiting and time.monotonic() < deadline_s:
            gone = watch.dead(list(waiting))
            waiting = {rank: key for rank, key in waiting.items() if rank not in gone and self._is_there(key)}
            time.sleep(_LEAST_NAP_S)

    def _decide(self, topic: str, wanted: str) -> str:
        key = f"{topic}/decision"
        return self._call(lambda: self._board.compare_set(key, _UNDECIDED, wanted)).decode()

    def _late(self, pending: Sequence[int], deadline_s: float) -> Failures:
        if time.monotonic() < deadline_s:
            return {}
        return dict.fromkeys(pending, "gave no answer before the deadline; its process runs, but hangs or is too slow")

    def _take(self, key: str, whose: int, deadline_s: float) -> dict[str, JSON] | str:
        """Wait for a message and take it away; or say why there is none."""
        watch = _Watch(self._board, self._silence_s)
        since_s = time.monotonic()
        while not self._is_there(key):
            if dead := watch.dead([whose]):
                return dead[whose]
            if time.monotonic() > deadline_s:
                return "gave no answer before the deadline; its process runs, but hangs or is too slow"
            self._nap(since_s)
        return self._read(key)

    def _nap(self, since_s: float) -> None:
        """Sleep for a while, given since when somebody is waited for."""
        least_s = max(_LEAST_NAP_S, _BOARD_S_PER_RANK * self.num_ranks)
        time.sleep(min(_LONGEST_NAP_S, max(least_s, _NAP_FRACTION * (time.monotonic() - since_s))))

    def _is_there(self, key: str) -> bool:
        return bool(self._call(lambda: self._board.check([key])))

    def _put(self, key: str, message: dict[str, JSON]) -> None:
        octets = zlib.compress(json.dumps(message, separators=(",", ":")).encode(), 1)
        pieces = [octets[at : at + _PIECE_BYTES] for at in range(0, len(octets), _PIECE_BYTES)]
        for i, piece in enumerate(pieces[1:], 1):
            self._call(partial(self._board.set, f"{key}/{i}", piece))
        head = len(pieces).to_bytes(4, "little") + pieces[0]
        self._call(lambda: self._board.set(key, head))  # last: whoever finds it finds all

    def _read(self, key: str) -> dict[str, JSON]:
        head = self._call(lambda: self._board.get(key))
        pieces = [head[4:]]
        for i in range(1, int.from_bytes(head[:4], "little")):
            pieces.append(self._call(partial(self._board.get, f"{key}/{i}")))
            self._delete(f"{key}/{i}")
        self._delete(key)
        found: dict[str, JSON] = json.loads(zlib.decompress(b"".join(pieces)))
        return found

    def _delete(self, key: str) -> None:
        self._call(lambda: self._board.delete_key(key))

    def _call(self, run: Callable[[], _T]) -> _T:
        try:
            return run()
        except RuntimeError as exc:  # DistError and its kinds: the coordinator's process is gone
            raise failed("", {0: f"cannot be reached: its process is gone, or the network is ({exc})"}) from exc

    def _beat(self) -> None:
        for number in itertools.count():
            try:
                self._board.set(f"pulse/{self.rank}", str(number))
            except RuntimeError:
                return
            if self._is_closed.wait(self._silence_s / 8):
                return


class _Watch:
    """Feels the pulses of ranks that are waited for."""

    def __init__(self, board: Board, silence_s: float) -> None:
        self._board = board
        self._silence_s = silence_s
        self._next_look_s = 0.0
        self._felt: dict[int, tuple[bytes, float]] = {}

    def dead(self, ranks: Sequence[int]) -> Failures:
        """Return the ranks whose pulse stands still."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return {}
        self._next_look_s = now_s + self._silence_s / 8
        failures: Failures = {}
        for rank in ranks:
            pulse = self._pulse_of(rank)
            before, since_s = self._felt.get(rank, (None, now_s))
            if pulse != before:
                since_s = now_s
            self._felt[rank] = pulse, since_s
            if now_s - since_s > self._silence_s:
                failures[rank] = (
                    f"has shown no sign of life for {self._silence_s:g} s; its process was killed, or stands still"
                )
        return failures

    def _pulse_of(self, rank: int) -> bytes:
        try:
            key = f"pulse/{rank}"
            return self._board.get(key) if self._board.check([key]) else b""
        except RuntimeError as exc:
            raise failed("", {0: f"cannot be reached: its process is gone, or the network is ({exc})"}) from exc


def failed(what: str, failures: Mapping[int, str]) -> RankFailedError:
    """Return the error of a save that failed on some ranks, and so on all."""
    ranks = sorted(failures)
    causes = "; ".join(f"rank {rank} {failures[rank]}" for rank in ranks[:8])
    more = f"; and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return RankFailedError(
        f"{what + ': ' if what else ''}failed on all ranks, nothing was committed: {causes}{more}",
        rank=ranks[0],
        stage="commit",
        failures=dict(failures),
    )


def open_council(group: dist.ProcessGroup, *, silence_s: float = 30.0) -> Council:
    """Connect the ranks of a process group. Every rank of it calls this at the same time. Blocks.

    The group is used for this only: two small objects travel over it.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    hosts: list[str] = [""] * num_ranks
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    first = dist.get_global_rank(group, 0)
    address: list[object] = ["", 0]
    if rank == 0:
        host = serving_host(hosts, first)
        board, port = serve_board(host)
        address = [host, port]
    dist.broadcast_object_list(address, src=first, group=group)
    if rank != 0:
        board = connect_board(str(address[0]), int(str(address[1])))
    council = Council(board, rank, num_ranks, silence_s=silence_s)
    council.show_pulse()
    return council
