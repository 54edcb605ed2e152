"""What is particular to objects in memory."""

from __future__ import annotations

from tests.kit.wrapping import put
from tidegate.storage import MemoryStore


def test_ages_go_by_the_clock_given() -> None:
    now = [100.0]
    store = MemoryStore("timed", clock=lambda: now[0])
    put(store, "a", b"x")
    writer = store.create("b")
    now[0] = 130.0
    store.compare_and_put("c", b"x", expected=None)
    assert sorted(stat.age_s for stat in store.list()) == [0.0, 30.0, 30.0]
    writer.append(memoryview(b"x"))
    assert sorted(stat.age_s for stat in store.list()) == [0.0, 0.0, 30.0]
    now[0] = 90.0  # a clock that was set back
    assert {stat.age_s for stat in store.list()} == {0.0}


def test_names_are_for_messages_only() -> None:
    first, second = MemoryStore("same"), MemoryStore("same")
    put(first, "a", b"x")
    assert first.url == second.url == "memory://same"
    assert list(second.list()) == []
