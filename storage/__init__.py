"""Named objects at rest: written once, read by ranges, visible only when durable."""

from .base import (
    ALIGNMENT_BYTES,
    DeviceBytes,
    DeviceRead,
    DeviceReader,
    DeviceReadingStore,
    DeviceStore,
    DeviceWriter,
    FolderStore,
    ObjectReader,
    ObjectStat,
    ObjectWriter,
    OpeningStore,
    PreparedStore,
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
from .s3 import S3Store
from .s3_options import S3Options
from .sink import SinkStore

__all__ = [
    "ALIGNMENT_BYTES",
    "DeviceBytes",
    "DeviceRead",
    "DeviceReader",
    "DeviceReadingStore",
    "DeviceStore",
    "DeviceWriter",
    "FolderStore",
    "InvalidKeyError",
    "LocalStore",
    "MemoryStore",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "ObjectReader",
    "ObjectStat",
    "ObjectWriter",
    "OpeningStore",
    "PreparedStore",
    "S3Options",
    "S3Store",
    "SinkStore",
    "StorageError",
    "Store",
    "StoreFullError",
    "StoreIOError",
    "StorePermissionError",
    "StoreTimeoutError",
    "open_store",
]
