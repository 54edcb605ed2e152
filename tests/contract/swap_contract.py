"""What `compare_and_put` does in every store, alone and in races."""

from __future__ import annotations

from functools import partial

import pytest

from tests.kit.store_checks import leftovers, race
from tests.kit.wrapping import content
from tidegate.storage import ObjectExistsError, ObjectNotFoundError, Store


def _swap(store: Store, expected: bytes, values: list[bytes], i: int) -> None:
    store.compare_and_put("COMMIT", values[i], expected=expected)


class SwappingContract:
    """compare_and_put."""

    def test_it_puts_what_is_absent(self, store: Store) -> None:
        store.compare_and_put("a/COMMIT", b"one", expected=None)
        assert content(store, "a/COMMIT") == b"one"
        with pytest.raises(ObjectExistsError) as caught:
            store.compare_and_put("a/COMMIT", b"two", expected=None)
        assert caught.value.key == "a/COMMIT"
        assert isinstance(caught.value, FileExistsError)
        assert content(store, "a/COMMIT") == b"one"
        assert leftovers(store) == []

    def test_it_swaps_what_is_expected(self, store: Store) -> None:
        store.compare_and_put("a/COMMIT", b"one", expected=None)
        store.compare_and_put("a/COMMIT", b"", expected=b"one")
        store.compare_and_put("a/COMMIT", b"three", expected=b"")
        assert content(store, "a/COMMIT") == b"three"
        assert leftovers(store) == []

    @pytest.mark.parametrize("expected", [b"", b"on", b"onE", b"one1"])
    def test_it_leaves_anything_else_alone(self, store: Store, expected: bytes) -> None:
        store.compare_and_put("a/COMMIT", b"one", expected=None)
        with pytest.raises(ObjectExistsError):
            store.compare_and_put("a/COMMIT", b"two", expected=expected)
        assert content(store, "a/COMMIT") == b"one"
        assert leftovers(store) == []

    def test_it_does_not_swap_what_is_absent(self, store: Store) -> None:
        for key in ("COMMIT", "a/COMMIT"):
            with pytest.raises(ObjectExistsError):
                store.compare_and_put(key, b"two", expected=b"one")
        assert list(store.list()) == []

    def test_of_eight_puts_one_wins(self, store: Store) -> None:
        for turn in range(5):
            key = f"step-{turn}/COMMIT"
            raised = race(8, lambda i, key=key: store.compare_and_put(key, b"%d" % i, expected=None))
            assert [type(error) for error in raised if error is not None] == [ObjectExistsError] * 7
            assert content(store, key) == b"%d" % raised.index(None)
        assert leftovers(store) == []

    def test_of_eight_swaps_one_wins(self, store: Store) -> None:
        store.compare_and_put("COMMIT", b"start", expected=None)
        present = b"start"
        for turn in range(5):
            values = [b"%d-%d" % (turn, i) for i in range(8)]
            raised = race(8, partial(_swap, store, present, values))
            assert [type(error) for error in raised if error is not None] == [ObjectExistsError] * 7
            present = content(store, "COMMIT")
            assert present == values[raised.index(None)]
        assert leftovers(store) == []

    def test_a_reader_sees_the_old_or_the_new(self, store: Store) -> None:
        values = [b"x", b"y" * 3000]
        store.compare_and_put("COMMIT", values[0], expected=None)

        def run(i: int) -> None:
            for k in range(20):
                if i == 0:
                    store.compare_and_put("COMMIT", values[(k + 1) % 2], expected=values[k % 2])
                else:
                    assert store.read_all("COMMIT", limit_bytes=5000) in values

        assert race(3, run) == [None] * 3

    def test_puts_swaps_and_deletes_take_turns(self, store: Store) -> None:
        """No value is swapped away twice, and none that nobody put."""
        won: list[bytes] = []
        swapped: list[bytes] = []

        def run(i: int) -> None:
            for k in range(15):
                value = b"%d-%d" % (i, k)
                try:
                    if i == 0:
                        store.delete("COMMIT")
                    elif i % 2:
                        store.compare_and_put("COMMIT", value, expected=None)
                        won.append(value)
                    else:
                        present = store.read_all("COMMIT", limit_bytes=100)
                        store.compare_and_put("COMMIT", value, expected=present)
                        won.append(value)
                        swapped.append(present)
                except (ObjectExistsError, ObjectNotFoundError):
                    continue

        assert race(5, run) == [None] * 5
        assert len(set(swapped)) == len(swapped)
        assert set(swapped) <= set(won)
        assert leftovers(store) == []
