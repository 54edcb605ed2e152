"""Keys and files that would lead out of a store, or hang it (A24)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.wrapping import put
from tidegate.storage import InvalidKeyError, LocalStore, ObjectExistsError, StorageError
from tidegate.storage.keys import check_key, check_new_key, check_prefix, is_reserved, lock_name, partial_name

GOOD = ["a", "step-0000000001/0a1b/rank-00000.tg", "A.b_c=d+e-f", "...", ".a", "a" * 200, "/".join("abcdefgh")]
GOOD += ["my model (1).tg", "~", "%2e%2e", "Gewichte é １.tg"]
BAD = [
    "",
    "/",
    "a/",
    "/a",
    "a//b",
    ".",
    "..",
    "a/..",
    "../../secret",
    "a/./b",
    "/etc/hostname",
    "a\\b",
    "C:\\x",
    "a\0b",
    "a\n",
    "a\tb",
    "a\u202eb",
    "a\ud800",
    "a" * 201,
    "é" * 101,
    "/".join("abcdefghi"),
    "x" * 100_000,
]


@pytest.mark.parametrize("key", GOOD, ids=lambda key: key[:20])
def test_plain_keys_are_taken(key: str) -> None:
    check_key(key)
    check_new_key(key)
    check_prefix(key + "/")


@pytest.mark.parametrize("key", BAD, ids=lambda key: ascii(key[:20]))
def test_A24_other_keys_are_refused_by_name(key: str) -> None:
    for check in (check_key, check_new_key):
        with pytest.raises(InvalidKeyError) as caught:
            check(key)
        assert caught.value.key == key
        assert repr(key)[1:100] in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_leftovers_have_valid_keys_whatever_the_name() -> None:
    for name in ("a", "n" * 200, "..."):
        for key in (partial_name(name, "0" * 16), lock_name(name)):
            check_key("folder/" + key)
            assert is_reserved("folder/" + key)
            with pytest.raises(InvalidKeyError, match="the stores' own"):
                check_new_key("folder/" + key)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def store(root: Path) -> Iterator[LocalStore]:
    store = LocalStore(root)
    yield store
    store.close()


def calls(store: LocalStore, key: str) -> dict[str, Callable[[], object]]:
    return {
        "read_into": lambda: store.read_into(key, 0, memoryview(bytearray(1))),
        "read_all": lambda: store.read_all(key, limit_bytes=100),
        "stat": lambda: store.stat(key),
        "delete": lambda: store.delete(key),
        "swap": lambda: store.compare_and_put(key, b"new", expected=b"secret"),
    }


def make_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "outside" / "secret")


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "outside" / "not-there-yet")


def make_folder(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("make", [make_link, make_dangling_link, os.mkfifo, make_folder, make_socket])
def test_A24_what_is_no_plain_file_is_no_object(root: Path, store: LocalStore, make: Callable[[Path], None]) -> None:
    make(root / "a")
    before = os.lstat(root / "a")
    for name, call in calls(store, "a").items():
        with pytest.raises(InvalidKeyError) as caught:
            call()
        assert caught.value.key == "a", name
        assert str(root / "a") in str(caught.value)
    with pytest.raises(ObjectExistsError):
        store.compare_and_put("a", b"new", expected=None)
    assert list(store.list()) == []
    assert os.path.samestat(before, os.lstat(root / "a"))
    assert os.listdir(root.parent / "outside") == ["secret"]
    assert (root.parent / "outside" / "secret").read_bytes() == b"secret"


@pytest.mark.parametrize("is_file", [False, True], ids=["link", "file"])
def test_A24_no_link_and_no_file_is_walked_through(root: Path, store: LocalStore, is_file: bool) -> None:
    if is_file:
        (root / "a").write_bytes(b"x")
    else:
        (root / "a").symlink_to(root.parent / "outside")
    every = calls(store, "a/secret")
    every["create"] = lambda: store.create("a/new")
    every["list"] = lambda: list(store.list("a/"))
    for name, call in every.items():
        with pytest.raises(InvalidKeyError) as caught:
            call()
        assert caught.value.key.startswith("a/"), name
    assert [stat.key for stat in store.list()] == (["a"] if is_file else [])
    assert os.listdir(root.parent / "outside") == ["secret"]


def test_A24_a_link_in_place_of_an_object_is_replaced_and_not_followed(root: Path, store: LocalStore) -> None:
    make_link(root / "a")
    put(store, "a", b"new", replace=True)
    assert not (root / "a").is_symlink()
    assert (root / "a").read_bytes() == b"new"
    assert (root.parent / "outside" / "secret").read_bytes() == b"secret"


def test_A24_a_link_in_place_of_the_lock_is_not_followed(root: Path, store: LocalStore) -> None:
    put(store, "a", b"old")
    make_dangling_link(root / ".a.lock")
    with pytest.raises(InvalidKeyError):
        store.compare_and_put("a", b"new", expected=b"old")
    assert (root / "a").read_bytes() == b"old"
    assert os.listdir(root.parent / "outside") == ["secret"]


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    store = LocalStore(root.parent / "link")
    put(store, "a/b", b"x")
    assert (root / "a" / "b").read_bytes() == b"x"
    store.delete("a/b")
    assert os.listdir(root) == []
    store.close()


def test_foreign_names_are_not_listed_and_stay(root: Path, store: LocalStore) -> None:
    (root / "my\tnotes.txt").write_bytes(b"x")
    (root / "a\tb").mkdir()
    (root / "a\tb" / "c").write_bytes(b"x")
    deep = root.joinpath(*"abcdefgh")
    deep.mkdir(parents=True)
    (deep / "i").write_bytes(b"x")
    put(store, "a/z", b"1")
    assert [stat.key for stat in store.list()] == ["a/z"]
    store.delete("a/z")
    assert (deep / "i").read_bytes() == b"x"


def test_a_root_that_is_a_dangling_link_is_an_error(root: Path) -> None:
    (root.parent / "link").symlink_to(root.parent / "nowhere")
    store = LocalStore(root.parent / "link")
    with pytest.raises(StorageError):
        store.create("a")
    assert not (root.parent / "nowhere").exists()
    store.close()
