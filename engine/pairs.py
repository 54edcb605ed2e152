"""Find the extents whose bytes may follow from another's: by device, word type, shape, a few values, and names.

What is found is only a guess: every save looks at every byte (derived.py). So it is enough to search when a state is
new, and again when a guess has failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tidegate.codec.words import WordType

from .derived import DerivedChunks, Pair
from .errors import ConfigError
from .rules import BF16_OF_F32, F16_OF_F32, SAME, Rule, follow
from .table import StateTable

_MIN_BYTES = 1 << 10
_NUM_SAMPLES = 64
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROUNDINGS = {WordType.BF16: BF16_OF_F32, WordType.F16: F16_OF_F32}

DeriveOption = bool | Mapping[str, str]
"""Whether to look for pairs; or the paths of targets and, for each, that of its source."""


@dataclass(slots=True)
class PairFinder:
    """Finds the pairs of states that are saved one after another. Used by the training thread.

    Args:
        option: What the user asked for.
    """

    option: DeriveOption = True
    _signature: bytes = b""
    _pairs: Mapping[int, Pair] = field(default_factory=dict)
    _last: DerivedChunks | None = None
    _missed: frozenset[int] = frozenset()
    _doubtful: set[int] = field(default_factory=set)

    def of(self, table: StateTable) -> Mapping[int, Pair]:
        """Return the pairs of a state by target extent: the same object while nothing has changed.

        Reads a few values of each extent that may be of a pair, the first time and after a pair has failed: that waits
        for a GPU.
        """
        if self.option is False:
            return self._pairs
        is_new, failed = table.signature != self._signature, self._failed()
        if is_new or failed:
            self._doubtful = set() if is_new else self._doubtful | failed
            found = find_pairs(table, self.option, self._doubtful)
            if is_new or found != self._pairs:
                self._pairs = found
            self._signature = table.signature
        return self._pairs

    def watch(self, derived: DerivedChunks) -> None:
        """Remember what a save has of the pairs, to see whether they hold."""
        self._last = derived

    def _failed(self) -> set[int]:
        """The targets of chunks that failed in the last save and held before, or were tried for the first time."""
        if self._last is None:
            return set()
        missed, derivations = self._last.missed(), self._last.candidates.derivations
        sources = {source for chunk in missed - self._missed for source in derivations[chunk].sources}
        self._missed = missed
        if not sources:
            return set()
        return {target for target, pair in self._pairs.items() if pair.source in sources}


def find_pairs(
    table: StateTable, option: DeriveOption = True, doubtful: Collection[int] = frozenset()
) -> dict[int, Pair]:
    """Find pairs in a described state, by target extent. Waits for GPUs.

    Args:
        table: The state.
        option: What the user asked for.
        doubtful: Extents that were of a pair that may have failed. Where all values that are looked at are one and the
            same, as those of a young model's norms are, they get none: a wrong pair costs the whole chunk, and such
            extents are short, or take no room.

    Raises:
        ConfigError: The user has named a pair that is none.
    """
    finder = _Finder(table, doubtful)
    if isinstance(option, Mapping):
        return finder.named(option)
    return finder.search() if option else {}


class _Finder:
    def __init__(self, table: StateTable, doubtful: Collection[int]) -> None:
        self._table = table
        self._doubtful = doubtful
        self._sampled: dict[int, bytes] = {}
        self._first: dict[int, int] = {}
        for tensor, extent in enumerate(table.tensor_extent):
            self._first.setdefault(extent, tensor)

    def named(self, names: Mapping[str, str]) -> dict[int, Pair]:
        """Return the pairs that the user has named."""
        tensors = {self._table.fqn(i): i for i in range(len(self._table.tensor_spec))}
        pairs = {}
        for target, source in names.items():
            for name in (target, source):
                if name not in tensors:
                    raise ConfigError(f"derive names {name!r}, and the state has no tensor there")
            extents = [self._table.tensor_extent[tensors[name]] for name in (target, source)]
            rule = self._rule_between(*extents)
            if rule is None:
                raise ConfigError(
                    f"derive says that {target} follows from {source}, but it is neither a bf16 or fp16 tensor with as "
                    "many elements as that fp32 one on the same device, nor one of the same kind and length"
                )
            pairs[extents[0]] = Pair(rule, extents[1])
        sources = {pair.source for pair in pairs.values()}
        if sources & pairs.keys():
            raise ConfigError("derive names a tensor both as a target and as a source; name the first source instead")
        return pairs

    def search(self) -> dict[int, Pair]:
        """Look at a few values of all extents that may be of a pair."""
        pairs: dict[int, Pair] = {}
        plain = [extent for extent in range(len(self._table.extent_bytes)) if self._is_plain(extent)]
        for group in _groups(plain, self._rounding_key):
            pairs |= self._roundings(group)
        for group in _groups(plain, self._same_key):
            pairs |= self._copies([extent for extent in group if extent not in pairs], pairs)
        return pairs

    def _is_plain(self, extent: int) -> bool:
        """Whether an extent, not too short, is just the elements of its first tensor, each one word, in some order."""
        table, first = self._table, self._first[extent]
        if table.extent_bytes[extent] < _MIN_BYTES:
            return False
        tensor = table.tensors[first]
        return (
            table.extent_packings[extent] is None
            and table.tensor_offset[first] == 0
            and tensor.nbytes == table.extent_bytes[extent]
            and tensor.itemsize == table.extent_words[extent].itemsize
            and not (tensor.dtype.is_complex or tensor.is_neg())
        )

    def _rounding_key(self, extent: int) -> Hashable:
        table, word = self._table, self._table.extent_words[extent]
        numel = table.extent_bytes[extent] // word.itemsize
        return (table.extent_devices[extent], numel) if word is WordType.F32 or word in _ROUNDINGS else extent

    def _same_key(self, extent: int) -> Hashable:
        table = self._table
        return (table.extent_devices[extent], table.extent_words[extent], table.extent_bytes[extent])

    def _rule_between(self, target: int, source: int) -> Rule | None:
        table = self._table
        words = table.extent_words[target], table.extent_words[source]
        for rule in (*_ROUNDINGS.values(), SAME):
            fits = rule.fits(*words) and table.extent_bytes[source] == rule.ratio * table.extent_bytes[target]
            is_plain = table.extent_packings[target] is None and table.extent_packings[source] is None
            if fits and is_plain and target != source and table.extent_devices[target] == table.extent_devices[source]:
                return rule
        return None

    def _roundings(self, group: Sequence[int]) -> dict[int, Pair]:
        words = self._table.extent_words
        sources = [extent for extent in group if words[extent] is WordType.F32]
        pairs: dict[int, Pair] = {}
        for word, rule in _ROUNDINGS.items():
            targets = [extent for extent in group if words[extent] is word]
            if not targets or not sources:
                continue
            rounded = _rounded(self._samples(sources), rule)
            by_sample: dict[bytes, list[int]] = {}
            for source, sample in zip(sources, rounded, strict=True):
                by_sample.setdefault(sample, []).append(source)
            ranks = self._ranks(group)
            for target, sample in zip(targets, self._samples(targets), strict=True):
                if sample in by_sample and not (target in self._doubtful and self._is_one_value(target, sample)):
                    pairs[target] = Pair(rule, self._nearest(target, by_sample[sample], ranks))
        return pairs

    def _ranks(self, group: Sequence[int]) -> dict[int, int]:
        """Number extents within those of their word type and role, in the order of the state."""
        counts: Counter[tuple[WordType, str]] = Counter()
        ranks = {}
        for extent in sorted(group, key=self._first.__getitem__):
            kind = (self._table.extent_words[extent], self._table.extent_roles[extent])
            ranks[extent] = counts[kind]
            counts[kind] += 1
        return ranks

    def _copies(self, group: Sequence[int], pairs: Mapping[int, Pair]) -> dict[int, Pair]:
        """Pair extents that look the same with the first of them."""
        by_sample: dict[bytes, list[int]] = {}
        for extent, sample in zip(group, self._samples(group) if len(group) > 1 else [], strict=False):
            if not self._is_one_value(extent, sample):  # which takes no room anyway
                by_sample.setdefault(sample, []).append(extent)
        needed = {pair.source for pair in pairs.values()}
        found: dict[int, Pair] = {}
        for alike in by_sample.values():
            first = min(alike, key=lambda extent: (extent not in needed, self._first[extent]))
            found |= {extent: Pair(SAME, first) for extent in alike if extent != first and extent not in needed}
        return found

    def _is_one_value(self, extent: int, sample: bytes) -> bool:
        itemsize = self._table.extent_words[extent].itemsize
        return sample == sample[:itemsize] * (len(sample) // itemsize)

    def _samples(self, extents: Sequence[int]) -> list[bytes]:
        """Return some values, evenly spread, of extents of one device, word type and length."""
        missing = [extent for extent in extents if extent not in self._sampled]
        if missing:
            self._sampled.update(zip(missing, self._sample(missing), strict=True))
        return [self._sampled[extent] for extent in extents]

    def _sample(self, extents: Sequence[int]) -> list[bytes]:
        table = self._table
        numel = table.extent_bytes[extents[0]] // table.extent_words[extents[0]].itemsize
        step = max(1, numel // _NUM_SAMPLES)
        count = min(_NUM_SAMPLES, -(-numel // step))
        with torch.no_grad():
            # Whatever its strides, the tensor's elements fill its memory; so this takes them in the order of that.
            tensors = [table.tensors[self._first[extent]] for extent in extents]
            rows = [tensor.as_strided((count,), (step,), tensor.storage_offset()) for tensor in tensors]
            values = torch.stack([row.view(_CARRIERS[row.itemsize]) for row in rows])
            return _parted(values.cpu().view(torch.uint8).view(-1), len(extents))

    def _nearest(self, target: int, sources: Sequence[int], ranks: Mapping[int, int]) -> int:
        """Choose, of sources that look alike, the one whose path has most in common with the target's end.

        Where several have, as in a list of masters, the one that comes as late among its like as the target does: all
        weights of norms look alike at first, and each goes its own way later.
        """
        if len(sources) == 1:
            return sources[0]
        name, rank = _steps(self._table.fqn(self._first[target])), ranks[target]

        def likeness(source: int) -> tuple[int, int]:
            there = _steps(self._table.fqn(self._first[source]))
            return _common_end(name, there), -abs(ranks[source] - rank)

        return max(sources, key=likeness)


def _groups(extents: Sequence[int], key_of: Callable[[int], Hashable]) -> list[list[int]]:
    """Group extents by a key; those that are alone are left out."""
    groups: dict[Hashable, list[int]] = {}
    for extent in extents:
        groups.setdefault(key_of(extent), []).append(extent)
    return [group for group in groups.values() if len(group) > 1]


def _rounded(samples: Sequence[bytes], rule: Rule) -> list[bytes]:
    """Return what a rule makes of samples, which are equally long."""
    source = torch.frombuffer(bytearray(b"".join(samples)), dtype=torch.uint8)
    made = torch.empty(source.numel() // rule.ratio, dtype=torch.uint8)
    follow(rule, source, made)
    return _parted(made, len(samples))


def _parted(octets: torch.Tensor, count: int) -> list[bytes]:
    text, size = octets.numpy().tobytes(), octets.numel() // count
    return [text[i * size : (i + 1) * size] for i in range(count)]


def _steps(path: str) -> list[str]:
    return path.replace("[", ".").replace("]", "").replace('"', "").split(".")


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count
