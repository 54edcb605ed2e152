"""Who writes what: every shard once, copies shared out by bytes, whatever the ranks have in common."""

from __future__ import annotations

import pytest

from tidegate.errors import SaveError
from tidegate.shard_map import GlobalSpec
from tidegate.shard_plan import RankNames, RankPart, Share, share_out
from tidegate.sharded_manifest import ShardedManifest, dump_sharded, is_sharded, parse_sharded


def names_of(*tensors: tuple[str, int], values: tuple[str, ...] = ()) -> RankNames:
    names = tuple(name for name, _ in tensors)
    paths = {name: tuple(name.split(".")) for name in (*names, *values)}
    return RankNames(names, tuple(number for _, number in tensors), values, (len(names),) * len(values), paths)


def rows(num_rows: int, start: int, size: int, width: int = 4) -> tuple[GlobalSpec, tuple]:
    return GlobalSpec("float32", (num_rows, width)), ((start, 0), (size, width))


def written(parts: list[RankPart], names: dict[str, RankNames]) -> tuple[object, list[list[str]]]:
    shards, shares, counts = share_out(parts, names)
    found = []
    for part, share, count in zip(parts, shares, counts, strict=True):
        again = Share.from_json(share.to_json())
        here = names[part.names]
        mine = [here.tensors[i] for i in again.kept(here.class_of)] + [here.values[i] for i in again.values]
        assert len(mine) == count
        found.append(mine)
    text = dump_sharded(ShardedManifest(1, "a" * 32, {}, {}, (), shards))
    assert is_sharded(text)
    return shards, found


def holders(shards: object, name: str) -> list[int]:
    return next(list(layout.ranks) for found, _, layout in shards.tensors() if found == name)


def test_sharded_tensors_stay_where_they_are() -> None:
    names = names_of(("a", 0), ("b", 0), ("c", 1), values=("lr",))
    parts = [RankPart("n", (rows(8, 2 * r, 2), rows(5, 2 * r, min(2, 5 - 2 * r)))) for r in range(3)]
    parts.append(RankPart("n", (rows(8, 6, 2), rows(5, 5, 0))))
    shards, found = written(parts, {"n": names})
    assert found == [["a", "b", "c", "lr"], *[["a", "b", "c"]] * 3]
    assert len(shards.layouts) == 2
    assert shards.objects == {"lr": 0}


def test_copies_are_shared_out_by_bytes() -> None:
    """Two replicas of two shards; one tensor is as large as all others together."""
    names = names_of(("large", 0), *((f"s{i}", 1) for i in range(8)))
    parts = [RankPart("n", (rows(64, 32 * (r % 2), 32), rows(8, 4 * (r % 2), 4))) for r in range(4)]
    shards, found = written(parts, {"n": names})
    sizes = [sum(512 if name == "large" else 64 for name in mine) for mine in found]
    assert max(sizes) - min(sizes) <= 64 * 4 and sum(sizes) == 2 * 512 + 8 * 2 * 64
    for name in names.tensors:
        assert len(holders(shards, name)) == 2


def test_ranks_with_other_names_share_what_they_have_in_common() -> None:
    """Two pipeline stages with layers of their own, and a plain tensor on all."""
    one, two = names_of(("l0", 0), ("step", 1), values=("lr",)), names_of(("step", 0), ("l1", 1), values=("lr", "x"))
    whole = GlobalSpec("int64", ()), ((), ())
    parts = [RankPart("one", (rows(4, 2 * r, 2), whole)) for r in range(2)]
    parts += [RankPart("two", (whole, rows(4, 2 * r, 2))) for r in range(2)]
    shards, found = written(parts, {"one": one, "two": two})
    assert sorted(name for mine in found for name in mine) == ["l0", "l0", "l1", "l1", "lr", "step", "x"]
    assert shards.names == ["l0", "step", "l1"]
    assert holders(shards, "l1") == [2, 3]


def test_what_does_not_make_a_whole_is_refused() -> None:
    names = names_of(("a", 0))
    with pytest.raises(SaveError, match="hold 12 elements; the whole tensor has 20"):
        share_out([RankPart("n", (rows(5, r, 1),)) for r in range(3)], {"n": names})
    with pytest.raises(SaveError, match="disagree on a"):
        share_out([RankPart("n", (rows(4, 0, 4),)), RankPart("n", (rows(5, 0, 5),))], {"n": names})


def test_names_and_parts_travel_as_json() -> None:
    names = names_of(("a.b", 0), ("c", 1), values=("v",))
    names.paths["c"] = ("model", ["tuple", 0])  # type: ignore[index]
    assert RankNames.from_json(names.to_json()) == names
    part = RankPart(names.digest(), (rows(4, 2, 2), (GlobalSpec("int64", (), True), ((), ()))))
    assert RankPart.from_json(part.to_json()) == part


def test_a_thousand_ranks_cost_little() -> None:
    import time

    names = names_of(*((f"layer.{i}.weight", i % 16) for i in range(20_000)))
    parts = [RankPart("n", tuple(rows(1024 * (k + 1), r * (k + 1), k + 1) for k in range(16))) for r in range(1024)]
    began_s = time.perf_counter()
    shards, _, _ = share_out(parts, {"n": names})
    assert time.perf_counter() - began_s < 10
    assert len(shards.layouts) == 16
    text = dump_sharded(ShardedManifest(1, "a" * 32, {}, {}, (), shards))
    assert len(text) < 16 * 1024 * 40 + 20_000 * 40


def test_a_manifest_comes_back() -> None:
    from tidegate.container import ObjectRecord

    names = names_of(("a", 0), ("b", 0), values=("lr",))
    shards, _, _ = share_out([RankPart("n", (rows(4, 2 * r, 2),)) for r in range(2)], {"n": names})
    objects = tuple(ObjectRecord(f"k{r}", 4096, r) for r in range(2))
    manifest = ShardedManifest(3, "b" * 32, {"by": "x"}, {"note": [1]}, objects, shards)
    assert parse_sharded(dump_sharded(manifest), "key") == manifest


@pytest.mark.parametrize("loads", [[0, 0, 0], [7, 0, 3], [100, 0, 0], [5]])
@pytest.mark.parametrize("num_items", [1, 2, 10, 100])
def test_items_level_the_loads(loads: list[int], num_items: int) -> None:
    from tidegate.shard_plan import _level_counts

    counts = _level_counts(loads, num_items, 3)
    assert sum(counts) == num_items
    best = list(loads)
    for _ in range(num_items):
        best[best.index(min(best))] += 3
    assert max(load + 3 * count for load, count in zip(loads, counts, strict=True)) <= max(*best, 0)
