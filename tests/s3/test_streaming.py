"""A save lasts as long as its slower stage, all connections are used, and memory does not grow with the object.

TIDEGATE_S3_STREAM_GIB says how long that object is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

import tidegate
from tests.kit.children import REPOSITORY
from tests.kit.slow_s3 import SlowS3
from tidegate.storage import S3Options, S3Store

BYTES_PER_S = 30e6
NUM_GIB = int(os.environ.get("TIDEGATE_S3_STREAM_GIB", "2"))
"""Of the object that streams: five times what may wait or travel at once."""
GIB = 1 << 30
STREAM = """
import json, sys
from contextlib import closing
from bench.held import Watch
from tidegate.storage import S3Options, S3Store

num_bytes, piece_bytes, options = int(sys.argv[1]), int(sys.argv[2]), S3Options(endpoint_url=sys.argv[3])
piece = memoryview(bytearray(b"x" * piece_bytes))
with closing(S3Store("bucket", "run", options=options)) as store:
    warm_up = store.create("small", replace=True)
    warm_up.append(piece)
    warm_up.seal()
    with Watch() as watch:
        writer = store.create("large", replace=True)
        for _ in range(num_bytes // piece_bytes):
            writer.append(piece)
        writer.seal()
print(json.dumps({"host_bytes": watch.host_bytes, "budget_bytes": options.in_flight_bytes}))
"""


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="needs boto3: pip install 'tidegate[dev]'")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")


@pytest.fixture
def server() -> Iterator[SlowS3]:
    with SlowS3(BYTES_PER_S) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["urllib3", "awscrt"])
def test_a_save_lasts_as_long_as_its_slower_stage(server: SlowS3, transport: str) -> None:
    if transport == "awscrt":
        pytest.importorskip("awscrt", reason="needs awscrt: pip install 'tidegate[dev]'")
    options = S3Options(
        endpoint_url=server.endpoint_url,
        part_bytes=5 << 20,
        concurrency=4,
        transport=transport,  # type: ignore[arg-type]
    )
    state = {f"w{i}": torch.randn(4 << 20).mul_(0.02).bfloat16() for i in range(20)}
    ratios = []
    with (
        closing(S3Store("bucket", "run", options=options)) as store,
        tidegate.CheckpointEngine(store, codec="zstd", chunk_bytes=4 << 20, keep_last=1) as engine,
    ):
        for step in range(3):
            report = engine.save_async(state, step=step).result()
            slower_s = max(report.encode_s, report.stored_bytes / BYTES_PER_S)
            ratios.append(report.wall_s / slower_s)
            if ratios[-1] <= 1.1:
                break
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)  # others' work comes between the stages; their sum is 2
    assert min(ratios) <= (1.6 if is_busy else 1.1), ratios
    assert min(ratios) > 0.9, "the server keeps its rate"
    assert server.counts()["at_once"] == 4, "all that may travel at once does"


@pytest.mark.slow
def test_a_long_object_streams_within_the_budget() -> None:
    with SlowS3() as server:
        done = subprocess.run(
            [sys.executable, "-c", STREAM, str(NUM_GIB * GIB), str(16 << 20), server.endpoint_url],
            cwd=REPOSITORY, env=os.environ.copy(), capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        counts = server.counts()
    found = json.loads(done.stdout)
    assert counts["num_bytes"] >= NUM_GIB * GIB
    assert counts["longest_part"] <= 64 << 20
    assert counts["num_parts"] <= 10_000
    assert 0 < found["host_bytes"] <= found["budget_bytes"]
