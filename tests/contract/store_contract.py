"""What every store does. Subclass `StoreContract` and give it a `store` fixture; wrappers do so, too."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable

import pytest

from tests.contract.swap_contract import SwappingContract
from tests.kit.store_checks import TIMEOUT_S, leftovers, listing, race
from tests.kit.wrapping import content, put
from tidegate.storage import (
    FolderStore,
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStat,
    OpeningStore,
    StorageError,
    Store,
    StoreIOError,
    open_store,
)
from tidegate.storage.aligned import aligned_buffer

LENGTHS = (0, 1, 511, 4095, 4096, 4097, 65_536, 100_001)
BAD_KEYS = ("", "/", "/etc/hostname", "..", "../x", "a/../x", "a/./x", "a//x", "a/")
BAD_KEYS += ("a\\b", "a\0b", "a\tb", "a\u202eb", "a\n")


def random_bytes(num_bytes: int) -> bytes:
    return random.randbytes(num_bytes)


class HoldingContract:
    """How the contract looks at what an object holds."""

    def check_content(self, store: Store, key: str, wanted: bytes) -> None:
        """That the object holds these bytes. A store that keeps none overrides this."""
        assert content(store, key) == wanted


class WritingContract(HoldingContract):
    """create, append, seal, abort."""

    @pytest.mark.parametrize("num_bytes", LENGTHS)
    def test_what_is_sealed_is_read_back(self, store: Store, num_bytes: int) -> None:
        wanted = random_bytes(num_bytes)
        put(store, "step-1/a/rank-0.tg", wanted)
        self.check_content(store, "step-1/a/rank-0.tg", wanted)
        assert listing(store) == {"step-1/a/rank-0.tg": num_bytes}
        assert leftovers(store) == []

    def test_an_object_without_appends_is_empty(self, store: Store) -> None:
        store.create("a").seal()
        self.check_content(store, "a", b"")

    def test_appends_follow_each_other_whatever_their_alignment(self, store: Store) -> None:
        pieces = [random_bytes(random.choice(LENGTHS)) for _ in range(40)]
        put(store, "a", *pieces)
        self.check_content(store, "a", b"".join(pieces))

    def test_aligned_memory_and_unaligned_memory_mix(self, store: Store) -> None:
        buffer = aligned_buffer(1 << 20)
        buffer[:] = random_bytes(1 << 20)
        cuts = [0, 8192, 8292, 12_288, 65_536, 65_537, 1 << 20]
        writer = store.create("a", size_hint_bytes=1 << 20)
        for start, end in itertools.pairwise(cuts):
            writer.append(buffer[start:end])
        writer.append(buffer[4096:8192])
        writer.seal()
        self.check_content(store, "a", bytes(buffer) + bytes(buffer[4096:8192]))

    def test_a_hint_may_be_wrong(self, store: Store) -> None:
        for key, hint in (("low", 1), ("high", 1 << 22)):
            writer = store.create(key, size_hint_bytes=hint)
            writer.append(memoryview(b"x" * 10_000))
            writer.seal()
        assert listing(store) == {"low": 10_000, "high": 10_000}

    def test_an_object_is_invisible_until_it_is_sealed(self, store: Store) -> None:
        writer = store.create("a/b")
        writer.append(memoryview(b"x" * 5000)).result(TIMEOUT_S)
        assert listing(store) == {}
        with pytest.raises(ObjectNotFoundError):
            store.stat("a/b")
        with pytest.raises(ObjectNotFoundError):
            store.read_into("a/b", 0, memoryview(bytearray(1)))
        assert [key.startswith("a/.b.") and key.endswith(".partial") for key in leftovers(store)] == [True]
        writer.seal()
        assert listing(store) == {"a/b": 5000}

    def test_aborting_leaves_nothing(self, store: Store) -> None:
        writer = store.create("a/b/c")
        writer.append(memoryview(b"x" * 5000))
        writer.abort()
        writer.abort()
        assert list(store.list()) == []

    def test_aborting_after_the_seal_changes_nothing(self, store: Store) -> None:
        writer = store.create("a")
        writer.append(memoryview(b"abc"))
        writer.seal()
        writer.abort()
        self.check_content(store, "a", b"abc")

    @pytest.mark.parametrize("end", ["seal", "abort"])
    def test_a_writer_is_used_up_at_its_end(self, store: Store, end: str) -> None:
        writer = store.create("a")
        writer.seal() if end == "seal" else writer.abort()
        with pytest.raises(StorageError):
            writer.append(memoryview(b"x")).result(TIMEOUT_S)
        with pytest.raises(StorageError):
            writer.seal()

    def test_an_object_is_not_replaced_unasked(self, store: Store) -> None:
        put(store, "a", b"old")
        writer = store.create("a")
        writer.append(memoryview(b"new"))
        with pytest.raises(ObjectExistsError) as caught:
            writer.seal()
        assert caught.value.key == "a"
        writer.abort()
        self.check_content(store, "a", b"old")
        assert leftovers(store) == []

    def test_an_object_is_replaced_when_asked(self, store: Store) -> None:
        put(store, "a", b"old and longer")
        put(store, "a", b"new", replace=True)
        put(store, "b", b"first", replace=True)
        self.check_content(store, "a", b"new")
        self.check_content(store, "b", b"first")

    def test_of_several_writers_one_gets_the_name(self, store: Store) -> None:
        def write(i: int) -> None:
            writer = store.create("x/a")
            writer.append(memoryview(bytes([i]) * 10_000))
            try:
                writer.seal()
            except ObjectExistsError:
                writer.abort()
                raise

        raised = race(6, write)
        assert sum(error is None for error in raised) == 1
        self.check_content(store, "x/a", bytes([raised.index(None)]) * 10_000)
        assert leftovers(store) == []

    def test_the_bytes_are_the_callers_again_when_the_future_is_done(self, store: Store) -> None:
        memory = bytearray(b"a" * 70_000)
        view = memoryview(memory)
        writer = store.create("a")
        writer.append(view).result(TIMEOUT_S)
        view[:] = b"b" * 70_000
        view.release()
        memory.append(0)  # BufferError while anything refers to it
        writer.seal()
        self.check_content(store, "a", b"a" * 70_000)

    def test_read_only_and_typed_bytes_are_taken(self, store: Store) -> None:
        put(store, "a", b"read-only")
        writer = store.create("b")
        writer.append(memoryview(bytearray(range(16))).cast("I"))
        writer.seal()
        self.check_content(store, "a", b"read-only")
        self.check_content(store, "b", bytes(range(16)))


class NamingContract(HoldingContract):
    """stat, list, delete, and the keys."""

    def test_stat_tells_length_and_age(self, store: Store) -> None:
        put(store, "a", b"0123456789")
        stat = store.stat("a")
        assert isinstance(stat, ObjectStat)
        assert (stat.key, stat.num_bytes) == ("a", 10)
        assert 0 <= stat.age_s < TIMEOUT_S

    def test_what_is_absent_is_not_found(self, store: Store) -> None:
        put(store, "a/b", b"x")
        for key in ("b", "a/c", "c/b"):
            with pytest.raises(ObjectNotFoundError) as caught:
                store.stat(key)
            assert isinstance(caught.value, FileNotFoundError)
            assert caught.value.key == key
            assert key in str(caught.value)
            with pytest.raises(ObjectNotFoundError):
                store.read_into(key, 0, memoryview(bytearray(0)))

    def test_errors_can_be_pickled(self, store: Store) -> None:
        with pytest.raises(ObjectNotFoundError) as caught:
            store.stat("a")
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is ObjectNotFoundError
        assert (str(again), again.key, again.retryable) == (str(caught.value), "a", False)

    def test_list_goes_by_prefix(self, store: Store) -> None:
        assert list(store.list()) == []
        assert list(store.list("none/")) == []
        for key in ("top", "ab/c", "a/b", "a/b2/c", "a/b2/d"):
            put(store, key, key.encode())
        assert listing(store) == {"top": 3, "ab/c": 4, "a/b": 3, "a/b2/c": 6, "a/b2/d": 6}
        assert listing(store, "a/") == {"a/b": 3, "a/b2/c": 6, "a/b2/d": 6}
        assert listing(store, "a/b2/") == {"a/b2/c": 6, "a/b2/d": 6}
        assert all(0 <= stat.age_s < TIMEOUT_S for stat in store.list())

    def test_folders_are_told_once_each(self, store: Store) -> None:
        if not isinstance(store, FolderStore):
            pytest.skip("this store tells no folders")
        assert list(store.folders()) == []
        for key in ("top", "ab/c", "a/b", "a/b2/c", "a/b2/d"):
            put(store, key, key.encode())
        assert sorted(store.folders()) == ["a", "ab"]
        store.delete("ab/c")
        assert listing(store, "ab/") == {}
        assert "a" in list(store.folders())

    @pytest.mark.parametrize("prefix", ["a", "/", "../", "a/../", "a//"])
    def test_a_prefix_is_a_folder(self, store: Store, prefix: str) -> None:
        with pytest.raises(InvalidKeyError):
            list(store.list(prefix))

    def test_delete_removes_and_may_be_repeated(self, store: Store) -> None:
        put(store, "a/b", b"1")
        put(store, "a/c", b"2")
        store.delete("a/b")
        store.delete("a/b")
        store.delete("no/such/thing")
        assert listing(store) == {"a/c": 1}
        put(store, "a/b", b"again")
        self.check_content(store, "a/b", b"again")

    def test_leftovers_can_be_looked_at_and_deleted(self, store: Store) -> None:
        writer = store.create("a/" + "n" * 200)
        writer.append(memoryview(b"x" * 4096)).result(TIMEOUT_S)
        (key,) = leftovers(store)
        assert store.stat(key).num_bytes == 4096
        self.check_content(store, key, b"x" * 4096)
        store.delete(key)
        assert list(store.list()) == []
        with pytest.raises(StorageError):
            writer.seal()
        writer.abort()
        assert list(store.list()) == []

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_bad_key_is_refused_everywhere(self, store: Store, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.create(key),
            lambda: store.stat(key),
            lambda: store.read_into(key, 0, memoryview(bytearray(1))),
            lambda: store.read_all(key, limit_bytes=1),
            lambda: store.compare_and_put(key, b"x", expected=None),
            lambda: store.compare_and_put(key, b"x", expected=b"y"),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(InvalidKeyError) as caught:
                call()
            assert caught.value.key == key
            assert repr(key) in str(caught.value)
        assert list(store.list()) == []

    @pytest.mark.parametrize("key", [".a.1.partial", "x/.a.lock"])
    def test_names_of_leftovers_cannot_be_written(self, store: Store, key: str) -> None:
        with pytest.raises(InvalidKeyError):
            store.create(key)
        with pytest.raises(InvalidKeyError):
            store.compare_and_put(key, b"x", expected=None)

    def test_names_with_a_dot_in_front_can_be_written(self, store: Store) -> None:
        put(store, ".hidden", b"x")
        assert listing(store) == {".hidden": 1}


class ReadingContract:
    """read_into and read_all, for stores that keep what is written.

    Attributes:
        keeps_what_it_opened: Whether an object that is kept open can still be read after it was replaced or deleted.
            Where it cannot, that is an error, and never another object's bytes.
    """

    keeps_what_it_opened = True

    def test_appends_of_several_threads_stay_whole_and_in_order(self, store: Store) -> None:
        writer = store.create("a")
        num_threads, num_appends, length = 6, 20, 5003

        def write(i: int) -> None:
            for k in range(num_appends):
                writer.append(memoryview(bytes([i, k]) + bytes([i]) * (length - 2)))

        assert race(num_threads, write) == [None] * num_threads
        writer.seal()
        text = content(store, "a")
        seen: dict[int, list[int]] = {i: [] for i in range(num_threads)}
        for start in range(0, len(text), length):
            i, k = text[start], text[start + 1]
            assert text[start + 2 : start + length] == bytes([i]) * (length - 2)
            seen[i].append(k)
        assert seen == {i: list(range(num_appends)) for i in range(num_threads)}

    def test_ranges_are_read(self, store: Store) -> None:
        wanted = random_bytes(50_000)
        put(store, "a", wanted)
        for start, end in ((0, 0), (0, 1), (49_999, 50_000), (50_000, 50_000), (4095, 12_289), (7, 40_007)):
            out = bytearray(end - start)
            store.read_into("a", start, memoryview(out))
            assert bytes(out) == wanted[start:end]

    @pytest.mark.parametrize(("offset", "num_bytes"), [(0, 11), (10, 1), (11, 0), (5, 6), (-1, 1), (1 << 70, 1)])
    def test_a_range_that_the_object_does_not_have_is_an_error(self, store: Store, offset: int, num_bytes: int) -> None:
        put(store, "a", b"0123456789")
        with pytest.raises(StoreIOError) as caught:
            store.read_into("a", offset, memoryview(bytearray(num_bytes)))
        assert caught.value.key == "a"

    def test_an_object_that_is_kept_open_is_read(self, store: Store) -> None:
        if not isinstance(store, OpeningStore):
            pytest.skip("this store keeps no object open")
        with pytest.raises(ObjectNotFoundError):
            store.open_reader("a")
        put(store, "a", b"0123456789")
        reader = store.open_reader("a")
        try:
            assert race(4, lambda i: reader.read_into(i, memoryview(bytearray(6)))) == [None] * 4
            for offset, wanted in ((7, b"789"), (0, b"0123456789"), (10, b"")):
                out = bytearray(len(wanted))
                reader.read_into(offset, memoryview(out))
                assert out == wanted
            for offset, num_bytes in ((8, 3), (-1, 1), (11, 0), (1 << 70, 1)):
                with pytest.raises(StoreIOError) as caught:
                    reader.read_into(offset, memoryview(bytearray(num_bytes)))
                assert caught.value.key == "a"
        finally:
            reader.close()
            reader.close()

    @pytest.mark.parametrize("change", ["replaced", "deleted", "deleted and put anew"])
    def test_an_object_that_is_kept_open_is_never_another_one(self, store: Store, change: str) -> None:
        if not isinstance(store, OpeningStore):
            pytest.skip("this store keeps no object open")
        put(store, "a", b"0123456789")
        reader = store.open_reader("a")
        try:
            if change != "replaced":
                store.delete("a")
            if change != "deleted":
                put(store, "a", b"another one", replace=True)
            out = bytearray(3)
            for _ in range(2):
                if self.keeps_what_it_opened:
                    reader.read_into(7, memoryview(out))
                    assert out == b"789"
                else:
                    with pytest.raises(StorageError, match="deleted" if change == "deleted" else "replaced") as caught:
                        reader.read_into(7, memoryview(out))
                    assert caught.value.key == "a"
                    assert not caught.value.retryable
        finally:
            reader.close()
        if change != "deleted":
            reader = store.open_reader("a")
            reader.read_into(0, memoryview(out))
            assert out == b"ano"
            reader.close()

    def test_a_whole_object_is_read_up_to_a_limit(self, store: Store) -> None:
        for text in (b"", b"0123456789"):
            put(store, "a", text, replace=True)
            assert store.read_all("a", limit_bytes=10) == text
        with pytest.raises(StoreIOError) as caught:
            store.read_all("a", limit_bytes=9)
        assert caught.value.key == "a"
        with pytest.raises(ObjectNotFoundError):
            store.read_all("b", limit_bytes=9)

    def test_the_url_opens_the_same_store(self, store: Store) -> None:
        scheme = store.url.partition("://")[0]
        assert scheme in ("file", "memory", "s3")
        if scheme != "memory":
            put(store, "a", b"x")
            again = open_store(store.url)
            assert content(again, "a") == b"x"
            again.close()


class StoreContract(WritingContract, NamingContract, ReadingContract, SwappingContract):
    """All of it."""
