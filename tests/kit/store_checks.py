"""Short questions about a store, and races between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tidegate.storage import StorageError, Store
from tidegate.storage.keys import is_reserved

TIMEOUT_S = 60.0


def race(num_threads: int, run: Callable[[int], None]) -> list[BaseException | None]:
    """Run `run(i)` on that many threads at once; what each of them raised."""
    barrier = threading.Barrier(num_threads)
    raised: list[BaseException | None] = [None] * num_threads

    def one(i: int) -> None:
        barrier.wait(TIMEOUT_S)
        try:
            run(i)
        except StorageError as exc:
            raised[i] = exc

    threads = [threading.Thread(target=one, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    return raised


def listing(store: Store, prefix: str = "") -> dict[str, int]:
    """Key and length of the objects, without leftovers."""
    return {stat.key: stat.num_bytes for stat in store.list(prefix) if not is_reserved(stat.key)}


def leftovers(store: Store) -> list[str]:
    return [stat.key for stat in store.list() if is_reserved(stat.key)]
