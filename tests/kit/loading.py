"""Save and load through an engine of its own, for tests of loading."""

from __future__ import annotations

import tidegate
from tidegate.storage.base import Store
from tidegate.storage.memory import MemoryStore


def saved(state: object, codec: str = "zstd", store: Store | None = None, *, chunk_bytes: int) -> Store:
    """Save a state as step 0, by default to a new store in memory."""
    store = MemoryStore() if store is None else store
    with tidegate.CheckpointEngine(store, codec=codec, chunk_bytes=chunk_bytes) as engine:
        engine.save_async(state, step=0)
    return store


def load(store: Store, **options: object) -> object:
    """Load step 0."""
    with tidegate.CheckpointEngine(store) as engine:
        return engine.load(0, **options)  # type: ignore[arg-type]


def object_of(store: Store) -> tuple[str, int]:
    """Key and length of the object with the frames."""
    return next((stat.key, stat.num_bytes) for stat in store.list() if stat.key.endswith(".tg"))
