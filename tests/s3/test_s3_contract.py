"""A store on S3 keeps the contract. Objects of several parts: test_uploads.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract.store_contract import StoreContract
from tests.kit.seaweed import Seaweed
from tests.kit.store_checks import TIMEOUT_S, listing
from tidegate.storage import S3Store, Store


class TestS3Store(StoreContract):
    """Nothing is at the server before `seal`, so there are no leftovers of what is shorter than a part."""

    keeps_what_it_opened = False

    @pytest.fixture
    def store(self, aws_environment: Seaweed, run_prefix: str) -> Iterator[Store]:
        store = S3Store(aws_environment.bucket, run_prefix)
        yield store
        store.close()

    def test_folders_of_several_pages(self, store: Store, aws_environment: Seaweed, run_prefix: str) -> None:
        """A server tells 1,000 at a time; a step that is not told would be taken for not committed."""
        assert isinstance(store, S3Store)
        client = aws_environment.client()
        names = [f"step-{step:010d}" for step in range(2_010)]

        def put(name: str) -> None:
            for key in ("COMMIT", "attempt/rank-00000.tg"):
                client.put_object(Bucket=aws_environment.bucket, Key=f"{run_prefix}/{name}/{key}", Body=b"x")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(put, names))
        client.close()
        assert sorted(store.folders()) == names
        assert len(listing(store)) == 2 * len(names)

    def test_an_object_is_invisible_until_it_is_sealed(self, store: Store) -> None:
        writer = store.create("a/b")
        writer.append(memoryview(b"x" * 5000)).result(TIMEOUT_S)
        assert list(store.list()) == []
        writer.seal()
        assert listing(store) == {"a/b": 5000}

    def test_leftovers_can_be_looked_at_and_deleted(self, store: Store) -> None:
        """An object that is shorter than a part leaves none: see test_uploads.py."""
