"""Ranks on two hosts, played by one: the same machine under two names, that share no memory."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

import tidegate
import tidegate.council
import tidegate.dcp_watch
import tidegate.frame_share
from tests.kit.crew import Crew
from tests.kit.reads import ReadingStore
from tests.kit.sharding import distributed, mesh_of, whole_bits, whole_tensors, zeros_like
from tidegate.board import serving_host
from tidegate.dcp import TidegateReader, TidegateWriter
from tidegate.storage import open_store

HOSTS = ("a", "b", "b", "a")
PLAIN = 1 << 17


@contextlib.contextmanager
def on_host(rank: int) -> Iterator[None]:
    """Make this process believe that it runs on its host; where rank 0 is, it has from the launcher, as always."""
    name = HOSTS[rank]
    with (
        mock.patch.object(socket, "gethostname", lambda: f"{name}.invalid"),
        mock.patch.object(tidegate.frame_share, "host_name", lambda: name),
        mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1"),
    ):
        yield


def whole_state() -> dict[str, object]:
    return {"x": whole_tensors(), "plain": torch.arange(1.0 * PLAIN), "step": 1}


def save(rank: int, root: str, by: str) -> None:
    state = {**whole_state(), "x": distributed(whole_tensors(), mesh_of(dist.get_world_size()), [Shard(0)])}
    with on_host(rank):
        if by == "dcp":
            with TidegateWriter(root, codec="raw", chunk_bytes=1 << 16) as writer:
                dcp.save(state, storage_writer=writer, checkpoint_id="step-1")
            return
        options = {"codec": "raw", "chunk_bytes": 1 << 16, "process_group": dist.group.WORLD}
        with tidegate.CheckpointEngine(root, **options) as engine:  # type: ignore[arg-type]
            engine.save_async(state, step=1).result()


def load(rank: int, root: str, by: str) -> tuple[int, dict[str, object]]:
    store = ReadingStore(open_store(root))
    x = distributed(whole_tensors(), mesh_of(dist.get_world_size()), [Replicate()])
    state = zeros_like({**whole_state(), "x": x})
    with on_host(rank):
        if by == "dcp":
            dcp.load(state, storage_reader=TidegateReader(store))
        else:
            into = {"x": state["x"], "plain": state["plain"]}
            with tidegate.CheckpointEngine(store, process_group=dist.group.WORLD) as engine:
                state = engine.load(into=into)
    store.close()
    return sum(read.num_bytes for read in store.reads if read.num_bytes > 4096), whole_bits(state)


@pytest.mark.parametrize("by", ["dcp", "engine"])
def test_saved_and_loaded_over_two_hosts(crew: Crew, tmp_path: Path, by: str) -> None:
    """Each host reads each frame once, and takes none from the other."""
    crew.run(4, save, str(tmp_path), by)
    frames_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.tg"))
    outcomes = crew.run(4, load, str(tmp_path), by)
    assert all(loaded == whole_bits(whole_state()) for _, loaded in outcomes)
    for host in ("a", "b"):
        read_bytes = sum(num_bytes for (num_bytes, _), its in zip(outcomes, HOSTS, strict=True) if its == host)
        assert PLAIN * 4 <= read_bytes <= frames_bytes, (host, by)


def test_a_save_by_one_is_loaded_by_the_other(crew: Crew, tmp_path: Path) -> None:
    crew.run(4, save, str(tmp_path), "engine")
    assert all(loaded == whole_bits(whole_state()) for _, loaded in crew.run(4, load, str(tmp_path), "dcp"))


def test_where_the_coordinator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert serving_host(["a", "a"], 0) == "localhost"
    assert serving_host(["a", "b"], 0) == "a"
    monkeypatch.setenv("MASTER_ADDR", "first")
    assert serving_host(["a", "b"], 0) == "first"
    assert serving_host(["a", "b"], 3) == "a", "that is where another rank is"
