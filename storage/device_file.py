"""A file written from the memory of a CUDA device, through KvikIO; how to read into it is in device_input.py.

Where GPUDirect Storage works, the bytes never touch host memory. Elsewhere KvikIO copies them to page-locked buffers of
its own and writes those past the page cache: its "compatibility mode". Either way its threads need no GIL.
"""

from __future__ import annotations

import errno
import importlib
import os
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .base import DeviceBytes
from .errors import StorageError

OLDEST = (26, 10)
"""The oldest KvikIO that is used."""

NUM_THREADS = max(8, min(16, (os.cpu_count() or 1) * 3 // 4))
"""From the page cache to a GPU, 8 threads brought 47 GB/s, 12 and 16 of 16 cores 50, and beside decoding 24 were slower
(bench/results/gpu-tried.json)."""

# What a disk says. Other texts of the system may be about a library that is missing, not about our file.
_DISK_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
)
_load_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class Kvikio:
    """KvikIO, imported and set up.

    Attributes:
        module: `kvikio`.
        mode: How it writes on this machine, for reports.
    """

    module: ModuleType
    mode: str


_loaded: Kvikio | None = None


def load_kvikio() -> Kvikio:
    """Import KvikIO and set it up, at the first call. May block for a second.

    KvikIO's defaults are the whole process's. What the user has set stays, be it by its environment variables
    (KVIKIO_NTHREADS, KVIKIO_COMPAT_MODE) or in code; otherwise it gets NUM_THREADS threads, and its compatibility mode
    where there is no GPUDirect Storage driver. cuFile's log, which would appear in the working folder, goes nowhere,
    unless CUFILE_LOGFILE_PATH or CUFILE_ENV_PATH_JSON says where.

    Raises:
        StorageError: It is not installed, or does not work here.
    """
    global _loaded
    with _load_lock:
        if _loaded is None:
            if not {"CUFILE_LOGFILE_PATH", "CUFILE_ENV_PATH_JSON"} & os.environ.keys():
                os.environ["CUFILE_LOGFILE_PATH"] = os.devnull  # read when libcufile is loaded
            try:
                module = importlib.import_module("kvikio")
                _check_version(str(module.__version__))
                _loaded = Kvikio(module, _set_up(module, importlib.import_module("kvikio.defaults")))
            except (ImportError, OSError, RuntimeError) as exc:
                raise StorageError(
                    "bytes of a CUDA device cannot be written or read directly: "
                    f"KvikIO cannot be used ({one_line(exc)}); "
                    'install tidegate[cu13] or tidegate[cu12], as your torch has it, or open the store with io="auto"'
                ) from exc
        return _loaded


def _check_version(version: str) -> None:
    """Refuse a KvikIO that, when one of a read's tasks has failed, does not wait for the others: they would go on to
    fill memory that is somebody else's by then."""
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise ImportError(f"version {version} is too old: {OLDEST[0]}.{OLDEST[1]} or later is needed")


def _set_up(module: ModuleType, defaults: ModuleType) -> str:
    # One thread, KvikIO's own default, copies and writes by turns, so the disk rests half of the time.
    if not {"KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"} & os.environ.keys() and defaults.get("num_threads") == 1:
        defaults.set("num_threads", NUM_THREADS)
    if defaults.is_compat_mode_preferred():
        return "KvikIO without GPUDirect Storage (its compatibility mode)"
    if importlib.import_module("kvikio.cufile_driver").get("is_gds_available"):
        return "KvikIO with GPUDirect Storage"
    # Without its driver cuFile copies through host memory, too, and before that KvikIO waits for what is queued on the
    # default stream, where a training runs. Its compatibility mode does not.
    if "KVIKIO_COMPAT_MODE" not in os.environ:
        defaults.set("compat_mode", module.CompatMode.ON)
    return "KvikIO without GPUDirect Storage (it has no driver here)"


def open_file(path: str, flags: str) -> Any:
    """Open a file with KvikIO. Raises OSError; StorageError if KvikIO cannot be used."""
    kvikio = load_kvikio()
    try:
        return kvikio.module.CuFile(path, flags)
    except RuntimeError as exc:
        raise os_error(exc) from exc


class DeviceFile:
    """An open file that takes bytes of CUDA devices. Closed with `close`, or when it is dropped.

    Args:
        path: Where it can be opened. It must be there.

    Raises:
        OSError: It cannot be opened.
        StorageError: KvikIO cannot be used.
    """

    def __init__(self, path: str) -> None:
        self._handle = open_file(path, "r+")

    def write_at(self, offset: int, data: DeviceBytes) -> None:
        """Write all of `data` at `offset`. Blocks, without the GIL. Safe for threads whose ranges do not overlap.

        With GPUDirect Storage, KvikIO first waits for what is queued on the device's default stream.

        Raises:
            OSError: The write failed, with an errno where KvikIO's text names one.
        """
        # KvikIO holds no reference to the bytes, and fails what is under way when the file is closed: this frame keeps
        # bytes, future and file together until the write is over.
        try:
            future = self._handle.pwrite(CudaArray(data), data.num_bytes, offset)
            num_bytes = future.get()  # once: a second call is undefined
        except (RuntimeError, MemoryError) as exc:
            raise os_error(exc) from exc
        if num_bytes != data.num_bytes:
            raise OSError(errno.EIO, f"KvikIO wrote {num_bytes} of {data.num_bytes} bytes")

    def close(self) -> None:
        """Close the file. No write may be under way. May be called again."""
        self._handle.close()


@dataclass(frozen=True, slots=True)
class CudaArray:
    """Bytes of a device as KvikIO takes them."""

    data: DeviceBytes

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Show the bytes as KvikIO wants to see them (version 3 of the interface)."""
        shown = {"data": (self.data.address, False), "shape": (self.data.num_bytes,), "typestr": "|u1"}
        return {**shown, "strides": None, "version": 3}


def os_error(exc: RuntimeError | MemoryError) -> OSError:
    """Make an error of the system from one of KvikIO, which names the errno by its text only, and last."""
    if isinstance(exc, MemoryError):
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    text = one_line(exc)
    for number in _DISK_ERRNOS:
        if text.endswith(os.strerror(number)):
            return OSError(number, os.strerror(number))
    return OSError(f"KvikIO says: {text}")


def one_line(exc: BaseException | None) -> str:
    """Return an error's text without its line breaks."""
    return " ".join(str(exc).split())
