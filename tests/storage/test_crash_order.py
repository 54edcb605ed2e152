"""What a power cut may leave: the order of writing, syncing and naming, as the system calls are made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.storage import LocalStore
from tidegate.storage.aligned import aligned_buffer


class Calls:
    """Every call that matters after a power cut, passed on to the system, with the path and length at that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self._base = base
        for name in ("fsync", "link", "replace", "unlink", "ftruncate", "pwrite", "rmdir"):
            monkeypatch.setattr(os, name, self._spy(name))

    def _spy(self, name: str) -> object:
        real = getattr(os, name)

        def spy(*args: object, **kwargs: object) -> object:
            if name in ("fsync", "ftruncate", "pwrite"):
                result = real(*args, **kwargs)
                path = Path(os.readlink(f"/proc/self/fd/{args[0]}"))
                self._note(name, path, path.stat().st_size if path.is_file() else 0)
                return result
            folder = kwargs.get("dir_fd", kwargs.get("dst_dir_fd"))
            path = Path(os.readlink(f"/proc/self/fd/{folder}")) / str(args[-1])
            result = real(*args, **kwargs)
            self._note(name, path, 0)
            return result

        return spy

    def _note(self, name: str, path: Path, num_bytes: int) -> None:
        shown = os.path.relpath(path, self._base)
        self.seen.append((name, "PARTIAL" if shown.endswith(".partial") else shown, num_bytes))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path.resolve()


def test_seal_syncs_the_file_then_names_it_then_syncs_every_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(base / "new" / "root")
    calls = Calls(monkeypatch, base)
    writer = store.create("s/t/a", size_hint_bytes=1 << 20)
    assert [call[:2] for call in calls.seen] == [("fsync", "."), ("fsync", "new")]  # the root is durable at once
    calls.seen.clear()
    writer.append(aligned_buffer(8192)).result()
    writer.append(memoryview(b"x" * 100)).result()
    writer.seal()
    assert calls.seen == [
        ("pwrite", "PARTIAL", 1 << 20),
        ("pwrite", "PARTIAL", 1 << 20),
        ("ftruncate", "PARTIAL", 8292),
        ("fsync", "PARTIAL", 8292),
        ("link", "new/root/s/t/a", 0),
        ("unlink", "PARTIAL", 0),
        ("fsync", "new/root/s/t", 0),
        ("fsync", "new/root/s", 0),
        ("fsync", "new/root", 0),
        ("fsync", "new", 0),
    ]
    store.close()


def test_a_swap_is_as_durable(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(base)
    store.compare_and_put("COMMIT", b"old", expected=None)
    calls = Calls(monkeypatch, base)
    store.compare_and_put("COMMIT", b"newer", expected=b"old")
    assert [call[:2] for call in calls.seen] == [
        ("pwrite", "PARTIAL"),
        ("fsync", "PARTIAL"),
        ("replace", "COMMIT"),
        ("fsync", "."),
        ("fsync", ".."),
        ("unlink", ".COMMIT.lock"),
    ]
    store.close()


def test_a_delete_is_durable_before_the_next_one(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a power cut could undo the first of two and keep the second: a COMMIT without its objects."""
    store = LocalStore(base)
    store.compare_and_put("s/COMMIT", b"x", expected=None)
    store.create("s/t/a").seal()
    calls = Calls(monkeypatch, base)
    store.delete("s/COMMIT")
    store.delete("s/t/a")
    assert [call[:2] for call in calls.seen] == [
        ("unlink", "s/COMMIT"),
        ("unlink", "s/.COMMIT.lock"),
        ("fsync", "s"),
        ("unlink", "s/t/a"),
        ("unlink", "s/t/.a.lock"),
        ("rmdir", "s/t"),
        ("rmdir", "s"),
        ("fsync", "."),
    ]
    store.close()


def test_without_sync_nothing_is_synced(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(base, sync=False)
    calls = Calls(monkeypatch, base)
    store.compare_and_put("s/COMMIT", b"x", expected=None)
    store.compare_and_put("s/COMMIT", b"y", expected=b"x")
    store.delete("s/COMMIT")
    assert "fsync" not in {call[0] for call in calls.seen}
    store.close()
