"""Named objects at rest: written once, read by ranges, visible only when durable."""

from .base import (
    ALIGNMENT_BYTES,
    DeviceBytes,
    DeviceStore,
    DeviceWriter,
    ObjectReader,
    ObjectStat,
    ObjectWriter,
    OpeningStore,
    Store,
)
from .errors import (
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoreFullError,
    StoreIOError,
    StorePermissionError,
    StoreTimeoutError,
)
from .local import LocalStore
from .memory import MemoryStore
from .open import open_store
from .sink import SinkStore

__all__ = [
    "ALIGNMENT_BYTES",
    "DeviceBytes",
    "DeviceStore",
    "DeviceWriter",
    "InvalidKeyError",
    "LocalStore",
    "MemoryStore",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "ObjectReader",
    "ObjectStat",
    "ObjectWriter",
    "OpeningStore",
    "SinkStore",
    "StorageError",
    "Store",
    "StoreFullError",
    "StoreIOError",
    "StorePermissionError",
    "StoreTimeoutError",
    "open_store",
]
