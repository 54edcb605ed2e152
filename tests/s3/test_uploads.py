"""Objects of several parts: gathered, uploaded, completed, and aborted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from tests.kit.seaweed import Seaweed
from tests.kit.store_checks import TIMEOUT_S, leftovers, listing, race
from tests.kit.wrapping import content, put
from tidegate.storage import (
    ObjectExistsError,
    ObjectNotFoundError,
    S3Options,
    S3Store,
    StorageError,
    StoreFullError,
)
from tidegate.storage.s3_parts import Claim, Gatherer

MIB = 1 << 20
PART_BYTES = 5 * MIB
Opener = Callable[..., S3Store]


@pytest.fixture
def opened(aws_environment: Seaweed, run_prefix: str) -> Iterator[Opener]:
    stores: list[S3Store] = []

    def open_one(**options: object) -> S3Store:
        fields = {"part_bytes": PART_BYTES, "concurrency": 4, **options}
        stores.append(S3Store(aws_environment.bucket, run_prefix, options=S3Options(**fields)))  # type: ignore[arg-type]
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.mark.parametrize("checksum", ["crc64nvme", "crc32c", "crc32", "none"])
def test_appends_of_all_sizes_become_one_object(opened: Opener, checksum: str) -> None:
    if checksum in ("crc64nvme", "crc32c"):
        pytest.importorskip("awscrt", reason="needs awscrt: pip install 'tidegate[dev]'")
    store = opened(checksum=checksum)
    pieces = [random.randbytes(size) for size in (100, 3 * MIB, 11 * MIB + 7, 0, 4097, 6 * MIB, 13)]
    put(store, "a/b", *pieces)
    assert content(store, "a/b") == b"".join(pieces)
    assert listing(store) == {"a/b": sum(map(len, pieces))}
    assert leftovers(store) == []


def test_an_unfinished_upload_is_a_leftover(opened: Opener, aws_environment: Seaweed) -> None:
    store = opened()
    writer = store.create("a/b")
    writer.append(memoryview(bytes(PART_BYTES))).result(TIMEOUT_S)
    assert listing(store) == {}
    (key,) = leftovers(store)
    assert key.startswith("a/.b.")
    assert key.endswith(".partial")
    assert store.stat(key).num_bytes == PART_BYTES
    assert 0 <= store.stat(key).age_s < TIMEOUT_S
    with pytest.raises(ObjectNotFoundError):
        store.read_into(key, 0, memoryview(bytearray(1)))
    assert [stat.key for stat in store.list("a/")] == [key]
    assert list(store.list("b/")) == []
    store.delete(key)
    store.delete(key)
    assert list(store.list()) == []
    with pytest.raises(StorageError, match="the upload is gone"):
        writer.seal()
    writer.abort()
    with pytest.raises(ObjectNotFoundError):
        store.stat(key)


def test_aborting_leaves_no_upload(opened: Opener) -> None:
    store = opened()
    writer = store.create("a")
    futures = [writer.append(memoryview(bytes(PART_BYTES))) for _ in range(3)]
    writer.abort()
    assert all(future.done() for future in futures)
    assert list(store.list()) == []


def test_the_bytes_are_the_callers_again_when_the_future_is_done(opened: Opener) -> None:
    store = opened()
    memory = bytearray(b"a" * (7 * MIB))
    view = memoryview(memory)
    writer = store.create("a")
    writer.append(view).result(TIMEOUT_S)
    view[:] = b"b" * (7 * MIB)
    view.release()
    memory.append(0)  # BufferError while anything refers to it
    writer.seal()
    assert content(store, "a") == b"a" * (7 * MIB)


def test_of_several_uploads_one_gets_the_name(opened: Opener) -> None:
    store = opened()

    def write(i: int) -> None:
        writer = store.create("x/a")
        writer.append(memoryview(bytes([i]) * PART_BYTES))
        try:
            writer.seal()
        except ObjectExistsError:
            writer.abort()
            raise

    raised = race(3, write)
    assert sum(error is None for error in raised) >= 1
    assert {type(error) for error in raised} <= {type(None), ObjectExistsError}
    assert content(store, "x/a")[:1] in [bytes([i]) for i, error in enumerate(raised) if error is None]
    assert leftovers(store) == []


def test_an_upload_replaces_only_when_asked(opened: Opener) -> None:
    store = opened()
    put(store, "a", b"old")
    writer = store.create("a")
    writer.append(memoryview(bytes(PART_BYTES)))
    with pytest.raises(ObjectExistsError):
        writer.seal()
    writer.abort()
    assert content(store, "a") == b"old"
    put(store, "a", bytes(PART_BYTES), replace=True)
    assert listing(store) == {"a": PART_BYTES}
    assert leftovers(store) == []


def test_more_parts_than_the_server_takes_are_never_sent(opened: Opener) -> None:
    store = opened(part_bytes=40, least_part_bytes=40, max_parts=2)
    writer = store.create("a")
    with pytest.raises(StoreFullError, match="more than 2 parts; raise part_bytes"):
        for _ in range(100):
            writer.append(memoryview(bytes(2000))).result(TIMEOUT_S)
    with pytest.raises(StoreFullError):
        writer.seal()
    writer.abort()
    assert list(store.list()) == []


def test_a_small_limit_of_parts_makes_them_longer(opened: Opener, aws_environment: Seaweed, run_prefix: str) -> None:
    store = opened(max_parts=4)
    pieces = [random.randbytes(PART_BYTES) for _ in range(12)]
    put(store, "a", *pieces)
    assert content(store, "a") == b"".join(pieces)
    client = aws_environment.client()
    etag = client.head_object(Bucket="bucket", Key=f"{run_prefix}/a")["ETag"]
    assert 2 <= int(etag.strip('"').rpartition("-")[2]) <= 4
    client.close()


@pytest.mark.parametrize("max_parts", [10_000, 1_000])
def test_the_schedule_holds_large_objects_in_few_parts(max_parts: int) -> None:
    options = S3Options(max_parts=max_parts)
    least = [options.least_bytes(part) for part in range(max_parts)]
    assert sum(least) >= (4 << 40 if max_parts == 10_000 else 449 << 30)
    assert all(a <= b for a, b in itertools.pairwise(least))
    assert least[0] >= 5 * MIB
    assert 2 * options.target_bytes(max_parts) <= 5 << 30
    num_parts_of_6_gib = sum(total < 6 << 30 for total in itertools.accumulate(least))
    assert 2 * options.target_bytes(num_parts_of_6_gib) <= (64 * MIB if max_parts == 10_000 else 1 << 30)


def test_parts_are_equal_and_borrowed() -> None:
    gatherer = Gatherer(S3Options(part_bytes=100, least_part_bytes=40))
    claim = Claim()
    memory = bytes(range(250))
    gatherer.add(memoryview(memory)[:30], claim)  # copied
    gatherer.add(memoryview(memory)[30:], claim)
    parts = [part for _ in range(3) if (part := gatherer.cut(early=False)) is not None]
    assert [part.num_bytes for part in parts] == [250]  # cuts are multiples of 4096
    assert b"".join(bytes(view) for view in parts[0].views) == memory
    claim.drop()
    assert not claim.future.done()
    parts[0].release()
    assert claim.future.done()
    assert gatherer.num_bytes == 0
