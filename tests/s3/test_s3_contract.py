"""A store on S3 keeps the contract. Objects of several parts: test_uploads.py."""

from __future__ import annotations

from collections.abc import Iterator

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

    def test_an_object_is_invisible_until_it_is_sealed(self, store: Store) -> None:
        writer = store.create("a/b")
        writer.append(memoryview(b"x" * 5000)).result(TIMEOUT_S)
        assert list(store.list()) == []
        writer.seal()
        assert listing(store) == {"a/b": 5000}

    def test_leftovers_can_be_looked_at_and_deleted(self, store: Store) -> None:
        """An object that is shorter than a part leaves none: see test_uploads.py."""
