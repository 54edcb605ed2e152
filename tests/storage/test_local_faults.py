"""What the operating system may refuse: room, permission, single calls. The real thing where it can be had."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.kit.mounts import mounted
from tests.kit.processes import run_script
from tests.kit.store_checks import TIMEOUT_S, listing
from tests.kit.wrapping import content, put
from tidegate.storage import LocalStore, StorageError, StoreFullError, StoreIOError, StorePermissionError, output_file
from tidegate.storage.aligned import aligned_buffer
from tidegate.storage.workers import WorkerPool

IO = Literal["auto", "buffered"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> Iterator[LocalStore]:
    store = LocalStore(root)
    yield store
    store.close()


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("io", ["auto", "buffered"])
@pytest.mark.parametrize("hint_bytes", [0, 3 << 20], ids=["no-hint", "hint"])
@pytest.mark.parametrize("can_reserve", [True, False], ids=["reserved", "not-reserved"])
def test_A06_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, io: IO, hint_bytes: int, can_reserve: bool
) -> None:
    if not can_reserve:  # so that it is the write itself that fails, after a short one
        monkeypatch.setattr(output_file, "_allocate", lambda fd, offset, num_bytes: errno.EOPNOTSUPP)
    with mounted(tmp_path / "disk", "tmpfs", "size=2m") as folder:
        store = LocalStore(folder / "root", io=io)
        old = os.urandom(600_000)
        put(store, "step-1/a", old)
        buffer = aligned_buffer(512 << 10)
        writer = store.create("step-2/a", size_hint_bytes=hint_bytes)
        futures = [writer.append(buffer) for _ in range(6)]
        errors = [error for future in futures if (error := future.exception(TIMEOUT_S)) is not None]
        assert errors
        for error in errors:
            assert isinstance(error, StoreFullError | OSError)
            assert isinstance(error, StorageError)
            assert (error.errno, error.key) == (errno.ENOSPC, "step-2/a")
            assert str(folder / "root" / "step-2" / "a") in str(error)
            assert "[ENOSPC]" in str(error)
            assert f"{512 << 10} more bytes are needed" in str(error)
        with pytest.raises(StoreFullError) as caught:
            writer.seal()
        assert caught.value in errors
        writer.abort()
        assert files(folder / "root") == ["step-1", "step-1/a"]
        assert content(store, "step-1/a") == old
        put(store, "step-3/a", bytes(buffer), bytes(buffer))  # there is room again
        store.delete("step-1/a")
        put(store, "step-4/a", bytes(buffer))
        assert listing(store) == {"step-3/a": 1 << 20, "step-4/a": 512 << 10}
        store.close()


@pytest.mark.parametrize("can_reserve", [True, False], ids=["reserved", "not-reserved"])
def test_A06_a_small_object_does_not_fit_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_reserve: bool
) -> None:
    if not can_reserve:
        monkeypatch.setattr(output_file, "_allocate", lambda fd, offset, num_bytes: errno.EOPNOTSUPP)
    with mounted(tmp_path / "disk", "tmpfs", "size=64k") as folder:
        store = LocalStore(folder / "root")
        store.compare_and_put("s/COMMIT", b"old", expected=None)
        for key, expected in (("s/COMMIT", b"old"), ("t/COMMIT", None)):
            with pytest.raises(StoreFullError, match="ENOSPC") as caught:
                store.compare_and_put(key, bytes(100_000), expected=expected)
            assert (caught.value.errno, caught.value.key) == (errno.ENOSPC, key)
            assert str(folder / "root" / key) in str(caught.value)
        assert files(folder / "root") == ["s", "s/COMMIT"]
        store.compare_and_put("s/COMMIT", b"new", expected=b"old")
        assert content(store, "s/COMMIT") == b"new"
        store.close()


def test_A06_objects_can_be_deleted_from_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=1m,nr_inodes=8") as folder:
        store = LocalStore(folder / "root")
        put(store, "s/a", b"x" * 200_000)
        put(store, "b", b"x" * 200_000)
        with pytest.raises(OSError, match="No space left"):  # not even for the lock file
            for i in range(8):
                (folder / str(i)).touch()
        with pytest.raises(StoreFullError):
            store.create("c")
        store.delete("s/a")
        store.delete("b")
        assert files(folder / "root") == []
        store.close()


def test_A06_a_hint_that_is_too_high_does_not_fill_the_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=4m") as folder:
        store = LocalStore(folder)
        writer = store.create("a", size_hint_bytes=1 << 40)
        writer.append(aligned_buffer(1 << 20))
        writer.seal()
        assert listing(store) == {"a": 1 << 20}
        assert (folder / "a").stat().st_blocks * 512 == 1 << 20
        store.close()


LIMITED = """
import errno, os, resource, sys
from tidegate.storage import LocalStore, StoreFullError, output_file
if sys.argv[2] == "not-reserved":
    output_file._allocate = lambda fd, offset, num_bytes: errno.EOPNOTSUPP
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
store = LocalStore(sys.argv[1])
writer = store.create("s/a", size_hint_bytes=1 << 30)
writer.append(memoryview(b"x" * 900_000)).result()
error = writer.append(memoryview(b"x" * 900_000)).exception()
assert type(error) is StoreFullError, repr(error)
assert error.errno == errno.EFBIG
assert "[EFBIG]" in str(error) and "ulimit -f" in str(error)
again = writer.append(memoryview(b"x")).exception()
assert again is error
writer.abort()
assert os.listdir(sys.argv[1]) == []
writer = store.create("s/a", size_hint_bytes=1 << 30)
writer.append(memoryview(b"x" * 900_000))
writer.seal()
print(os.stat(sys.argv[1] + "/s/a").st_size)
"""


@pytest.mark.parametrize("how", ["reserved", "not-reserved"])
def test_A06_a_file_size_limit(root: Path, how: str) -> None:
    ended = run_script(LIMITED, str(root), how)
    assert (ended.stderr, ended.stdout) == ("", "900000\n")


DENIED = """
import os, sys
from tidegate.storage import LocalStore, StorePermissionError
root = sys.argv[1]
os.setgid(65534); os.setuid(65534)

def denied(call):
    try:
        call()
    except StorePermissionError as exc:
        assert isinstance(exc, PermissionError) and root in str(exc) and "[EACCES]" in str(exc), str(exc)
        return "denied"
    return "allowed"

store = LocalStore(root)
print(denied(lambda: store.create("new")))
print(denied(lambda: store.create("s/new")))
print(denied(lambda: store.delete("s/open")))
print(denied(lambda: store.compare_and_put("s/new", b"x", expected=None)))
print(denied(lambda: store.read_into("s/open", 0, memoryview(bytearray(1)))))
print(denied(lambda: store.read_into("s/closed", 0, memoryview(bytearray(1)))))
print(denied(lambda: store.stat("s/closed")))
print(denied(lambda: list(store.list())))
print(denied(lambda: LocalStore(root + "/private").stat("a")))
print(denied(lambda: list(LocalStore(root + "/private/below").list())))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_files(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder.stat().st_mode & 0o001 == 0:
            folder.chmod(0o755)
    root = tmp_path / "root"
    store = LocalStore(root)
    put(store, "s/open", b"x")
    put(store, "s/closed", b"x")
    (root / "s" / "closed").chmod(0o600)
    (root / "private").mkdir(mode=0o700)
    store.close()
    ended = run_script(DENIED, str(root))
    assert ended.stderr == ""
    denied, allowed = "denied", "allowed"
    assert ended.stdout.split() == [*[denied] * 4, allowed, denied, allowed, denied, denied, denied]
    assert files(root) == ["private", "s", "s/closed", "s/open"]


def test_a_read_only_filesystem(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=1m") as folder:
        store = LocalStore(folder)
        put(store, "s/a", b"x")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        calls: list[Callable[[], object]] = [
            lambda: store.create("b"),
            lambda: store.delete("s/a"),
            lambda: store.compare_and_put("s/a", b"y", expected=b"x"),
        ]
        for call in calls:
            with pytest.raises(StorePermissionError, match="EROFS"):
                call()
        assert content(store, "s/a") == b"x"
        store.close()


@pytest.mark.parametrize("step", [1, 4095, 4096, 5000])
def test_A06_short_writes_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: real(fd, view[: max(step, len(view) // 3)], offset))
    buffer = aligned_buffer(64 << 10)
    buffer[:] = os.urandom(64 << 10)
    put(store, "a", buffer[:], buffer[:100], buffer[:])
    assert content(store, "a") == bytes(buffer) + bytes(buffer[:100]) + bytes(buffer)


def test_a_write_that_stores_nothing_fails(store: LocalStore, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: 0)
    writer = store.create("a")
    with pytest.raises(StoreIOError, match="stored none"):
        writer.append(memoryview(b"x")).result(TIMEOUT_S)
    writer.abort()
    assert files(root) == []


def test_o_direct_may_be_refused_at_the_first_write(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    auto = LocalStore(root)
    writer = auto.create("a")
    for _ in range(3):
        writer.append(aligned_buffer(8192))
    writer.seal()
    assert listing(auto) == {"a": 3 * 8192}
    auto.close()
    direct = LocalStore(root, io="direct")
    writer = direct.create("b")
    with pytest.raises(StoreIOError, match='io="auto"'):
        writer.append(aligned_buffer(8192)).result(TIMEOUT_S)
    writer.abort()
    direct.close()
    assert files(root) == ["a"]


def test_after_a_failed_append_all_fail_with_its_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        offsets.append(offset)
        if offset == 100:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = store.create("a")
    writer.append(memoryview(bytes(100))).result(TIMEOUT_S)
    memory = bytearray(100)
    first = writer.append(memoryview(memory)).exception(TIMEOUT_S)
    assert isinstance(first, StoreIOError)
    assert first.errno == errno.EIO
    assert isinstance(first.__cause__, OSError)
    memory.append(0)  # a failed append lets go of its bytes, too
    assert writer.append(memoryview(bytes(100))).exception(TIMEOUT_S) is first
    for _ in range(2):
        with pytest.raises(StoreIOError) as caught:
            writer.seal()
        assert caught.value is first
    assert offsets == [0, 100]
    writer.abort()
    assert list(store.list()) == []


def test_a_failed_fsync_is_never_tried_again(store: LocalStore, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    put(store, "old", b"x")
    calls: list[int] = []

    def fsync(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    writer = store.create("a")
    writer.append(memoryview(b"x"))
    for _ in range(3):
        with pytest.raises(StoreIOError):
            writer.seal()
    assert len(calls) == 1
    writer.abort()
    assert files(root) == ["old"]


def test_an_object_whose_name_is_not_durable_is_dropped(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    put(store, "old", b"x")
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreIOError):
        store.compare_and_put("s/COMMIT", b"x", expected=None)
    assert files(root) == ["old"]


def test_a_filesystem_that_cannot_sync_folders(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    put(store, "s/a", b"x")
    store.delete("s/a")
    assert list(store.list()) == []


def test_a_filesystem_without_hard_links(store: LocalStore, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    def link(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreIOError, match="no hard links"):
        store.compare_and_put("s/a", b"x", expected=None)
    put(store, "t/a", b"x", replace=True)
    assert files(root) == ["t", "t/a"]


def test_a_link_whose_answer_is_lost_is_ours(store: LocalStore, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    real = os.link

    def link(*args: str, **kwargs: bool) -> None:
        real(*args, **kwargs)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    store.compare_and_put("s/a", b"x", expected=None)
    assert files(root) == ["s", "s/a"]
    assert content(store, "s/a") == b"x"


def test_a_filesystem_without_locks(store: LocalStore, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Commits and deletes go on; only a swap needs a lock."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    store.compare_and_put("s/a", b"x", expected=None)
    with pytest.raises(StoreIOError, match="ENOSYS"):
        store.compare_and_put("s/a", b"y", expected=b"x")
    assert content(store, "s/a") == b"x"
    store.delete("s/a")
    assert listing(store) == {}


@pytest.mark.parametrize("nth", [0, 1, 3])
def test_an_interrupt_in_an_append_does_not_hang_the_abort(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, root: Path, nth: int
) -> None:
    """Ctrl-C may come between any two pieces."""
    real = WorkerPool.submit
    count = iter(range(100))

    def submit(pool: WorkerPool, *args: object) -> object:
        if next(count) == nth:
            raise KeyboardInterrupt
        return real(pool, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(WorkerPool, "submit", submit)
    writer = store.create("s/a")
    with pytest.raises(KeyboardInterrupt):
        writer.append(aligned_buffer(16 << 20))
    ended = threading.Thread(target=writer.abort, daemon=True)
    ended.start()
    ended.join(TIMEOUT_S)
    assert not ended.is_alive()
    with pytest.raises(StorageError, match="cut short by KeyboardInterrupt"):
        writer.seal()
    assert files(root) == []


def test_a_file_that_shrinks_while_it_is_read(store: LocalStore, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    put(store, "a", b"x" * 1000)
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        os.truncate(root / "a", 600)
        return real(fd, [views[0][:500]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StoreIOError, match="cut short"):
        store.read_into("a", 0, memoryview(bytearray(1000)))
