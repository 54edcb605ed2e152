"""Moments between two system calls, at which another process may step in. Here it does, every time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.wrapping import content, put
from tidegate.storage import (
    InvalidKeyError,
    LocalStore,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    local_writer,
    pieces,
)
from tidegate.storage.locks import release, try_lock


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> Iterator[LocalStore]:
    store = LocalStore(root)
    yield store
    store.close()


def test_a_folder_goes_before_it_gets_its_first_file(
    root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    removed: list[int] = []

    def open_late(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_CREAT and len(removed) < 5:
            os.rmdir(root / "s" / "t")
            removed.append(flags)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_late)
    put(store, "s/t/a", b"x")
    assert len(removed) == 5
    assert content(store, "s/t/a") == b"x"


def test_a_folder_always_goes_before_it_gets_its_first_file(
    root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def open_never(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_never)
    with pytest.raises(ObjectNotFoundError):
        store.create("s/a")
    assert os.listdir(root) == []


def test_a_folder_that_another_has_made_meanwhile_stays(
    root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def mkdir_late(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real(path, mode, dir_fd=dir_fd)
        if path == "s":
            raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "mkdir", mkdir_late)
    store.create("s/t/a").abort()
    assert [path.name for path in root.rglob("*")] == ["s"]


def test_a_lock_file_goes_before_it_is_locked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last holder has removed it, and another may hold a new one of that name."""
    root.mkdir()
    folder = os.open(root, os.O_RDONLY)
    real = fcntl.flock

    def flock_late(fd: int, operation: int) -> None:
        os.unlink(root / ".a.lock")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    assert try_lock(folder, ".a.lock") is None

    def flock_later(fd: int, operation: int) -> None:
        os.unlink(root / ".a.lock")
        (root / ".a.lock").touch()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_later)
    assert try_lock(folder, ".a.lock") is None
    monkeypatch.undo()
    fd = try_lock(folder, ".a.lock")
    assert fd is not None
    assert try_lock(folder, ".a.lock") is None
    release(folder, ".a.lock", fd)
    assert os.listdir(root) == []
    os.close(folder)


def test_another_swaps_before_the_lock_is_had(root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "a", b"old")
    real = fcntl.flock

    def flock_late(fd: int, operation: int) -> None:
        (root / "a").write_bytes(b"other")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with pytest.raises(ObjectExistsError):
        store.compare_and_put("a", b"new", expected=b"old")
    assert content(store, "a") == b"other"
    assert os.listdir(root) == ["a"]


def test_a_seal_comes_while_another_thread_appends(
    root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.create("a")
    writer.append(memoryview(b"x"))

    def piece_bytes(num_bytes: int, num_idle: int) -> int:
        writer.seal()
        return pieces.piece_bytes(num_bytes, num_idle)

    monkeypatch.setattr(local_writer, "piece_bytes", piece_bytes)
    with pytest.raises(StorageError, match="sealed already"):
        writer.append(memoryview(b"y"))
    writer.abort()
    assert content(store, "a") == b"x"


def test_A24_a_device_is_not_even_opened(root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    os.mkfifo(root / "a")
    real = os.open
    opened: list[str] = []

    def open_noted(path: str, flags: int, *args: int, **kwargs: int) -> int:
        opened.append(path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_noted)
    with pytest.raises(InvalidKeyError):
        store.read_all("a", limit_bytes=1)
    assert opened == [str(root)]


def test_A24_a_link_comes_before_the_open(root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "a", b"x")
    (root.parent / "secret").write_bytes(b"secret")
    real = os.open

    def open_late(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if path == "a":
            os.unlink(root / "a")
            os.symlink(root.parent / "secret", root / "a")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_late)
    with pytest.raises(InvalidKeyError):
        store.read_all("a", limit_bytes=100)


def test_a_fifo_comes_before_the_open(root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "a", b"x")
    real = os.open

    def open_late(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if path == "a":
            os.unlink(root / "a")
            os.mkfifo(root / "a")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_late)
    with pytest.raises(InvalidKeyError):
        store.read_into("a", 0, memoryview(bytearray(1)))
