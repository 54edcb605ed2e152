"""What is particular to objects in a folder: files, folders, threads, processes."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.mounts import mounted
from tests.kit.processes import run_script
from tests.kit.store_checks import TIMEOUT_S, leftovers, listing, race
from tests.kit.wrapping import content, put
from tidegate.storage import LocalStore, ObjectExistsError, StorageError, StoreIOError, StoreTimeoutError
from tidegate.storage.aligned import aligned_buffer
from tidegate.storage.locks import name_lock


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a" / "root"


@pytest.fixture
def store(root: Path) -> Iterator[LocalStore]:
    store = LocalStore(root)
    yield store
    store.close()


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_made_before_the_first_write(root: Path, store: LocalStore) -> None:
    assert list(store.list()) == []
    store.delete("a/b")
    with pytest.raises(FileNotFoundError):
        store.stat("a/b")
    assert store.free_bytes()
    assert not root.parent.exists()


def test_folders_come_and_go_with_their_objects(root: Path, store: LocalStore) -> None:
    put(store, "s/a/x", b"1")
    put(store, "s/a/y", b"2")
    put(store, "s/b/z", b"3")
    store.delete("s/a/x")
    assert files(root) == ["s", "s/a", "s/a/y", "s/b", "s/b/z"]
    store.delete("s/a/y")
    assert files(root) == ["s", "s/b", "s/b/z"]
    store.delete("s/b/z")
    assert files(root) == []
    assert root.is_dir()


def test_a_crash_between_file_and_folder_is_tidied_by_deleting_again(root: Path, store: LocalStore) -> None:
    (root / "s" / "a").mkdir(parents=True)
    store.delete("s/a/x")
    assert files(root) == []


def test_abort_removes_the_folders_that_it_made_only(root: Path, store: LocalStore) -> None:
    (root / "s").mkdir(parents=True)
    writer = store.create("s/a/b/x")
    assert (root / "s" / "a" / "b").is_dir()
    writer.abort()
    assert files(root) == ["s"]


def test_files_have_the_mode_of_the_umask(root: Path, store: LocalStore) -> None:
    before = os.umask(0o027)
    try:
        put(store, "a/b", b"x")
    finally:
        os.umask(before)
    assert (root / "a" / "b").stat().st_mode & 0o777 == 0o640
    assert (root / "a").stat().st_mode & 0o777 == 0o750
    assert (root / "a" / "b").stat().st_nlink == 1


def test_ages_come_from_the_files_and_are_never_negative(root: Path, store: LocalStore) -> None:
    put(store, "old", b"x")
    put(store, "new", b"x")
    now = (root / "old").stat().st_mtime
    os.utime(root / "old", (now - 5000, now - 5000))
    os.utime(root / "new", (now + 5000, now + 5000))
    ages = {stat.key: stat.age_s for stat in store.list()}
    assert 5000 <= ages["old"] < 5000 + TIMEOUT_S
    assert ages["new"] == 0
    assert store.stat("new").age_s == 0


def test_no_descriptors_are_leaked(store: LocalStore) -> None:
    put(store, "taken", b"x")
    gc.collect()  # what earlier tests have left
    before = num_fds()
    for i in range(200):
        writer = store.create(f"s/{i % 7}/x")
        writer.append(memoryview(b"x" * 100)).result(TIMEOUT_S)
        if i % 4 == 0:
            writer.seal()
            store.delete(f"s/{i % 7}/x")
        elif i % 4 == 1:
            writer.abort()
        elif i % 4 == 2:
            with pytest.raises(ObjectExistsError):
                store.compare_and_put("taken", b"y", expected=None)
    del writer
    gc.collect()
    assert num_fds() == before
    assert listing(store) == {"taken": 1}
    assert all(key.endswith(".partial") for key in leftovers(store))


def test_a_large_append_is_written_by_several_threads(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of at most 32 MiB, each written once, no two of them by one thread at the same time."""
    seen: list[tuple[int, int]] = []
    both = threading.Barrier(2)
    real = os.pwrite

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        if len(seen) < 2:
            seen.append((offset, view.nbytes))
            both.wait(TIMEOUT_S)
        else:
            seen.append((offset, view.nbytes))
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    buffer = aligned_buffer((40 << 20) + 4096)
    buffer[:: 1 << 20] = bytes(range(41))
    writer = store.create("a", size_hint_bytes=buffer.nbytes)
    writer.append(buffer).result(TIMEOUT_S)
    writer.seal()
    assert content(store, "a") == bytes(buffer)
    end = 0
    for offset, num_bytes in sorted(seen):
        assert offset == end
        assert num_bytes <= 32 << 20
        end += num_bytes
    assert end == buffer.nbytes


def test_aligned_bytes_go_past_the_page_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        store = LocalStore(root, io="direct")
        put(store, "try", b"")
    except StoreIOError as exc:
        pytest.skip(f"this filesystem has no O_DIRECT: {exc}")
    seen: list[tuple[int, int, bool]] = []
    real = os.pwrite

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        seen.append((offset, view.nbytes, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    buffer = aligned_buffer(65_536)
    writer = store.create("a")
    for start, end in ((0, 8192), (4096, 4196), (0, 3996), (8192, 12_288), (1, 4097)):
        writer.append(buffer[start:end]).result(TIMEOUT_S)
    writer.seal()
    assert seen == [
        (0, 8192, True),
        (8192, 100, False),
        (8292, 3996, False),
        (12_288, 4096, True),
        (16_384, 4096, False),
    ]
    store.close()


def test_an_unaligned_end_leaves_the_rest_direct(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        store = LocalStore(root, io="direct")
        put(store, "try", b"")
    except StoreIOError as exc:
        pytest.skip(f"this filesystem has no O_DIRECT: {exc}")
    seen: list[tuple[int, int, bool]] = []
    real = os.pwrite

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        seen.append((offset, view.nbytes, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    buffer = aligned_buffer(100_000)
    buffer[:] = os.urandom(100_000)
    writer = store.create("a")
    writer.append(buffer)
    writer.seal()
    assert seen == [(0, 98_304, True), (98_304, 1696, False)]
    assert content(store, "a") == bytes(buffer)
    store.close()


def test_buffered_never_goes_past_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(root, io="buffered")
    flags: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = store.create("a")
    writer.append(aligned_buffer(8192))
    writer.seal()
    assert flags == [0]
    store.close()


def test_a_filesystem_without_o_direct(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "ramfs") as folder:
        buffer = aligned_buffer(1 << 20)
        buffer[:] = os.urandom(1 << 20)
        store = LocalStore(folder / "root")
        writer = store.create("s/a", size_hint_bytes=4 << 20)
        writer.append(buffer)
        writer.seal()
        assert content(store, "s/a") == bytes(buffer)
        store.close()
        strict = LocalStore(folder / "root", io="direct")
        with pytest.raises(StoreIOError, match='io="auto"'):
            strict.create("t/b")
        assert files(folder / "root") == ["s", "s/a"]
        strict.close()


def test_folders_that_others_remove_are_made_again(store: LocalStore) -> None:
    """Each thread removes s/t as empty again and again, just when others are about to write into it."""

    def run(i: int) -> None:
        for k in range(40):
            writer = store.create(f"s/t/{i}")
            writer.append(memoryview(b"x"))
            if k % 2:
                writer.abort()
            else:
                writer.seal()
                store.delete(f"s/t/{i}")

    assert race(6, run) == [None] * 6
    assert list(store.list()) == []


def test_abort_skips_what_is_queued(store: LocalStore, root: Path) -> None:
    gate = threading.Event()
    blockers = [store._pool.submit(gate.wait, TIMEOUT_S) for _ in range(store._pool.num_threads)]
    writer = store.create("a")
    memory = bytearray(10_000)
    futures = [writer.append(memoryview(memory)) for _ in range(5)]
    aborting = threading.Thread(target=writer.abort)
    aborting.start()
    assert not any(future.done() for future in futures)
    gate.set()
    aborting.join(TIMEOUT_S)
    assert not aborting.is_alive()
    for blocker in blockers:
        blocker.result(TIMEOUT_S)
    for future in futures:
        assert isinstance(future.exception(TIMEOUT_S), StorageError) or future.exception() is None
    assert isinstance(futures[-1].exception(), StorageError)
    del futures
    memory.append(0)  # BufferError if anything still referred to it
    assert files(root) == []


def test_a_future_of_an_append_cannot_be_cancelled(store: LocalStore) -> None:
    writer = store.create("a")
    future = writer.append(memoryview(bytes(100)))
    assert not future.cancel()
    future.result(TIMEOUT_S)
    writer.abort()


def test_a_closed_store_takes_nothing_and_says_so(root: Path) -> None:
    store = LocalStore(root)
    writer = store.create("a")
    store.close()
    store.close()
    with pytest.raises(StorageError, match="was closed"):
        writer.append(memoryview(b"x")).result(TIMEOUT_S)
    with pytest.raises(StorageError, match="was closed"):
        writer.seal()
    writer.abort()
    assert files(root) == []


def test_a_lock_that_is_held_is_waited_for_so_long_only(root: Path, store: LocalStore) -> None:
    put(store, "a", b"x")
    folder = os.open(root, os.O_RDONLY)
    with name_lock(folder, "a", key="a", required=True):
        assert files(root) == [".a.lock", "a"]
        with pytest.raises(StoreTimeoutError) as caught, name_lock(folder, "a", key="a", required=True, timeout_s=0):
            pass
        assert caught.value.retryable
        store.delete(".a.lock")
        assert files(root) == [".a.lock", "a"]
    assert files(root) == ["a"]
    os.close(folder)


def test_a_lock_file_that_a_crash_has_left_does_no_harm(root: Path, store: LocalStore) -> None:
    put(store, "s/a", b"x")
    for _ in range(2):
        (root / "s" / ".a.lock").touch()
        assert leftovers(store) == ["s/.a.lock"]
        store.compare_and_put("s/a", b"x", expected=b"x")
        assert leftovers(store) == []
    (root / "s" / ".a.lock").touch()
    store.delete("s/.a.lock")
    store.delete("s/.a.lock")
    assert files(root) == ["s", "s/a"]


RACE = """
import os, sys
from tidegate.storage import LocalStore, ObjectExistsError

root, rounds = sys.argv[1], int(sys.argv[2])
pipes = [(os.pipe(), os.pipe()) for _ in range(4)]
for number, ((go, _), (_, answer)) in enumerate(pipes):
    if os.fork() == 0:
        store = LocalStore(root)
        while (turn := os.read(go, 16).decode()) != "end":
            present = None if turn == "0" else store.read_all("s/COMMIT", limit_bytes=100)
            os.write(answer, b"r")
            os.read(go, 1)
            try:
                store.compare_and_put("s/COMMIT", b"%d of process %d" % (int(turn), number), expected=present)
                os.write(answer, b"W")
            except ObjectExistsError:
                os.write(answer, b"-")
        os._exit(0)

def tell(text):
    for (_, go), _ in pipes:
        os.write(go, text)

def hear():
    return b"".join(os.read(answer, 1) for _, (answer, _) in pipes)

store = LocalStore(root)
for turn in range(rounds):
    tell(b"%d" % turn)
    assert hear() == b"rrrr"
    tell(b"!")
    answers = hear()
    winner = store.read_all("s/COMMIT", limit_bytes=100).decode()
    print(answers.decode().count("W"), winner == f"{turn} of process {answers.index(b'W')}")
tell(b"end")
"""


def test_of_four_processes_one_wins(root: Path, store: LocalStore) -> None:
    """The first round puts what is absent, the others swap what all have read."""
    ended = run_script(RACE, str(root), "20")
    assert ended.stderr == ""
    assert ended.stdout == "1 True\n" * 20
    assert files(root) == ["s", "s/COMMIT"]


KILLED = """
import os, signal, sys
from tidegate.storage import LocalStore
store = LocalStore(sys.argv[1])
writer = store.create("s/a", replace=True)
writer.append(memoryview(b"new" * 100_000)).result()
if sys.argv[2] == "lock":
    fd = os.open(sys.argv[1] + "/s/.a.lock", os.O_RDWR | os.O_CREAT)
    import fcntl
    fcntl.flock(fd, fcntl.LOCK_EX)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("with_lock", ["lock", "no lock"])
def test_A05_a_killed_writer_leaves_the_old_object(store: LocalStore, root: Path, with_lock: str) -> None:
    put(store, "s/a", b"old")
    assert run_script(KILLED, str(root), with_lock).returncode == -9
    assert listing(store) == {"s/a": 3}
    assert content(store, "s/a") == b"old"
    assert len(leftovers(store)) == (2 if with_lock == "lock" else 1)
    for key in leftovers(store):
        store.delete(key)
    store.compare_and_put("s/a", b"new", expected=b"old")
    assert files(root) == ["s", "s/a"]
