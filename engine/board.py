"""Where the messages of a council are put up: a TCPStore of its own, in the coordinator's process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

_TIMEOUT = timedelta(seconds=60)


class Board(Protocol):
    """What a council needs of `torch.distributed.Store`."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all of the keys are there."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key; wait for it where it is not there."""
        ...

    def set(self, key: str, value: bytes | str, /) -> None:
        """Put a value up."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Take a value down."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Put a value up if the present one is `expected`, "" for none; return what is there then."""
        ...


def serving_host(hosts: Sequence[str], global_rank: int) -> str:
    """Return by which name ranks find the coordinator's host.

    Args:
        hosts: The hosts of all ranks, the coordinator's first.
        global_rank: The coordinator's rank in the whole job: of rank 0, torchrun has told all where it is.
    """
    if len(set(hosts)) == 1:
        return "localhost"
    return os.environ.get("MASTER_ADDR", hosts[0]) if global_rank == 0 else hosts[0]


def serve_board(host: str) -> tuple[Board, int]:
    """Serve a board from this process; return it and its port."""
    from torch._C._distributed_c10d import TCPStore  # torch.distributed exports it, which type checkers do not see

    board = TCPStore(host, 0, None, True, _TIMEOUT, wait_for_workers=False)
    return cast(Board, board), int(board.port)


def connect_board(host: str, port: int, timeout: timedelta = _TIMEOUT) -> Board:
    """Connect to the board that another process serves. Blocks. Raises RuntimeError if it cannot be reached."""
    from torch._C._distributed_c10d import TCPStore

    return cast(Board, TCPStore(host, port, None, False, timeout, wait_for_workers=False))
