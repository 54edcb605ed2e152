"""Notice a rank that dies in a `dcp.save`, long before DCP's collectives do.

DCP's own rounds wait for every rank until the process group's time-out. So before a rank goes into the one that follows
`write_data`, the ranks tell each other over a council of their own (council.py) that they have written; a rank whose
pulse stands still, or that is silent past the deadline, fails the save on all others at once.

    coordinator:  prepare_global_plan   serve the council's board; its address travels with the plans
    every rank:   write_data            connect, write, say so ─▶ hear that all have
    coordinator:                        hear all ─▶ tell all

Not watched is what happens inside of DCP's rounds, and who cannot reach the board. A rank that raises between the round
of plans and `write_data`, in its planner's `finish_plan`, is waited for until the deadline.
"""

from __future__ import annotations

import socket
import time
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from .board import Board, connect_board, serve_board, serving_host
from .council import Council, failed
from .errors import CheckpointWarning, RankFailedError
from .options import check_seconds

_CONNECT_TIMEOUT = timedelta(seconds=15)
_COMING_S = 20.0
_LEAST_GRACE_S = 1.0
_GRACE_FRACTION = 0.1
_LONGEST_NAP_S = 0.02


class StayingError(RankFailedError):
    """A failure that leaves DCP on this rank, instead of being sent round.

    DCP catches whatever `write_data` raises and sends it to the coordinator, which would wait for the dead rank first.
    But it has to pickle it, before it sends anything; and this error raises itself then.
    """

    def __reduce__(self) -> NoReturn:
        raise RankFailedError(self.message, **self._fields)


class RankWatch:
    """This rank's part in watching over the saves of one writer.

    Args:
        deadline_s: How long a rank may take to write.
        silence_s: A rank that shows no sign of life for so long has failed.

    Raises:
        ConfigError: An argument is wrong.
    """

    def __init__(self, *, deadline_s: float, silence_s: float) -> None:
        check_seconds("rank_deadline_s", deadline_s)
        check_seconds("rank_silence_s", silence_s)
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._council: Council | None = None
        self._board: Board | None = None
        self._finalizer: weakref.finalize[..., RankWatch] | None = None
        self._address = ""
        self._began_s = 0.0
        self._present: set[int] = {0}
        self._is_awaited = False

    @staticmethod
    def host() -> str:
        """Name this rank's host, for `serve`."""
        return socket.gethostname()

    def serve(self, hosts: Sequence[object]) -> str:
        """On the coordinator: serve the board for the ranks on these hosts, once; return its address, "" if alone."""
        if len(hosts) < 2:
            return ""
        if self._council is None or self._council.num_ranks != len(hosts):
            self.close()
            mine = [self.host(), *(name if isinstance(name, str) else "" for name in hosts[1:])]
            host = serving_host(mine, dist.get_rank())
            try:
                board, port = serve_board(host)
            except RuntimeError as exc:  # DistError and its kinds
                _warn(f"the coordinator cannot serve the ranks at {host}", exc)
                return ""
            self._address = f"{host}:{port}"
            self._show(board, 0, len(hosts))
            self._is_awaited = False
        return self._address

    def begin(self, address: str, rank: int, num_ranks: int) -> None:
        """Begin to write. Connects, where that is not done yet. Blocks."""
        self._began_s = time.monotonic()
        if not address or address == self._address:
            return
        self.close()
        self._address = address
        host, _, port = address.rpartition(":")
        try:
            board = connect_board(host, int(port), _CONNECT_TIMEOUT)
            board.set(f"present/{rank}", "")
        except RuntimeError as exc:  # DistError and its kinds
            _warn(f"rank {rank} cannot reach the coordinator at {address}", exc)
            return
        self._show(board, rank, num_ranks)

    def agree(self, what: str, attempt: str) -> None:
        """Say that this rank has come to the end of writing, well or not, and wait for the others. Blocks.

        Args:
            what: The save, for messages.
            attempt: Names it.

        Raises:
            StayingError: A rank is dead, or silent past the deadline.
        """
        council = self._council
        if council is None:
            return
        deadline_s = self._began_s + self._deadline_s
        try:
            council.say(attempt)
            if council.is_coordinator:
                self._preside(council, attempt, deadline_s)
            else:
                self._hear(council, attempt, deadline_s)
        except RankFailedError as exc:
            failures = dict(exc.failures)
            message = failed(what, failures)
            raise StayingError(message.message, rank=min(failures), stage="write", failures=failures) from exc

    def close(self) -> None:
        """Show no pulse any more. Blocks for a moment on the coordinator, until the others have heard its last word."""
        council, self._council = self._council, None
        self._board, self._address = None, ""
        self._present = {0}
        if council is not None and self._finalizer is not None:
            self._finalizer.detach()
            council.close()

    def _preside(self, council: Council, attempt: str, deadline_s: float) -> None:
        try:
            council.gather(attempt, deadline_s, self._come(council.num_ranks))
            if not council.may_commit(attempt):
                raise failed("", {0: "came too late for the others, who have given the save up"})
        except RankFailedError as exc:
            council.reply_failure(attempt, exc.failures)
            council.clear(attempt)
            raise
        council.reply(attempt, dict.fromkeys(range(council.num_ranks)))
        council.clear(attempt)

    @staticmethod
    def _hear(council: Council, attempt: str, deadline_s: float) -> None:
        grace_s = max(_LEAST_GRACE_S, _GRACE_FRACTION * (deadline_s - time.monotonic()))
        try:
            council.hear(attempt, deadline_s + grace_s)
        except RankFailedError as exc:
            if list(exc.failures) != [0] or not council.goes_on(attempt):
                raise

    def _come(self, num_ranks: int) -> list[int]:
        """On the coordinator: return the ranks that have connected; those that have not are waited for, once."""
        deadline_s = time.monotonic() + (0.0 if self._is_awaited else _COMING_S)
        self._is_awaited = True
        nap_s = 0.001
        while self._board is not None:
            absent = [rank for rank in range(num_ranks) if rank not in self._present]
            self._present.update(rank for rank in absent if self._board.check([f"present/{rank}"]))
            if len(self._present) == num_ranks or time.monotonic() > deadline_s:
                break
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        return sorted(self._present)

    def _show(self, board: Board, rank: int, num_ranks: int) -> None:
        self._board = board
        self._council = Council(board, rank, num_ranks, silence_s=self._silence_s)
        self._council.show_pulse()
        self._finalizer = weakref.finalize(self, self._council.stop_pulse)
        self._finalizer.atexit = False


def _warn(what: str, cause: Exception) -> None:
    warnings.warn(
        f"{what}, so if a rank dies during a save, the others notice it only when the process group's time-out has "
        f"passed: {cause}",
        CheckpointWarning,
        stacklevel=4,
    )
