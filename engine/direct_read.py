"""Bytes of an object that its store brings right into the memory of a GPU; through host memory, should it fail to."""

from __future__ import annotations

import torch

from tidegate.storage.base import DeviceBytes, DeviceRead
from tidegate.storage.errors import StorageError

from .open_objects import OpenObjects


class DirectRead:
    """A read that has begun. Whoever began it must wait for it.

    Args:
        objects: Where the object is; they read into devices.
        key: The object.
        offset: Where in it the bytes begin.
        out: Where they go: uint8, 1-D, contiguous, CUDA, used by nothing that is queued.

    Attributes:
        failure: Why the store could not do it, where the bytes came through host memory instead.
    """

    def __init__(self, objects: OpenObjects, key: str, offset: int, out: torch.Tensor) -> None:
        self._objects = objects
        self._key = key
        self._offset = offset
        self._out = out
        reader = objects.device_reader(key)
        self._read: DeviceRead | None = None
        self.failure: StorageError | None = None
        try:
            self._read = reader.start_read(offset, DeviceBytes(out.data_ptr(), out.numel(), out.get_device(), out))
        except StorageError as exc:
            self.failure = exc

    def is_done(self) -> bool:
        """Whether `wait` has nothing to wait for."""
        return self._read is not None and self._read.is_done()

    def wait(self) -> None:
        """Wait until all of it is there. Blocks, without the GIL. Call it once.

        Raises:
            StorageError: It cannot be read through host memory either.
        """
        try:
            if self._read is not None:
                self._read.wait()
                return
        except StorageError as exc:
            self.failure = exc
        host = torch.empty(self._out.numel(), dtype=torch.uint8)
        self._objects.read_into(self._key, self._offset, host.numpy().data)
        self._out.copy_(host)  # waits for the copy
