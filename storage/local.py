"""Objects as files in a folder. For Linux."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat as stat_module
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from .base import ObjectStat
from .device_file import load_kvikio
from .device_probe import DeviceChoice, choose
from .device_writer import LocalDeviceWriter
from .errors import InvalidKeyError, ObjectExistsError, ObjectNotFoundError, StorageError, StoreIOError
from .folders import FolderChain, sync_folder
from .keys import LOCK_SUFFIX, check_key, check_new_key, check_prefix, is_reserved, partial_name
from .listing import folder_names, object_stat, scan
from .local_reader import LocalReader, read_some
from .local_writer import LocalWriter
from .locks import name_lock, release, try_lock
from .oserrors import free_bytes, mapped_errors
from .output_file import IOMode, OutputFile
from .workers import WorkerPool

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a FIFO must not hang
_MAX_RACES = 100
_WORTH_KVIKIO_BYTES = 128 << 20


class LocalStore:
    """A store in a folder. Safe for threads, and for several processes and machines on one root.

    An object's bytes go into `.<name>.<random>.partial` in its folder, and get their name by a hard link (or by a
    rename, to replace). Everything stays inside the root: the root may be a symbolic link; none below it is followed.

    Args:
        root: The folder. It is made at the first write.
        io: "auto" writes past the page cache (O_DIRECT) what is aligned to 4 KiB, if the filesystem takes that;
            "direct" makes it an error if not; "buffered" never does, nor does `compare_and_put`. "gds" is "auto", and
            its writers also take bytes of CUDA devices, which KvikIO writes (`DeviceWriter`); so may those of "auto"
            after `prepare_for_device`. What is loaded to CUDA devices is read by KvikIO with "gds", and with "auto"
            where there is much of it.
        num_threads: How many threads write. One disk took 1.9, 2.6 and 3.0 GB/s from one, four and eight.
        sync: Whether `seal`, `compare_and_put` and `delete` make things durable. False is for tests and RAM disks.

    Raises:
        StorageError: `root` is there but is no folder; or `io` is "gds" and KvikIO cannot be used.
        ValueError: An argument is wrong.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, io: IOMode = "auto", num_threads: int = 8, sync: bool = True
    ) -> None:
        if io not in ("auto", "direct", "buffered", "gds"):
            raise ValueError(f'io must be "auto", "direct", "buffered" or "gds", not {io!r}')
        if not os.fspath(root):
            raise StorageError("the root of a store is empty; give a folder")
        self._root = str(Path(root).absolute())
        self._io = io
        self._sync = sync
        with contextlib.suppress(OSError):  # missing, or not to be seen by us: told when it is used
            if not stat_module.S_ISDIR(os.stat(self._root).st_mode):
                raise StorageError(f"{self._root} is no folder, so it cannot be the root of a store; give a folder")
        if io == "gds":
            load_kvikio()
        self._device_choice: DeviceChoice | None = None
        self._device_lock = threading.RLock()
        self._pool = WorkerPool(num_threads, "tidegate-write")

    @property
    def url(self) -> str:
        """`file:///…`."""
        return Path(self._root).as_uri()

    def free_bytes(self) -> int | None:
        """Return the bytes that an ordinary user can still write here; None if nobody can tell."""
        return free_bytes(self._root)

    def prepare_for_device(self, device: int) -> str:
        """Choose how bytes of CUDA devices are written; see `DeviceStore.prepare_for_device`.

        With `io` "auto", both ways are measured once, on a temporary file in the root, and if KvikIO's is the faster,
        the writers of later `create`s are DeviceWriters. What keeps it from being measured is told, never raised.

        Raises:
            StorageError: `io` is "gds", and KvikIO cannot be used.
        """
        with self._device_lock:
            if self._device_choice is None:
                self._device_choice = choose(
                    self._io,
                    device,
                    pool=self._pool,
                    room_bytes=self.free_bytes(),
                    temporary_file=self._temporary_file,
                )
            return self._device_choice.note

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> LocalWriter:
        """Start a new object; see `Store.create`. Makes its folders and its temporary file."""
        return self._create(key, self._io, size_hint_bytes, replace=replace)

    def _create(self, key: str, io: IOMode, size_hint_bytes: int, *, replace: bool) -> LocalWriter:
        check_new_key(key)
        folders, name = _split(key)
        temporary = partial_name(name, secrets.token_hex(8))
        path = self._path(key)
        with mapped_errors("create", path, key, size_hint_bytes):
            chain, file = self._create_file(folders, temporary, key, io, size_hint_bytes)
        choice = self._device_choice
        is_for_device = self._io == "gds" if choice is None else choice.is_kvikio
        return (LocalDeviceWriter if is_for_device else LocalWriter)(
            chain,
            file,
            partial_name=temporary,
            name=name,
            path=path,
            key=key,
            pool=self._pool,
            replace=replace,
            sync=self._sync,
        )

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on; see `Store.read_into`."""
        reader = self.open_reader(key)
        try:
            reader.read_into(offset, out)
        finally:
            reader.close()

    def open_reader(self, key: str) -> LocalReader:
        """Open an object for reading; see `OpeningStore.open_reader`."""
        with self._open(key) as fd, mapped_errors("open", self._path(key), key):
            return LocalReader(os.dup(fd), self._path(key), key)

    def reads_into_devices(self, num_bytes: int) -> bool:
        """Whether KvikIO is to read so many bytes for CUDA devices; see `DeviceReadingStore.reads_into_devices`.

        It is faster than our own threads, which need the GIL between two pieces, wherever it can be used.
        """
        if self._io != "auto":
            return self._io == "gds"
        if num_bytes < _WORTH_KVIKIO_BYTES:
            return False
        try:
            load_kvikio()
        except StorageError:
            return False
        return True

    def read_all(self, key: str, *, limit_bytes: int) -> bytes:
        """Return a whole small object; see `Store.read_all`."""
        with self._open(key) as fd, mapped_errors("read", self._path(key), key):
            num_bytes = os.fstat(fd).st_size
            if num_bytes <= limit_bytes:
                out = bytearray(num_bytes)
                return bytes(out[: read_some(fd, 0, memoryview(out))])
        raise StoreIOError(
            f"{self._path(key)} has {num_bytes} bytes and may have {limit_bytes}: it is not what was written", key=key
        )

    def stat(self, key: str) -> ObjectStat:
        """Tell an object's length and age; see `Store.stat`."""
        check_key(key)
        folders, name = _split(key)
        with mapped_errors("look up", self._path(key), key), FolderChain(self._root, folders) as chain:
            return object_stat(key, self._plain_status(chain.fd, name, key))

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        """Put a small object if the present one is `expected`; see `Store.compare_and_put`.

        An absent object is put by a hard link, which fails if another was faster. That needs no lock, so it works on
        filesystems that have none. A swap holds the name's lock (`locks.name_lock`) from the comparison to the rename.
        `delete` holds it too, so the name cannot become free in between and the swap cannot run over a new object.
        """
        if expected is not None:
            self._check_present(key, expected)
        io: IOMode = "direct" if self._io == "direct" else "buffered"  # which spares a small object three system calls
        writer = self._create(key, io, len(data), replace=expected is not None)
        try:
            writer.append_here(data)
            if expected is None:
                writer.seal()
            else:
                with self._locked(key):
                    self._check_present(key, expected)
                    writer.seal()
        except BaseException:
            writer.abort()
            raise

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """Yield the regular files under a prefix, temporary and lock files included; see `Store.list`.

        Symbolic links, and names that no key can have, are not ours and are left out. A missing root is an empty store.
        """
        check_prefix(prefix)
        folders = [prefix]
        while folders:
            folder = folders.pop()
            with mapped_errors("list", self._path(folder), folder):
                stats, below = scan(self._root, folder)
            yield from stats
            folders += below

    def folders(self) -> Iterator[str]:
        """Yield the folders in the root; see `FolderStore.folders`."""
        with mapped_errors("list", self._root, ""):
            names = folder_names(self._root)
        yield from names

    def delete(self, key: str) -> None:
        """Remove an object; see `Store.delete`. A lock file whose lock is being held stays."""
        check_key(key)
        folders, name = _split(key)
        with (
            mapped_errors("delete", self._path(key), key),
            contextlib.suppress(FileNotFoundError),
            FolderChain(self._root, folders) as chain,
        ):
            with contextlib.suppress(FileNotFoundError):
                self._plain_status(chain.fd, name, key)
                self._unlink(chain.fd, name, key)
            lowest = chain.remove_empty()  # those of an object that is gone already, too
            if self._sync:
                sync_folder(lowest)

    def close(self) -> None:
        """Finish what is queued and end the threads. Blocks. May be called again."""
        self._pool.close()

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    def _create_file(
        self, folders: Sequence[str], name: str, key: str, io: IOMode, size_hint_bytes: int
    ) -> tuple[FolderChain, OutputFile]:
        races = 0
        while True:
            try:
                chain = FolderChain(self._root, folders, make=True)
                try:
                    return chain, OutputFile(
                        chain.fd, name, path=self._path(key), key=key, io=io, size_hint_bytes=size_hint_bytes
                    )
                except BaseException:
                    chain.remove_empty(chain.num_made)
                    chain.close()
                    raise
            except FileNotFoundError:  # a folder was removed as empty before it got its first file
                races += 1
                if races == _MAX_RACES:
                    raise

    @contextlib.contextmanager
    def _temporary_file(self) -> Iterator[OutputFile]:
        name = partial_name("device-probe", secrets.token_hex(8))  # so that `gc` finds what a killed process leaves
        chain, file = self._create_file((), name, name, self._io, 0)
        try:
            yield file
        finally:
            file.close()
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=chain.fd)
            chain.close()

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[int]:
        check_key(key)
        folders, name = _split(key)
        with mapped_errors("open", self._path(key), key), FolderChain(self._root, folders) as chain:
            self._plain_status(chain.fd, name, key)  # before the open: it can do something to a device
            fd = os.open(name, _READ_FLAGS, dir_fd=chain.fd)
        try:
            self._check_plain(os.fstat(fd), key)
            yield fd
        finally:
            os.close(fd)

    def _plain_status(self, folder_fd: int, name: str, key: str) -> os.stat_result:
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        self._check_plain(status, key)
        return status

    def _check_plain(self, status: os.stat_result, key: str) -> None:
        if not stat_module.S_ISREG(status.st_mode):
            raise InvalidKeyError(
                f"{self._path(key)} is no plain file but a folder, a link or a device, so it is no object", key=key
            )

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        folders, name = _split(key)
        with contextlib.ExitStack() as stack:
            with mapped_errors("lock", self._path(key), key):
                chain = stack.enter_context(FolderChain(self._root, folders))
                stack.enter_context(name_lock(chain.fd, name, key=key, required=True))
            yield

    def _check_present(self, key: str, expected: bytes) -> None:
        try:
            with self._open(key) as fd, mapped_errors("read", self._path(key), key):
                present = bytearray(len(expected) + 1)  # one more: a longer object is another one
                del present[read_some(fd, 0, memoryview(present)) :]
        except ObjectNotFoundError as exc:
            raise ObjectExistsError(f"{self._path(key)} is absent, so it is not what was expected", key=key) from exc
        if present != expected:
            raise ObjectExistsError(f"{self._path(key)} is not what was expected: another was faster", key=key)

    def _unlink(self, folder_fd: int, name: str, key: str) -> None:
        if not is_reserved(key):
            with name_lock(folder_fd, name, key=key, required=False):
                os.unlink(name, dir_fd=folder_fd)
        elif name.endswith(LOCK_SUFFIX):
            lock = try_lock(folder_fd, name)
            if lock is not None:
                release(folder_fd, name, lock)
        else:
            os.unlink(name, dir_fd=folder_fd)


def _split(key: str) -> tuple[Sequence[str], str]:
    *folders, name = key.split("/")
    return folders, name
