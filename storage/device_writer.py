"""Write one object to a folder, also from the memory of a CUDA device."""

from __future__ import annotations

from concurrent.futures import Future

from .base import ALIGNMENT_BYTES, DeviceBytes
from .errors import StorageError
from .local_writer import LocalWriter
from .oserrors import mapped_errors
from .pieces import Pieces


class LocalDeviceWriter(LocalWriter):
    """One object being written to a LocalStore, also from the memory of a CUDA device; see `DeviceWriter`."""

    def append_device(self, data: DeviceBytes) -> Future[None]:
        """Queue bytes of a device for KvikIO; see `DeviceWriter.append_device`.

        They must begin at a multiple of ALIGNMENT_BYTES in the object, or the returned future holds a StorageError: a
        device writes whole pages, and would write over what another thread puts on the same one.

        Raises:
            ValueError: Their number is no multiple of ALIGNMENT_BYTES.
        """
        if data.num_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"bytes of a device are appended in multiples of {ALIGNMENT_BYTES}, not {data.num_bytes}")
        self._check_open()
        pieces = Pieces(range(bool(data.num_bytes)))  # KvikIO's threads share it among them

        def submit(start: int, offset: int) -> None:
            self._submit(pieces, start, self._write_device, offset, data)

        return self._queue(data.num_bytes, pieces, submit)

    def _write_device(self, offset: int, data: DeviceBytes) -> None:
        if self._error is not None:
            raise self._error
        if offset % ALIGNMENT_BYTES:
            raise StorageError(
                f"cannot write bytes of a device at {offset} of {self._path}: this is no multiple of "
                f"{ALIGNMENT_BYTES}; append zero bytes up to one first",
                key=self._key,
            )
        with mapped_errors("write", self._path, self._key, data.num_bytes):
            self._file.write_device_at(offset, data)
