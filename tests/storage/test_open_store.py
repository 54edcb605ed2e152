"""From a path or a URL to a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kit.wrapping import content, put
from tidegate.storage import LocalStore, MemoryStore, StorageError, open_store


def test_a_path_is_a_folder(tmp_path: Path) -> None:
    for root in (tmp_path / "a", str(tmp_path / "b")):
        store = open_store(root)
        assert isinstance(store, LocalStore)
        assert not os.path.exists(root)  # made at the first write
        put(store, "x", b"1")
        assert (Path(root) / "x").read_bytes() == b"1"
        store.close()


def test_a_relative_path_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("runs")
    monkeypatch.chdir("/")
    put(store, "x", b"1")
    assert (tmp_path / "runs" / "x").read_bytes() == b"1"
    store.close()


def test_file_urls_are_percent_encoded(tmp_path: Path) -> None:
    root = tmp_path / "a b#é%20"
    store = open_store(root)
    put(store, "x", b"1")
    assert store.url == root.as_uri()
    for url in (store.url, store.url.replace("file://", "FILE://localhost")):
        again = open_store(url)
        assert content(again, "x") == b"1"
        again.close()
    store.close()


def test_a_path_object_is_never_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(Path("memory:/name"))
    put(store, "x", b"1")
    assert (tmp_path / "memory:" / "name" / "x").read_bytes() == b"1"
    store.close()


def test_memory_stores_go_by_name() -> None:
    store = open_store("memory://test-open-store")
    assert isinstance(store, MemoryStore)
    assert store.url == "memory://test-open-store"
    assert open_store("memory://test-open-store") is store
    assert open_store("memory://test-open-store-2") is not store


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "write s3://bucket/prefix"),
        ("s3://user@bucket/run", "write s3://bucket/prefix"),
        ("s3://bucket/run#x", "%23"),
        ("s3://bucket/run?colour=red", "'colour' is no option; there are endpoint_url"),
        ("s3://bucket/run?concurrency=many", "give a number"),
        ("s3://bucket/run?concurrency=0", "give 1 to 64"),
        ("s3://bucket/run?checksum=md5", "choose one of auto, crc64nvme"),
        ("gs://bucket/run", '"gs" is no scheme'),
        ("file://host/run", "file:///absolute"),
        ("file://", "file:///absolute"),
        ("file:///run?x", "%3F"),
        ("memory://", "give it a name"),
        ("", "is empty"),
    ],
)
def test_other_roots_are_refused(url: str, says: str) -> None:
    with pytest.raises(StorageError, match=says):
        open_store(url)


def test_a_file_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError, match="is no folder"):
        open_store(tmp_path / "file")


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="buffered"):
        LocalStore(tmp_path, io="mmap")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one thread"):
        LocalStore(tmp_path, num_threads=0)
