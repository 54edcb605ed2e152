"""No room: the save says so, takes its leavings along, harms nothing, and the next one works (A06)."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import run_forked
from tests.kit.mounts import mounted
from tests.kit.stores import FailOnceStore, FullStore
from tidegate.errors import SaveOSError
from tidegate.storage import MemoryStore, StoreFullError
from tidegate.storage.local import LocalStore

CHUNK = 1 << 16
MIB = 1 << 20


def noise(num_bytes: int, seed: int) -> dict[str, torch.Tensor]:
    """A state that no codec makes smaller."""
    numbers = torch.Generator().manual_seed(seed)
    return {"x": torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=numbers)}


def files(root: Path) -> list[str]:
    """The names of all files."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_A06_a_full_disk(tmp_path: Path, codec: str) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=8m") as disk:
        root = disk / "run"
        with tidegate.CheckpointEngine(root, chunk_bytes=CHUNK, codec=codec) as engine:
            engine.save_async(noise(2 * MIB, 1), step=1).result(60)
            before = files(root)
            future = engine.save_async(noise(12 * MIB, 2), step=2)
            with pytest.raises(SaveOSError) as caught:
                future.result(60)
            assert caught.value.errno == errno.ENOSPC
            message = str(caught.value)
            assert "step 2" in message
            assert "ENOSPC" in message
            assert str(root) in message, "it says where"
            assert "bytes are needed" in message
            with pytest.raises(tidegate.SaveError):
                engine.wait()
            assert files(root) == before, "what was written is gone"
            assert_same_bits(engine.load(), noise(2 * MIB, 1))
            engine.save_async(noise(3 * MIB, 3), step=3)
            assert engine.wait() is not None
            assert_same_bits(engine.load(), noise(3 * MIB, 3))
            assert engine.steps() == [1, 3]


def test_A06_a_plain_save_on_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=8m") as disk:
        path = disk / "model.tg"
        tidegate.save(noise(2 * MIB, 1), path)
        with pytest.raises(SaveOSError, match="ENOSPC") as caught:
            tidegate.save(noise(12 * MIB, 2), path)
        assert caught.value.errno == errno.ENOSPC
        assert files(disk) == ["model.tg"]
        assert_same_bits(tidegate.load(path), noise(2 * MIB, 1))
        tidegate.save(noise(3 * MIB, 3), path)
        assert_same_bits(tidegate.load(path), noise(3 * MIB, 3))


def test_A06_room_ends_at_every_point_of_a_save() -> None:
    """In the frames, in the index, before the manifest, before the commit record, and just not at all."""
    whole = FullStore(MemoryStore())
    with tidegate.CheckpointEngine(whole, chunk_bytes=CHUNK, codec="raw") as engine:
        engine.save_async(noise(4 * CHUNK, 1), step=1).result(60)
        first_bytes = whole.used_bytes
        engine.save_async(noise(4 * CHUNK, 2), step=2).result(60)
    second_bytes = whole.used_bytes - first_bytes
    num_failed = 0
    rough = range(second_bytes - 3 * CHUNK // 2, second_bytes - 1500, 8191)
    fine = range(second_bytes - 1500, second_bytes + 8, 101)  # around the manifest and the commit record
    for room_bytes in (0, 1, CHUNK, 3 * CHUNK, *rough, *fine):
        store = FullStore(MemoryStore())
        with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK, codec="raw") as engine:
            engine.save_async(noise(4 * CHUNK, 1), step=1).result(60)
            before = sorted(stat.key for stat in store.list())
            store.capacity_bytes = store.used_bytes + room_bytes
            error = engine.save_async(noise(4 * CHUNK, 2), step=2).exception(60)
            if error is None:
                continue
            num_failed += 1
            assert isinstance(error, SaveOSError)
            assert error.errno == errno.ENOSPC
            with pytest.raises(tidegate.SaveError):
                engine.wait()
            assert sorted(stat.key for stat in store.list()) == before
            assert_same_bits(engine.load(), noise(4 * CHUNK, 1))
            store.capacity_bytes = None
            engine.save_async(noise(4 * CHUNK, 2), step=2).result(60)
            assert_same_bits(engine.load(), noise(4 * CHUNK, 2))
    assert num_failed > 20


@pytest.mark.parametrize("operation", ["create", "append", "seal", "compare_and_put"])
def test_A06_a_quota_that_is_used_up(tmp_path: Path, operation: str) -> None:
    store = FailOnceStore(LocalStore(tmp_path, sync=False))
    with tidegate.CheckpointEngine(store, chunk_bytes=CHUNK) as engine:
        engine.save_async(noise(MIB, 1), step=1).result(60)
        before = files(tmp_path)
        store.fail(operation, 1, StoreFullError("the quota is used up", errno=errno.EDQUOT))
        with pytest.raises(SaveOSError, match="the quota is used up") as caught:
            engine.save_async(noise(MIB, 2), step=2).result(60)
        assert caught.value.errno == errno.EDQUOT
        with pytest.raises(tidegate.SaveError):
            engine.wait()
        assert files(tmp_path) == before
        engine.save_async(noise(MIB, 2), step=2).result(60)
        assert_same_bits(engine.load(), noise(MIB, 2))


def with_a_file_size_limit(save: Callable[[Path], None], root: Path, reason: Path) -> None:
    """Save where no file may pass 1 MiB, as after `ulimit -f`: the write is cut short, then refused."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    try:
        save(root)
    except SaveOSError as exc:
        reason.write_text(f"{exc.errno} {exc}")


def save_step(root: Path) -> None:
    """Save 3 MiB as step 2."""
    with tidegate.CheckpointEngine(root, chunk_bytes=CHUNK) as engine:
        engine.save_async(noise(3 * MIB, 2), step=2).result(60)


def save_file(root: Path) -> None:
    """Save 3 MiB as a file."""
    tidegate.save(noise(3 * MIB, 2), root / "model.tg")


@pytest.mark.parametrize("save", [save_step, save_file])
def test_A06_a_file_size_limit_cuts_a_write_short(tmp_path: Path, save: Callable[[Path], None]) -> None:
    root, reason = tmp_path / "root", tmp_path / "reason"
    with tidegate.CheckpointEngine(root) as engine:
        engine.save_async(noise(MIB, 1), step=1)
    tidegate.save(noise(MIB, 1), root / "model.tg")
    before = files(root)
    assert run_forked(with_a_file_size_limit, save, root, reason) == 0
    number, message = reason.read_text().split(" ", 1)
    assert int(number) == errno.EFBIG
    assert os.fspath(root) in message
    assert "ulimit -f" in message
    assert files(root) == before
    assert_same_bits(tidegate.load(root / "model.tg"), noise(MIB, 1))
    with tidegate.CheckpointEngine(root) as engine:
        assert_same_bits(engine.load(), noise(MIB, 1))
