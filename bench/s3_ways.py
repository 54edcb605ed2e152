"""Ways to save a state to S3, as their users run them; each is measured in a process of its own.

python -m bench.s3_ways BUCKET NUM_BYTES FOLDER WAY is that process: it saves the state twice, as a run does again
and again, and prints what the second save took as a line of JSON. Several ways are taken one after the other.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import boto3
import torch
import torch.distributed.checkpoint as dcp

import tidegate

from .held import Watch
from .others import single_rank

State = dict[str, torch.Tensor]
NUM_TENSORS = 32


Save = Callable[[State], tuple[float, float]]
"""Saves a state; returns seconds until the caller could go on, and until the checkpoint is durable."""
Way = Callable[[str, Path], AbstractContextManager[Save]]
"""Opens an s3:// URL, with a folder for local files."""


def bf16_state(num_bytes: int) -> State:
    """Weights N(0, 0.02) in bf16, of NUM_TENSORS equal tensors."""
    torch.manual_seed(0)
    each = num_bytes // 2 // NUM_TENSORS
    return {f"weight.{i}": torch.randn(each).mul_(0.02).to(torch.bfloat16) for i in range(NUM_TENSORS)}


def tidegate_way(codec: str) -> Way:
    """`save_async` of an engine."""

    @contextmanager
    def opened(url: str, folder: Path) -> Iterator[Save]:
        with tidegate.CheckpointEngine(url, codec=codec) as engine:
            steps = itertools.count()

            def save(state: State) -> tuple[float, float]:
                start_s = time.perf_counter()
                future = engine.save_async(state, step=next(steps))
                stall_s = time.perf_counter() - start_s
                future.result()
                return stall_s, time.perf_counter() - start_s

            yield save

    return opened


@contextmanager
def upload_file(url: str, folder: Path) -> Iterator[Save]:
    """torch.save to a file, then boto3's upload_file."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    numbers = itertools.count()

    def save(state: State) -> tuple[float, float]:
        start_s = time.perf_counter()
        torch.save(state, folder / "state.pt")
        client.upload_file(str(folder / "state.pt"), bucket, f"{key}/{next(numbers)}.pt")
        wall_s = time.perf_counter() - start_s
        (folder / "state.pt").unlink()
        return wall_s, wall_s

    yield save
    client.close()


def connector_way(num_threads: int) -> Way:
    """dcp.async_save with s3torchconnector's writer."""

    @contextmanager
    def opened(url: str, folder: Path) -> Iterator[Save]:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client  # the writer itself takes no endpoint
        from s3torchconnector.dcp import S3StorageWriter

        region = os.environ["AWS_REGION"]
        config = S3ClientConfig(force_path_style=True)
        client = S3Client(region=region, endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
        urls = (f"{url}/{i}" for i in itertools.count())

        def save(state: State) -> tuple[float, float]:
            writer = S3StorageWriter(region, next(urls), thread_count=num_threads)
            writer.fs._client = client
            return _dcp(state, writer)

        with single_rank(folder):
            yield save

    return opened


@contextmanager
def fsspec(url: str, folder: Path) -> Iterator[Save]:
    """dcp.async_save with PyTorch's writer for fsspec, over s3fs."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    urls = (f"{url}/{i}" for i in itertools.count())
    with single_rank(folder):
        yield lambda state: _dcp(state, FsspecWriter(next(urls), endpoint_url=os.environ["AWS_ENDPOINT_URL"]))


def _dcp(state: State, writer: dcp.StorageWriter) -> tuple[float, float]:
    start_s = time.perf_counter()
    future = dcp.async_save(state, storage_writer=writer)
    stall_s = time.perf_counter() - start_s
    future.result()  # type: ignore[union-attr]
    return stall_s, time.perf_counter() - start_s


WAYS: dict[str, Way] = {
    "tidegate auto": tidegate_way("auto"),
    "tidegate zstd": tidegate_way("zstd"),
    "tidegate raw": tidegate_way("raw"),
    "torch.save + upload_file": upload_file,
    "DCP + s3torchconnector": connector_way(1),
    "DCP + s3torchconnector, 2 threads": connector_way(2),
    "DCP + s3fs": fsspec,
}


def bytes_there(bucket: str) -> int:
    """Bytes of all objects of a bucket."""
    client = boto3.client("s3")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    num_bytes = sum(entry["Size"] for page in pages for entry in page.get("Contents", ()))
    client.close()
    return num_bytes


def main() -> None:
    """Save the state twice by each way; the second time is what counts, and memory from before the first."""
    bucket, num_bytes, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("ignore")  # of deprecated names inside PyTorch
    state = bf16_state(num_bytes)
    for number, name in enumerate(sys.argv[4:]):
        own = folder / str(number)
        own.mkdir()
        with WAYS[name](f"s3://{bucket}/state-{number}", own) as save:
            with Watch() as watch:
                save(state)
                before_bytes = bytes_there(bucket)
                stall_s, wall_s = save(state)
            found = {"stall_s": stall_s, "wall_s": wall_s, "host_bytes": watch.host_bytes}
        print(json.dumps({"way": name, **found, "sent_bytes": bytes_there(bucket) - before_bytes}), flush=True)


if __name__ == "__main__":
    main()
