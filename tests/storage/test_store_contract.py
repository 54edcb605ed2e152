"""Every store and every wrapper keeps the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.store_contract import StoreContract
from tests.kit.reads import ReadingStore
from tests.kit.stores import (
    FailOnceStore,
    FlipStore,
    FullStore,
    GateStore,
    RecordingStore,
    SlowStore,
    TruncateStore,
    WrappedStore,
)
from tidegate.storage import LocalStore, MemoryStore, Store

WRAPPERS: list[Callable[[Store], WrappedStore]] = [
    FlipStore,
    TruncateStore,
    FailOnceStore,
    SlowStore,
    GateStore,
    FullStore,
    RecordingStore,
    ReadingStore,
]


class TestLocalStoreAuto(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = LocalStore(tmp_path / "root")
        yield store
        store.close()


class TestLocalStoreBuffered(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = LocalStore(tmp_path / "root", io="buffered", num_threads=1)
        yield store
        store.close()


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestInactiveWrappers(StoreContract):
    @pytest.fixture(params=WRAPPERS, ids=lambda wrapper: wrapper.__name__)
    def store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        store = request.param(MemoryStore())
        yield store
        store.close()


class TestInactiveWrappersTogether(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store: Store = LocalStore(tmp_path / "root", sync=False)
        for wrapper in WRAPPERS:
            store = wrapper(store)
        yield store
        store.close()
