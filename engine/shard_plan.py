"""Decide which rank writes what: every shard once, the copies of one shard shared out evenly by bytes. Pure data.

Ranks of one job have the same names, and most tensors are cut alike. So a rank's part is told by its *names*, which are
the same on most ranks and told once, and by a few *classes*: for each kind of tensor, which box of it the rank has.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from tidegate.codec.words import DTYPE_OF_NAME

from .box_spans import Box
from .errors import SaveError
from .json_fields import as_dict, as_ints, as_list, as_str
from .shard_map import GlobalSpec, PathSteps, ShardLayout, ShardMap, ShardMapMaker, check_shard_map
from .types import JSON

TensorClass = tuple[GlobalSpec, Box]
"""What tensors of a rank have in common: what they are as a whole, and which box of them the rank has."""


@dataclass(frozen=True, slots=True)
class RankNames:
    """The names of what a rank has.

    Attributes:
        tensors: Names of tensors.
        class_of: The class of each, by number.
        values: Names of what is no tensor.
        places: How many of the tensors come before each value.
        paths: Where each of both stands in the nested state.
    """

    tensors: tuple[str, ...]
    class_of: tuple[int, ...]
    values: tuple[str, ...]
    places: tuple[int, ...] = ()
    paths: Mapping[str, PathSteps] = field(default_factory=dict)

    def to_json(self) -> JSON:
        """Write it for the coordinator."""
        odd: JSON = {name: list(steps) for name, steps in self.paths.items() if steps != tuple(name.split("."))}
        return {
            "tensors": list(self.tensors), "classes": list(self.class_of), "values": list(self.values),
            "places": list(self.places), "paths": odd,
        }  # fmt: skip

    @classmethod
    def from_json(cls, node: JSON) -> RankNames:
        """Read what a rank has sent."""
        fields = as_dict(node)
        tensors, values = (tuple(as_str(name) for name in as_list(fields[key])) for key in ("tensors", "values"))
        odd = as_dict(fields["paths"])
        paths = {
            name: tuple(as_list(odd[name])) if name in odd else tuple(name.split(".")) for name in tensors + values
        }
        return cls(tensors, as_ints(fields["classes"]), values, as_ints(fields["places"]), paths)

    def digest(self) -> str:
        """Name this set of names."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json()).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank has: its names, by digest, and the class of tensors behind each number."""

    names: str
    classes: tuple[TensorClass, ...]

    def to_json(self) -> JSON:
        """Write it for the coordinator."""
        specs = [spec for spec, _ in self.classes]
        rows = itertools.chain.from_iterable((*spec.shape, *box[0], *box[1]) for spec, box in self.classes)
        return {
            "names": self.names,
            "dtypes": [spec.dtype for spec in specs],
            "grads": [int(spec.requires_grad) for spec in specs],
            "dims": [len(spec.shape) for spec in specs],
            "numbers": list(rows),
        }

    def digest(self) -> str:
        """Name this part."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json()).encode())

    @classmethod
    def from_json(cls, node: JSON) -> RankPart:
        """Read what a rank has sent."""
        fields = as_dict(node)
        numbers = iter(as_ints(fields["numbers"]))
        columns = (as_list(fields["dtypes"]), as_ints(fields["grads"]), as_ints(fields["dims"]))
        classes: list[TensorClass] = []
        for dtype, grad, dim in zip(*columns, strict=True):
            shape, starts, sizes = (tuple(itertools.islice(numbers, dim)) for _ in range(3))
            classes.append((GlobalSpec(as_str(dtype), shape, grad == 1), (starts, sizes)))
        return cls(as_str(fields["names"]), tuple(classes))


@dataclass(slots=True)
class Share:
    """What a rank writes of what it has.

    Attributes:
        rules: By class: of its tensors, counted in order, those from the first number up to the second are written.
        exceptions: Numbers of tensors for which the rule does not count, and whether they are written.
        values: Which values are written, by number.
    """

    rules: list[tuple[int, int]] = field(default_factory=list)
    exceptions: dict[int, bool] = field(default_factory=dict)
    values: list[int] = field(default_factory=list)

    def kept(self, class_of: Sequence[int]) -> list[int]:
        """Return the numbers of the tensors that are written."""
        seen: Counter[int] = Counter()
        kept = []
        for i, number in enumerate(class_of):
            first, end = self.rules[number]
            place = seen[number]
            seen[number] += 1
            if self.exceptions.get(i, first <= place < end):
                kept.append(i)
        return kept

    def to_json(self) -> JSON:
        """Write it for the rank."""
        return {
            "rules": [list(rule) for rule in self.rules],
            "exceptions": [[i, int(is_kept)] for i, is_kept in self.exceptions.items()],
            "values": list(self.values),
        }

    @classmethod
    def from_json(cls, node: JSON) -> Share:
        """Read what the coordinator has sent."""
        fields = as_dict(node)
        rules = [as_ints(rule) for rule in as_list(fields["rules"])]
        exceptions = [as_ints(pair) for pair in as_list(fields["exceptions"])]
        return cls(
            [(first, end) for first, end in rules],
            {i: is_kept == 1 for i, is_kept in exceptions},
            list(as_ints(fields["values"])),
        )


def share_out(parts: Sequence[RankPart], names: Mapping[str, RankNames]) -> tuple[ShardMap, list[Share], list[int]]:
    """Decide what each rank writes. Takes time by the tensors, and by ranks × classes, but not by their product.

    Args:
        parts: What each rank has.
        names: Every set of names that a rank has, by its digest.

    Returns:
        Who holds what; the share of each rank; and how many tensors and values each writes.

    Raises:
        SaveError: Ranks disagree on what a tensor is, or what they have does not make it whole.
    """
    return _Division(parts, names).divide()


_Key = tuple[tuple[str, int], ...]
"""Sets of names, and the class in each, that tensors have in common."""


class _Division:
    def __init__(self, parts: Sequence[RankPart], names: Mapping[str, RankNames]) -> None:
        self._parts = parts
        self._names = names
        self._ranks: dict[str, list[int]] = defaultdict(list)
        for rank, part in enumerate(parts):
            self._ranks[part.names].append(rank)
        self._maker = ShardMapMaker(len(parts))
        self._shares = [Share(rules=[(0, 0)] * len(part.classes)) for part in parts]
        self._num_items = [0] * len(parts)
        self._load_bytes = [0] * len(parts)
        self._sizes: dict[str, Mapping[int, int]] = {}
        self._number_of: dict[str, Mapping[str, int]] = {}

    def divide(self) -> tuple[ShardMap, list[Share], list[int]]:
        members = self._members()
        chosen: dict[str, tuple[int, int]] = {}
        for key in sorted(members, key=lambda key: -self._bytes_of(key) * len(members[key])):
            self._place(key, members[key], chosen)
        self._maker.add_numbers((name, chosen[name]) for name in _in_order(self._names, self._ranks))
        self._place_values()
        shards = self._maker.made
        shards.paths = {name: steps for digest in self._ranks for name, steps in self._names[digest].paths.items()}
        try:
            check_shard_map(shards)
        except ValueError as exc:
            raise SaveError(f"what the ranks have does not make a whole state: {exc}", stage="plan") from exc
        return shards, self._shares, self._num_items

    def _members(self) -> dict[_Key, list[str]]:
        """Find the tensors that the same sets of names have, and that have the same class there."""
        if len(self._ranks) == 1:
            (digest,) = self._ranks
            of_class: dict[int, list[str]] = defaultdict(list)
            for name, number in zip(self._names[digest].tensors, self._names[digest].class_of, strict=True):
                of_class[number].append(name)
            return {((digest, number),): names for number, names in of_class.items()}
        keys: dict[str, _Key] = {}
        for digest in self._ranks:
            here = self._names[digest]
            for name, number in zip(here.tensors, here.class_of, strict=True):
                keys[name] = (*keys.get(name, ()), (digest, number))
        found: dict[_Key, list[str]] = defaultdict(list)
        for name, key in keys.items():
            found[key].append(name)
        return found

    def _bytes_of(self, key: _Key) -> int:
        digest, number = key[0]
        return math.prod(self._parts[self._ranks[digest][0]].classes[number][1][1])

    def _place(self, key: _Key, members: Sequence[str], chosen: dict[str, tuple[int, int]]) -> None:
        """Decide for all tensors of one key."""
        spec, holders = self._holders(key, members[0])
        itemsize = DTYPE_OF_NAME[spec.dtype].itemsize if spec.dtype in DTYPE_OF_NAME else 1
        spans: dict[Box, list[tuple[int, int]]] = {}
        for box, ranks in holders.items():
            spans[box] = self._level(ranks, len(members), math.prod(box[1]) * itemsize)
        boxes = sorted(holders)
        spec_number = self._maker.spec_number(spec)
        offsets, sizes = tuple(box[0] for box in boxes), tuple(box[1] for box in boxes)
        cuts = sorted({0, *(end for span in spans.values() for _, end in span)})
        for first, end in itertools.pairwise(cuts):
            owners = tuple(_owner(holders[box], spans[box], first) for box in boxes)
            layout = self._maker.layout_number(ShardLayout(offsets, sizes, owners))
            chosen.update(dict.fromkeys(members[first:end], (spec_number, layout)))
        self._rule(key, members, holders, spans)

    def _holders(self, key: _Key, name: str) -> tuple[GlobalSpec, dict[Box, list[int]]]:
        """Return what the tensors are, and which ranks have each box of them."""
        holders: dict[Box, list[int]] = defaultdict(list)
        specs: dict[GlobalSpec, int] = {}
        for digest, number in key:
            for rank in self._ranks[digest]:
                spec, box = self._parts[rank].classes[number]
                holders[box].append(rank)
                specs.setdefault(spec, rank)
        if len(specs) > 1:
            (one, first), (other, second), *_ = specs.items()
            raise SaveError(
                f"ranks {first} and {second} disagree on {name}: {one.dtype}{list(one.shape)} there and "
                f"{other.dtype}{list(other.shape)} here",
                stage="plan",
                fqn=name,
            )
        return next(iter(specs)), holders

    def _level(self, ranks: Sequence[int], num_tensors: int, num_bytes: int) -> list[tuple[int, int]]:
        """Share tensors of one size out among ranks that all have them: the fullest gets no fuller than need be.

        Returns:
            By rank: the first tensor that it writes, and the one after its last.
        """
        if len(ranks) == 1:
            self._load_bytes[ranks[0]] += num_tensors * num_bytes
            self._num_items[ranks[0]] += num_tensors
            return [(0, num_tensors)]
        counts = _level_counts([self._load_bytes[rank] for rank in ranks], num_tensors, num_bytes)
        ends = list(itertools.accumulate(counts))
        for rank, count in zip(ranks, counts, strict=True):
            self._load_bytes[rank] += count * num_bytes
            self._num_items[rank] += count
        return [(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def _rule(
        self,
        key: _Key,
        members: Sequence[str],
        holders: Mapping[Box, Sequence[int]],
        spans: Mapping[Box, Sequence[tuple[int, int]]],
    ) -> None:
        """Say the decision as a rule where all tensors of a class obey it, else by exceptions."""
        span_of = {rank: span for box, ranks in holders.items() for rank, span in zip(ranks, spans[box], strict=True)}
        for digest, number in key:
            is_rule = len(key) == 1 and len(members) == self._class_sizes(digest)[number]
            for rank in self._ranks[digest]:
                first, end = span_of[rank]
                if is_rule:
                    self._shares[rank].rules[number] = (first, end)
                    continue
                numbers = self._numbers(digest)
                self._shares[rank].exceptions.update((numbers[name], True) for name in members[first:end])

    def _class_sizes(self, digest: str) -> Mapping[int, int]:
        if digest not in self._sizes:
            self._sizes[digest] = Counter(self._names[digest].class_of)
        return self._sizes[digest]

    def _numbers(self, digest: str) -> Mapping[str, int]:
        if digest not in self._number_of:
            self._number_of[digest] = {name: i for i, name in enumerate(self._names[digest].tensors)}
        return self._number_of[digest]

    def _place_values(self) -> None:
        place_of = {name: i for i, name in enumerate(self._maker.made.names, 1)}
        for digest, ranks in sorted(self._ranks.items(), key=lambda item: item[1][0]):
            rank, here = ranks[0], self._names[digest]
            for i, (name, place) in enumerate(zip(here.values, here.places, strict=True)):
                if name not in self._maker.made.objects:
                    self._maker.add_value(name, rank, place_of[here.tensors[place - 1]] if place else 0)
                    self._shares[rank].values.append(i)
                    self._num_items[rank] += 1


def _in_order(names: Mapping[str, RankNames], ranks: Mapping[str, Sequence[int]]) -> list[str]:
    """Return every tensor's name once: in the order of the lowest rank that has it."""
    digests = sorted(ranks, key=lambda digest: ranks[digest][0])
    return list(dict.fromkeys(name for digest in digests for name in names[digest].tensors))


def _owner(ranks: Sequence[int], spans: Sequence[tuple[int, int]], tensor: int) -> int:
    return next(rank for rank, (first, end) in zip(ranks, spans, strict=True) if first <= tensor < end)


def _level_counts(loads: Sequence[int], num_items: int, size: int) -> list[int]:
    """Add items of one size to loads so that the largest load is as small as can be; return how many go to each."""
    if len(loads) == 1 or size == 0:
        return [num_items, *[0] * (len(loads) - 1)]
    order = sorted(range(len(loads)), key=lambda i: loads[i])  # stable: the lowest of those that are equal
    level, total = 0, 0
    for k, i in enumerate(order, 1):
        total += loads[i]
        level = (total + num_items * size) // k
        if k == len(order) or level <= loads[order[k]]:
            break
    counts = [max(0, level - load) // size for load in loads]
    for i in sorted(order, key=lambda i: loads[i] + counts[i] * size)[: num_items - sum(counts)]:
        counts[i] += 1
    return counts
