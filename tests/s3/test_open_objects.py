"""A load is held to the objects that it has opened: what is replaced or deleted meanwhile is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.scripted_s3 import Reply, Request, ScriptedS3
from tests.kit.seaweed import Seaweed
from tests.kit.states import filled
from tidegate.storage import OpeningStore, S3Options, S3Store

ENGINE: dict[str, Any] = {"codec": "raw", "chunk_bytes": 2 << 20}
FRAME_BYTES = 1 << 20
"""Longer ranges are of frames: index and manifest are shorter."""


class Front:
    """A real server, where something happens just before it is asked for the third frame."""

    def __init__(self, server: Seaweed) -> None:
        self.happens: Callable[[], None] | None = None
        self.frames: list[Request] = []
        self.scripted = ScriptedS3(self._answer, server.endpoint_url)

    def _answer(self, request: Request) -> Reply | None:
        first, _, last = request.headers.get("range", "bytes=0-0").removeprefix("bytes=").partition("-")
        if request.operation == "GetObject" and int(last) - int(first) >= FRAME_BYTES - 1:
            self.frames.append(request)
            if self.happens is not None and len(self.frames) == 3:
                self.happens()
        return None


@pytest.fixture
def front(aws_environment: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    front = Front(aws_environment)
    with front.scripted:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.scripted.endpoint_url)
        yield front


def state_of(value: float) -> dict[str, object]:
    """Of eight tensors, and of the same layout for every value."""
    return filled(value, 8, 2 << 20)


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_an_object_that_is_loaded_is_the_same_to_its_end(
    front: Front, aws_environment: Seaweed, run_prefix: str, change: str
) -> None:
    """Another state of the same layout would fit; it does not get in."""
    url = f"s3://bucket/{run_prefix}/model.tg"
    tidegate.save(state_of(1.0), url, codec="raw")
    tidegate.save(state_of(2.0), f"{url}.other.tg", codec="raw")
    client = aws_environment.client()

    def happen() -> None:
        at = {"Bucket": "bucket", "Key": f"{run_prefix}/model.tg"}
        if change == "deleted":
            client.delete_object(**at)
        else:
            client.copy_object(**at, CopySource=f"bucket/{run_prefix}/model.tg.other.tg")

    front.happens = happen
    with pytest.raises(tidegate.LoadError, match=f"model.tg was {change} while it was being read"):
        tidegate.load(url)
    client.close()
    front.happens = None
    if change == "replaced":
        assert_same_bits(tidegate.load(url), state_of(2.0))
    else:
        with pytest.raises(tidegate.CheckpointError, match=r"NoSuchKey|Not Found"):
            tidegate.load(url)


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_step_whose_object_changes_is_an_error(
    front: Front, aws_environment: Seaweed, run_prefix: str, change: str
) -> None:
    """The newest one is passed over for the one before it."""
    client = aws_environment.client()
    with tidegate.CheckpointEngine(f"s3://bucket/{run_prefix}", **ENGINE) as engine:
        for step in (1, 2, 3):
            engine.save_async(state_of(float(step)), step=step).result(60)
        listed = client.list_objects_v2(Bucket="bucket", Prefix=f"{run_prefix}/")["Contents"]
        names = sorted(entry["Key"] for entry in listed if entry["Key"].endswith(".tg"))

        def happen() -> None:
            if change == "deleted":
                client.delete_object(Bucket="bucket", Key=names[2])
            else:
                client.copy_object(Bucket="bucket", Key=names[2], CopySource=f"bucket/{names[0]}")

        front.happens = happen
        with pytest.raises(tidegate.LoadError, match=f"rank-00000.tg was {change} while it was being read"):
            engine.load(3)
        with pytest.warns(tidegate.CheckpointWarning, match="step 3 is damaged"):
            assert_same_bits(engine.load(), state_of(2.0))
    client.close()


def test_a_load_looks_up_each_object_once_more(front: Front, run_prefix: str) -> None:
    """And holds every frame to what it found."""
    with tidegate.CheckpointEngine(f"s3://bucket/{run_prefix}", **ENGINE) as engine:
        engine.save_async(state_of(1.0), step=1).result(60)
        front.scripted.requests.clear()
        assert_same_bits(engine.load(), state_of(1.0))
    heads = [request for request in front.scripted.requests if request.operation == "HeadObject"]
    assert sum(request.path.endswith(".tg") for request in heads) == 2, "for its index, and for its frames"
    assert len(front.frames) >= 8
    assert all(request.headers.get("if-match") for request in front.frames)


def test_opening_costs_one_call_and_reading_none_but_its_own(front: Front, run_prefix: str) -> None:
    store = S3Store("bucket", run_prefix, options=S3Options())
    assert isinstance(store, OpeningStore)
    store.compare_and_put("a", b"0123456789", expected=None)
    front.scripted.requests.clear()
    reader = store.open_reader("a")
    for offset in (0, 4):
        reader.read_into(offset, memoryview(bytearray(4)))
    reader.read_into(10, memoryview(b""))
    store.close()
    assert [request.operation for request in front.scripted.requests] == ["HeadObject", "GetObject", "GetObject"]
