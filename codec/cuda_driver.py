"""The CUDA driver through ctypes: the few calls that enqueue work, each in a microsecond or two of host time.

They keep the GIL (PyDLL). A thread that gives it up beside a busy Python thread gets it back only after the switch
interval, 5 ms by default, so a dozen calls a chunk that drop it would take longer than the chunk's encoding. Nothing
here waits for the device to get that far; who waits uses PyTorch's events, which drop the GIL. (Where a device's queue
is full, a call waits for room, and the training thread, which filled it, could not go on either.)
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from .errors import CodecError, CodecUnavailableError
from .extras import install_hint

_LIBRARY = "libcuda.so.1"
_SUCCESS, _NOT_READY = 0, 600
_END, _BUFFER_POINTER, _BUFFER_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_…

_Function: TypeAlias = Callable[..., int]
_POINTER, _SIZE, _INT, _UNSIGNED = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint


class CudaError(CodecError):
    """A call of the CUDA driver failed.

    Args:
        what: The C function, and the kernel if it launched one.
        status: Its CUresult.
        meaning: The driver's own words for it.
    """

    def __init__(self, what: str, status: int, meaning: str) -> None:
        super().__init__(what, status, meaning)
        self.what = what
        self.status = status
        self.meaning = meaning

    def __str__(self) -> str:
        return (
            f"{self.what} failed with CUDA error {self.status} ({self.meaning}); it may come from earlier work on the "
            "same device: run again with CUDA_LAUNCH_BLOCKING=1 to see which"
        )


class CudaDriver:
    """The driver's functions. All of them may be called by any thread; addresses and handles are plain integers.

    Streams and events are those of the context that is current in the calling thread: see `push`. Memory and kernels
    must stay until the stream has passed.

    Raises:
        CodecUnavailableError: If this machine has no NVIDIA driver.
    """

    def __init__(self) -> None:
        try:
            self._library = library = ctypes.PyDLL(_LIBRARY)
        except OSError as exc:
            raise CodecUnavailableError(
                f"the NVIDIA driver cannot be loaded ({exc}); use a machine that has one: {install_hint()}"
            ) from exc
        self._push = _bind(library, "cuCtxPushCurrent_v2", _POINTER)
        self._pop = _bind(library, "cuCtxPopCurrent_v2", _POINTER)
        self._record = _bind(library, "cuEventRecord", _POINTER, _POINTER)
        self._wait = _bind(library, "cuStreamWaitEvent", _POINTER, _POINTER, _UNSIGNED)
        self._query = _bind(library, "cuEventQuery", _POINTER)
        self._elapsed = _bind(library, "cuEventElapsedTime", _POINTER, _POINTER, _POINTER)
        self._memset = _bind(library, "cuMemsetD8Async", _POINTER, ctypes.c_ubyte, _SIZE, _POINTER)
        self._to_host = _bind(library, "cuMemcpyDtoHAsync_v2", _POINTER, _POINTER, _SIZE, _POINTER)
        self._to_device = _bind(library, "cuMemcpyHtoDAsync_v2", _POINTER, _POINTER, _SIZE, _POINTER)
        self._on_device = _bind(library, "cuMemcpyDtoDAsync_v2", _POINTER, _POINTER, _SIZE, _POINTER)
        shape = (_UNSIGNED,) * 7  # grid, thread block, bytes of shared memory
        self._launch = _bind(library, "cuLaunchKernel", _POINTER, *shape, _POINTER, _POINTER, _POINTER)
        self._popped = ctypes.c_void_p()  # written and never read
        self._popped_at = ctypes.addressof(self._popped)
        self._check("cuInit", _bind(library, "cuInit", _UNSIGNED)(0))

    def primary_context(self, device_index: int) -> int:
        """Return the context of a device that PyTorch works in too. It lives as long as the process."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        get = _bind(self._library, "cuDeviceGet", _POINTER, _INT)
        self._check("cuDeviceGet", get(ctypes.addressof(device), device_index))
        retain = _bind(self._library, "cuDevicePrimaryCtxRetain", _POINTER, _INT)
        self._check("cuDevicePrimaryCtxRetain", retain(ctypes.addressof(context), device.value))
        return context.value or 0

    def push(self, context: int) -> None:
        """Make a context current in this thread until `pop`. What was current before comes back then."""
        self._check("cuCtxPushCurrent", self._push(context))

    def pop(self) -> None:
        """Undo the last `push` of this thread."""
        self._check("cuCtxPopCurrent", self._pop(self._popped_at))

    def record(self, event: int, stream: int) -> None:
        """Record an event in a stream."""
        self._check("cuEventRecord", self._record(event, stream))

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event. Does not block."""
        self._check("cuStreamWaitEvent", self._wait(stream, event, 0))

    def is_done(self, event: int) -> bool:
        """Say whether a stream has passed an event."""
        status = self._query(event)
        if status not in (_SUCCESS, _NOT_READY):
            self._fail("cuEventQuery", status)
        return status == _SUCCESS

    def seconds_between(self, start: int, end: int) -> float:
        """Return the seconds from one event to another; both must be done, and made for timing."""
        milliseconds = ctypes.c_float()
        self._check("cuEventElapsedTime", self._elapsed(ctypes.addressof(milliseconds), start, end))
        return milliseconds.value / 1e3

    def fill(self, target: int, value: int, num_bytes: int, stream: int) -> None:
        """Enqueue setting target[num_bytes] in device memory to one byte."""
        self._check("cuMemsetD8Async", self._memset(target, value, num_bytes, stream))

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy to host memory, which must be page-locked, else the call waits for it."""
        self._check("cuMemcpyDtoHAsync", self._to_host(target, source, num_bytes, stream))

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy from page-locked host memory, which must not change before the stream has passed."""
        self._check("cuMemcpyHtoDAsync", self._to_device(target, source, num_bytes, stream))

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy inside one device's memory."""
        self._check("cuMemcpyDtoDAsync", self._on_device(target, source, num_bytes, stream))

    def launch(self, kernel: Kernel, grid: int, stream: int, *arguments: int) -> None:
        """Enqueue a kernel.

        Args:
            kernel: The kernel, of the context that is current.
            grid: Thread blocks, at least 1.
            stream: A stream of the same context.
            arguments: One integer a parameter.
        """
        # The arguments lie in memory of this very call, so threads, and what interrupts a thread, cannot mix them up.
        room = kernel.room()
        at = ctypes.addressof(room)
        kernel.pack_into(
            room, 0, _BUFFER_POINTER, at + _PREFIX.size, _BUFFER_SIZE, at + _SIZE_AT, _END, kernel.num_bytes, *arguments
        )
        status = self._launch(kernel.address, grid, 1, 1, kernel.threads, 1, 1, 0, stream, None, at)
        if status:
            self._fail(f"cuLaunchKernel of {kernel.name}", status)

    def _check(self, name: str, status: int) -> None:
        if status:
            self._fail(name, status)

    def _fail(self, what: str, status: int) -> None:
        text = ctypes.c_char_p()
        describe = _bind(self._library, "cuGetErrorString", _INT, _POINTER)
        known = describe(status, ctypes.addressof(text)) == 0 and text.value is not None
        raise CudaError(what, status, text.value.decode() if known and text.value else "an error unknown to the driver")


# What cuLaunchKernel reads: pairs of a name and a value, then (ours) the size that one of them points to.
_PREFIX = struct.Struct("@PPPPPN")
_SIZE_AT = struct.calcsize("@PPPPP")


class Kernel:
    """One kernel of one context.

    Args:
        name: Its name, for error messages.
        address: Its CUfunction.
        layout: Its parameters in `struct`'s letters: Q for an address and unsigned 64 bits, I for unsigned 32.
        threads: Threads of a thread block.
        keep: What must stay alive for the address to stay valid.
    """

    __slots__ = ("_keep", "address", "name", "num_bytes", "pack_into", "room", "threads")

    def __init__(self, name: str, address: int, layout: str, threads: int, keep: object) -> None:
        self.name = name
        self.address = address
        self.threads = threads
        self._keep = keep
        packing = struct.Struct(_PREFIX.format + layout)  # native alignment, which CUDA's parameters follow too
        self.num_bytes = packing.size - _PREFIX.size
        self.pack_into = packing.pack_into
        self.room: Callable[[], ctypes.Array[Any]] = ctypes.c_char * packing.size


@functools.cache
def cuda_driver() -> CudaDriver:
    """Return the driver of this process. A failure is not remembered.

    Raises:
        CodecUnavailableError: As `CudaDriver` does.
    """
    return CudaDriver()


def _bind(library: ctypes.PyDLL, name: str, *types: Any) -> _Function:
    function = library[name]  # a new object each time, unlike an attribute of the library
    function.argtypes = types
    function.restype = ctypes.c_int
    return function
