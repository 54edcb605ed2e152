"""What else saves a state, as its users run it: torch.save, DCP in four ways, a loop over nvCOMP's Python API."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from .models import num_bytes as total_bytes
from .rig import say

State = dict[str, torch.Tensor]
Save = Callable[[State, Path], tuple[float, float]]
"""Saves a state below a path and waits for the end; returns seconds of stall, and until everything is written."""

_NVCOMP_TYPES = {torch.bfloat16: "<f2", torch.float16: "<f2", torch.float32: "<f4"}
_LEAST_BYTES = 4096  # step counters are not worth a call


@dataclass(frozen=True, slots=True)
class Other:
    """What one way to save took.

    Attributes:
        name: Of the way.
        num_bytes: Of the state that it saved.
        num_tensors: In that state.
        stalls_s: How long the training could not go on, of each save.
        walls_s: Until the checkpoint was written, of each save; not synced to a disk.
        stored_bytes: Bytes of the last checkpoint.
        error: What ended the saves early.
    """

    name: str
    num_bytes: int
    num_tensors: int
    stalls_s: list[float] = field(default_factory=list)
    walls_s: list[float] = field(default_factory=list)
    stored_bytes: int = 0
    error: str = ""

    def scaled_stall_s(self, num_bytes: int) -> float | None:
        """The shortest stall, for a state of `num_bytes` if it grows with the bytes; None if no save succeeded."""
        return min(self.stalls_s) * num_bytes / self.num_bytes if self.stalls_s else None


@contextmanager
def single_rank(folder: Path) -> Iterator[None]:
    """Make a process group of this process alone, which DCP's PROCESS mode asks for; allow it files enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # it sends a file descriptor for every tensor
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def torch_save(state: State, path: Path) -> tuple[float, float]:
    """Save with torch.save."""
    return _blocking(lambda: torch.save(state, path))


def dcp_save(state: State, path: Path) -> tuple[float, float]:
    """Save with dcp.save and its defaults."""
    return _blocking(lambda: dcp.save(state, checkpoint_id=path))


def dcp_async(state: State, path: Path) -> tuple[float, float]:
    """Save with dcp.async_save and its defaults: staging in this thread, writing in another."""
    return _dcp_async(state, path, AsyncCheckpointerType.THREAD, None)


def dcp_process(state: State, path: Path) -> tuple[float, float]:
    """Save with dcp.async_save that writes in another process. The first save starts it."""
    return _dcp_async(state, path, AsyncCheckpointerType.PROCESS, None)


class DcpPinned:
    """Saves with dcp.async_save and a stager that keeps page-locked memory, the fastest that DCP has."""

    def __init__(self) -> None:
        self._stager = DefaultStager(StagingOptions(use_shared_memory=False))

    def __call__(self, state: State, path: Path) -> tuple[float, float]:
        """Save. The stall ends when the staging has: the state must not change before."""
        return _dcp_async(state, path, AsyncCheckpointerType.THREAD, self._stager)

    def close(self) -> None:
        """Free the memory."""
        self._stager.close()


class NvcompLoop:
    """The short way to compress on a GPU: encode tensor after tensor with nvCOMP's Python API, and write each."""

    def __init__(self, algorithm: str) -> None:
        self._nvcomp = importlib.import_module("nvidia.nvcomp")
        self._algorithm = algorithm
        self._codecs: dict[torch.dtype, object] = {}

    def __call__(self, state: State, path: Path) -> tuple[float, float]:
        """Save."""
        return _blocking(lambda: self._write(state, path))

    def _write(self, state: State, path: Path) -> None:
        with path.open("wb") as file:
            for tensor in state.values():
                octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                if octets.numel() < _LEAST_BYTES:
                    file.write(octets.cpu().numpy().data)
                    continue
                encoded = self._codec(tensor.dtype).encode(self._nvcomp.as_array(octets))  # type: ignore[attr-defined]
                file.write(np.asarray(encoded.cpu()).data)

    def _codec(self, dtype: torch.dtype) -> object:
        if dtype not in self._codecs:
            typed = {"data_type": _NVCOMP_TYPES[dtype]} if self._algorithm == "ANS" else {}
            stream = torch.cuda.current_stream().cuda_stream
            self._codecs[dtype] = self._nvcomp.Codec(algorithm=self._algorithm, cuda_stream=stream, **typed)
        return self._codecs[dtype]


def measure(name: str, make: Callable[[], Save], state: State, folder: Path, num: int) -> Other:
    """Save up to `num` times below `folder`, removing each checkpoint. What fails is a finding, not an end. Blocks."""
    found = Other(name, total_bytes(state.values()), len(state))
    error, stored_bytes = "", 0
    save: Save | None = None
    try:
        save = make()
        for i in range(num):
            path = folder / f"other-{i}"
            _synchronize()
            stall_s, wall_s = save(state, path)
            found.stalls_s.append(stall_s)
            found.walls_s.append(wall_s)
            stored_bytes = _size_of(path)
            _remove(path)
            say(f"{name}: stall {stall_s:.3f} s, wall {wall_s:.3f} s of {found.num_bytes / 1e9:.2f} GB")
    except Exception as exc:  # noqa: BLE001 - how a baseline fails is part of the answer
        error = f"save {len(found.stalls_s) + 1}: {type(exc).__name__}: {exc}"[:500]
        say(f"{name}: {error}")
    if isinstance(save, DcpPinned):
        save.close()
    for path in folder.glob("other-*"):
        _remove(path)
    gc.collect()
    return Other(name, found.num_bytes, found.num_tensors, found.stalls_s, found.walls_s, stored_bytes, error)


def _dcp_async(
    state: State, path: Path, kind: AsyncCheckpointerType, stager: DefaultStager | None
) -> tuple[float, float]:
    start_s = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names inside PyTorch
        response = dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=kind, async_stager=stager)
        if isinstance(response, Future):
            upload = response
        else:
            response.staging_completion.result()
            upload = response.upload_completion
        _synchronize()
        stall_s = time.perf_counter() - start_s
        upload.result()
    return stall_s, time.perf_counter() - start_s


def _blocking(work: Callable[[], object]) -> tuple[float, float]:
    start_s = time.perf_counter()
    work()
    took_s = time.perf_counter() - start_s
    return took_s, took_s


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
